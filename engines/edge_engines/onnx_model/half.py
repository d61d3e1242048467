"""Turn the float graph into FP16 for TensorRT, with norms and what sums or squares left in FP32 (case C28).

Ours, because onnxruntime.transformers.float16 holds all weights in memory, changes sys.path when imported and rounds
the epsilon of a norm that is written out. Inputs and outputs keep their types. Which other nodes FP16 can't serve is
measured in magnitudes.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from onnx import TensorProto, helper

from edge_engines.onnx_model.data_file import DataFile
from edge_engines.onnx_model.names import FreshNames, value_names
from edge_engines.onnx_model.rewrite import drop_unused
from edge_engines.qdq.constants import Constants
from edge_engines.qdq.places import is_op

HALF_DATA = "half.data"
FLOAT, HALF = TensorProto.FLOAT, TensorProto.FLOAT16
_LARGEST = float(np.finfo(np.float16).max)  # a mask of -3.4e38 becomes -65504, not minus infinity

# Their results are as safe in FP16 as their inputs. Everything else computes in FP32, a norm among it, behind casts.
_IN_HALF = frozenset(
    (
        "MatMul", "Gemm", "Conv", "ConvTranspose", "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Where", "Relu",
        "LeakyRelu", "PRelu", "Clip", "Elu", "Selu", "Celu", "Gelu", "HardSigmoid", "HardSwish", "Mish", "Sigmoid",
        "Softsign", "Tanh", "Erf", "ThresholdedRelu", "Softmax", "MaxPool", "AveragePool", "GlobalMaxPool",
        "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Concat", "Split", "Slice", "Gather",
        "GatherElements", "GatherND", "Expand", "Tile", "Pad", "Identity", "DepthToSpace", "SpaceToDepth", "Max", "Min",
        "Trilu",
    )
)  # fmt: skip
# A norm that is written out: these, and the arithmetic next to them.
_NORM_CORE = ("Sqrt", "ReduceMean", "ReduceSum", "ReduceSumSquare", "ReduceL2", "Pow", "Reciprocal")
_NORM_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Max", "Clip")


def to_half(
    model: onnx.ModelProto, folder: Path, types: Mapping[str, int], in_fp32: Collection[str] = ()
) -> onnx.ModelProto:
    """Return the graph in FP16; its constants go to half.data in `folder`, where the data of `model` lies.

    `types` are those of `value_types`, `in_fp32` the names of nodes that have to stay in FP32 besides those that always
    do. No node may hold a graph of its own.
    """
    with (folder / HALF_DATA).open("wb") as data:
        constants = Constants(model, folder)
        kept = {*in_fp32, *_norm_nodes(model.graph), *_shape_nodes(model.graph, constants)}
        writer = _HalfWriter(model, types, constants, kept, data)
        nodes = [made for node in model.graph.node for made in writer.rewrite(node)]
    made = onnx.ModelProto()
    made.CopyFrom(model)
    made.graph.ClearField("node")
    made.graph.ClearField("value_info")
    made.graph.node.extend([*nodes, *writer.casts_of_outputs()])
    made.graph.initializer.extend(writer.constants)
    drop_unused(made.graph)
    return made


class _HalfWriter:
    """Rewrites nodes in order; knows under which name each value exists in FP32 and in FP16."""

    def __init__(
        self,
        model: onnx.ModelProto,
        types: Mapping[str, int],
        constants: Constants,
        fp32_nodes: Collection[str],
        data: BinaryIO,
    ) -> None:
        self._types, self._given = types, constants
        self._fp32_nodes = fp32_nodes
        self._outputs = {value.name for value in model.graph.output}
        self._fresh = FreshNames(value_names(model.graph))
        self._file = DataFile(data, HALF_DATA)
        self.constants: list[TensorProto] = []  # that were converted
        self._forms: dict[tuple[str, int], str] = {}
        self._new_nodes: list[onnx.NodeProto] = []
        self._forms |= {(v.name, FLOAT): v.name for v in model.graph.input}
        self._forms |= {(name, FLOAT): name for name in constants}

    def rewrite(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """Return the node in its precision, behind the casts that it needs."""
        self._new_nodes = []
        kind = HALF if is_op(node, *_IN_HALF) and node.name not in self._fp32_nodes else FLOAT
        made = onnx.NodeProto()
        made.CopyFrom(node)
        for i, name in enumerate(node.input):
            if self._types.get(name) == FLOAT:
                made.input[i] = self._form(name, kind)
        for i, name in enumerate(node.output):
            if self._types.get(name) == FLOAT:
                made.output[i] = self._new(name) if kind == HALF and name in self._outputs else name
                self._forms[name, kind] = made.output[i]
        return [*self._new_nodes, made]

    def casts_of_outputs(self) -> list[onnx.NodeProto]:
        """Return the casts that give the graph its FP32 outputs back."""
        wanted = [name for name in self._outputs if (name, HALF) in self._forms and self._forms[name, HALF] != name]
        return [
            helper.make_node("Cast", [self._forms[name, HALF]], [name], name=self._new(f"{name}.cast"), to=FLOAT)
            for name in sorted(wanted)
        ]

    def _form(self, name: str, kind: int) -> str:
        """Return the name of a value in one precision, casting it where it exists in the other only."""
        if (name, kind) not in self._forms:
            form = self._new(name)
            if name in self._given:
                values = np.clip(self._given.array(name), -_LARGEST, _LARGEST).astype(np.float16)
                self.constants.append(self._file.put(form, values))
            else:
                source = self._forms[name, FLOAT if kind == HALF else HALF]
                self._new_nodes.append(helper.make_node("Cast", [source], [form], name=form, to=kind))
            self._forms[name, kind] = form
        return self._forms[name, kind]

    def _new(self, name: str) -> str:
        return self._fresh(f"{name}.cast")


def value_types(model: onnx.ModelProto) -> dict[str, int] | None:
    """Return the element type of every value.

    None where one is not known or a node holds a graph of its own: then the float parts have to stay in FP32.
    """
    graph = model.graph
    found = {
        v.name: int(v.type.tensor_type.elem_type) for g in (graph.value_info, graph.input, graph.output) for v in g
    }
    found |= {tensor.name: int(tensor.data_type) for tensor in graph.initializer}
    is_known = all(found.get(name) for node in graph.node for name in node.output if name)
    is_flat = not any(a.HasField("g") or a.graphs for node in graph.node for a in node.attribute)
    return found if is_known and is_flat else None


def _norm_nodes(graph: onnx.GraphProto) -> set[str]:
    """Return the arithmetic of norms that are written out: what takes from, or gives to, their sums and roots."""
    makers = {name: node for node in graph.node for name in node.output}
    found: set[str] = set()
    for node in graph.node:
        neighbours = [makers[name] for name in node.input if name in makers]
        if is_op(node, *_NORM_CORE):
            found |= {n.name for n in neighbours if is_op(n, *_NORM_ARITHMETIC)}
        elif is_op(node, *_NORM_ARITHMETIC) and any(is_op(n, *_NORM_CORE) for n in neighbours):
            found.add(node.name)
    return found


def _shape_nodes(graph: onnx.GraphProto, constants: Constants) -> set[str]:
    """Return the nodes that compute with sizes: FP16 counts exactly to 2048 only."""
    sizes: set[str] = set()
    found: set[str] = set()
    for node in graph.node:
        computed = [name for name in node.input if name and name not in constants]
        if is_op(node, "Shape", "Size") or (computed and all(name in sizes for name in computed)):
            found.add(node.name)
            sizes |= set(node.output)
    return found
