"""Write a graph in which some units run INT8; nothing else is changed.

Two forms compute the same numbers: Q/DQ on both operands, which is ONNX itself and TensorRT's only way; and ONNX
Runtime's own INT8 product, since it fuses Q/DQ to that only where no Relu, shared Quantize or bias of a two-dimensional
product stands beside (seen in 1.32: it then runs the product in float, seven times slower).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from edge_engines.onnx_model.code_file import StoredWeight, scale_tensor
from edge_engines.onnx_model.names import FreshNames, value_names
from edge_engines.onnx_model.source import all_nodes
from edge_engines.onnx_model.units import Product, Unit

Form = Literal["qdq", "ort"]

CONTRIB = "com.microsoft"
_MIDDLE = 128  # of unsigned codes
_ZERO = "qdq.zero"  # shared by every Quantize: without it ONNX takes UINT8 before opset 21


class Int8Writer(Protocol):
    """Makes the nodes of INT8 products; `constants` are those that the nodes so far take."""

    constants: list[TensorProto]

    def read(self, tensor: str, scale: float) -> tuple[str, list[onnx.NodeProto]]:
        """Return what products take instead of an activation, and the nodes that make it."""
        ...

    def multiply(self, node: onnx.NodeProto, product: Product, x: str) -> list[onnx.NodeProto]:
        """Return the nodes that stand in for a product; `x` is what `read` gave."""
        ...


class QdqWriter:
    """Quantize and Dequantize on both operands. See Int8Writer.

    A Gemm becomes MatMul and Add: its bias stays a float addition.
    """

    def __init__(self, stored: Mapping[str, StoredWeight], dtype: type[np.floating], fresh: FreshNames) -> None:
        """`dtype` is what the graph computes in where it is not INT8."""
        self._stored, self._dtype, self._fresh = stored, dtype, fresh
        self._zero = fresh(_ZERO)
        self._weights: dict[str, str] = {}  # name of the codes -> dequantised value
        self.constants = [numpy_helper.from_array(np.array(0, np.int8), self._zero)]

    def read(self, tensor: str, scale: float) -> tuple[str, list[onnx.NodeProto]]:
        """See Int8Writer.read."""
        name, codes, value = (self._fresh(f"{tensor}{suffix}") for suffix in (".scale", ".q", ".dq"))
        self.constants.append(scale_tensor(scale, name, self._dtype))
        quantise = helper.make_node("QuantizeLinear", [tensor, name, self._zero], [codes], name=codes)
        dequantise = helper.make_node("DequantizeLinear", [codes, name, self._zero], [value], name=value)
        return value, [quantise, dequantise]

    def multiply(self, node: onnx.NodeProto, product: Product, x: str) -> list[onnx.NodeProto]:
        """See Int8Writer.multiply."""
        weight, nodes = self.weight(product)
        if product.kind != "Gemm":
            made = onnx.NodeProto()
            made.CopyFrom(node)
            made.input[0], made.input[1] = x, weight
            return [*nodes, made]
        bias = [name for name in node.input[2:] if name]
        value = self._fresh(f"{node.output[0]}.product") if bias else node.output[0]
        nodes.append(helper.make_node("MatMul", [x, weight], [value], name=node.name))
        if bias:
            name = self._fresh(f"{node.name}.bias")
            nodes.append(helper.make_node("Add", [value, bias[0]], [node.output[0]], name=name))
        return nodes

    def weight(self, product: Product) -> tuple[str, list[onnx.NodeProto]]:
        """Return the dequantised form of a weight, and the node that makes it where it is new."""
        stored = self._stored[product.node]
        key = stored.codes.name
        if key in self._weights:
            return self._weights[key], []
        codes, scales, value = (self._fresh(f"{key}{suffix}") for suffix in ("", ".scale", ".dq"))
        self.constants += [renamed(stored.codes, codes), scale_tensor(stored.scales, scales, self._dtype)]
        self._weights[key] = value
        return value, [helper.make_node("DequantizeLinear", [codes, scales], [value], name=value, axis=stored.axis)]


class OrtWriter:
    """ONNX Runtime's product of codes that leaves as float, for products of matrices. See Int8Writer.

    Activations are the same codes moved by 128 to unsigned ones: with signed ones it takes five times as long on x86
    (MiniLM, measured). Without VNNI such sums may saturate (case C14), which byte_products.py knows.
    """

    def __init__(self, stored: Mapping[str, StoredWeight], fresh: FreshNames) -> None:
        self._stored, self._fresh = stored, fresh
        self._zero = fresh(_ZERO)
        self._scales: dict[str, str] = {}  # codes of an activation -> its scale
        self._weights: dict[str, tuple[str, str]] = {}
        self.constants = [numpy_helper.from_array(np.array(_MIDDLE, np.uint8), self._zero)]

    def read(self, tensor: str, scale: float) -> tuple[str, list[onnx.NodeProto]]:
        """See Int8Writer.read."""
        name, codes = (self._fresh(f"{tensor}{suffix}") for suffix in (".scale", ".q"))
        self.constants.append(scale_tensor(scale, name, np.float32))
        self._scales[codes] = name
        return codes, [helper.make_node("QuantizeLinear", [tensor, name, self._zero], [codes], name=codes)]

    def multiply(self, node: onnx.NodeProto, product: Product, x: str) -> list[onnx.NodeProto]:
        """See Int8Writer.multiply."""
        assert not product.is_convolution, node.name
        codes, scales = self._weight(product)
        bias = [name for name in node.input[2:] if name]
        value = self._fresh(f"{node.output[0]}.product") if bias else node.output[0]
        inputs = [x, codes, self._scales[x], scales, self._zero]
        nodes = [helper.make_node("MatMulIntegerToFloat", inputs, [value], name=node.name, domain=CONTRIB)]
        if bias:
            name = self._fresh(f"{node.name}.bias")
            nodes.append(helper.make_node("Add", [value, bias[0]], [node.output[0]], name=name))
        return nodes

    def _weight(self, product: Product) -> tuple[str, str]:
        stored = self._stored[product.node]
        key = stored.codes.name
        if key not in self._weights:
            codes, scales = self._fresh(key), self._fresh(f"{key}.scale")
            self.constants += [renamed(stored.codes, codes), scale_tensor(stored.scales, scales, np.float32)]
            self._weights[key] = (codes, scales)
        return self._weights[key]


def quantise(
    model: onnx.ModelProto,
    units: Sequence[Unit],
    scales: Mapping[str, float],
    stored: Mapping[str, StoredWeight],
    form: Form,
    dtype: type[np.floating] = np.float32,
) -> onnx.ModelProto:
    """Return `model` with these units in INT8; `scales` holds the scale of each unit's input by the unit's name.

    `dtype` is what the graph computes in where it is not INT8. Constants that nothing takes any more are left out.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    if not units:
        return made
    fresh = FreshNames(value_names(model.graph))
    writer: Int8Writer = QdqWriter(stored, dtype, fresh) if form == "qdq" else OrtWriter(stored, fresh)
    at = {p.node: (unit, p) for unit in units for p in unit.products}
    read: dict[str, str] = {}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        if node.name not in at:
            nodes.append(node)
            continue
        unit, product = at[node.name]
        if unit.name not in read:
            read[unit.name], new = writer.read(node.input[0], scales[unit.name])  # in FP16 perhaps a cast of it
            nodes += new
        nodes += writer.multiply(node, product, read[unit.name])
    made.graph.ClearField("node")
    made.graph.node.extend(nodes)
    made.graph.initializer.extend(writer.constants)
    drop_unused(made.graph)
    if form == "ort" and all(o.domain != CONTRIB for o in made.opset_import):
        made.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    return made


def drop_unused(graph: onnx.GraphProto) -> None:
    """Remove constants that no node and no output takes."""
    used = {name for node in all_nodes(graph) for name in node.input} | {value.name for value in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    graph.ClearField("initializer")
    graph.initializer.extend(kept)


def renamed(tensor: TensorProto, name: str) -> TensorProto:
    """Return a constant under another name; its data stays where it is."""
    made = TensorProto()
    made.CopyFrom(tensor)
    made.name = name
    return made
