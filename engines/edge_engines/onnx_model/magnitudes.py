"""Find the nodes whose values FP16 can't hold, by running the float graph: they compute in FP32 also in an FP16 engine.

ONNX Runtime on a CPU computes FP16 graphs in FP32 wherever it may, so running one there would not show an overflow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from edge_engines.onnx_model.samples import Array, Batch
from edge_engines.onnx_model.session import Session
from edge_engines.progress import Progress
from edge_engines.qdq.constants import Constants
from edge_engines.qdq.places import is_op

_LARGEST = float(np.finfo(np.float16).max)
_MARGIN = 2.0  # other samples may reach further
_NAME = "magnitudes.onnx"
# What leads a mask to its softmax. A large negative number there means "not seen", and -65504 says the same.
_MASKING = ("Add", "Sub", "Mul", "Div", "Where", "Unsqueeze", "Squeeze", "Expand", "Reshape", "Transpose", "Identity")


def too_large_for_half(
    model: onnx.ModelProto, folder: Path, types: Mapping[str, int], batches: Iterable[Batch], progress: Progress
) -> set[str]:
    """Return the nodes with an operand or output that FP16 can't hold, with a margin of two for values.

    `model` is the float graph, whose data lies in `folder`, `types` the element types of its values. Raises BuildError.
    """
    constants = Constants(model, folder)
    extremes = _measure(model, folder, types, batches, progress)
    masking = _masking_nodes(model.graph)
    found = set()
    for node in model.graph.node:
        is_masking = node.name in masking
        made = [extremes[name] for name in node.output if name in extremes]
        given = [name for name in node.input if name in constants and types.get(name) == TensorProto.FLOAT]
        if any(_exceeds(pair, _LARGEST / _MARGIN, is_masking) for pair in made) or any(
            _exceeds(_extremes_of(constants.array(name)), _LARGEST, is_masking) for name in given
        ):
            found.add(node.name)
    return found


def _exceeds(extremes: tuple[float, float], limit: float, is_masking: bool) -> bool:
    least, most = extremes
    return not most <= limit or (not least >= -limit and not is_masking)  # NaN exceeds every limit


def _extremes_of(values: Array) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)


def _measure(
    model: onnx.ModelProto, folder: Path, types: Mapping[str, int], batches: Iterable[Batch], progress: Progress
) -> dict[str, tuple[float, float]]:
    """Return least and most of every float value that a node makes; only these two numbers leave the graph."""
    names = [name for node in model.graph.node for name in node.output if types.get(name) == TensorProto.FLOAT]
    made = onnx.ModelProto()
    made.CopyFrom(model)
    made.graph.ClearField("output")
    for number, name in enumerate(names):
        for kind in ("ReduceMin", "ReduceMax"):
            output = f"magnitude.{kind}.{number}"
            made.graph.node.append(helper.make_node(kind, [name], [output], name=output, keepdims=0))
            made.graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, []))
    onnx.save_model(made, folder / _NAME)
    session = Session(folder / _NAME)
    found = dict.fromkeys(names, (np.inf, -np.inf))
    for batch in batches:
        values = session.run(batch.feeds)
        for number, name in enumerate(names):
            least, most = (float(values[f"magnitude.{kind}.{number}"]) for kind in ("ReduceMin", "ReduceMax"))
            found[name] = (float(np.minimum(found[name][0], least)), float(np.maximum(found[name][1], most)))
        progress.advance(batch.count)
    (folder / _NAME).unlink()
    return found


def _masking_nodes(graph: onnx.GraphProto) -> Collection[str]:
    """Return the nodes that lead to a softmax by arithmetic or moves alone."""
    makers = {name: node for node in graph.node for name in node.output}
    found: set[str] = set()
    waiting = [name for node in graph.node if is_op(node, "Softmax") for name in node.input]
    while waiting:
        node = makers.get(waiting.pop())
        if node is not None and node.name not in found and is_op(node, *_MASKING):
            found.add(node.name)
            waiting += node.input
    return found
