"""Check the Q/DQ of an ONNX file before a compiler sees it: what TensorRT refuses, or quietly runs in float.

Weights are read one at a time, so a file with external data needs the memory of its largest tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import onnx

from edge_engines.qdq.faults import Fault
from edge_engines.qdq.operands import check_dequantise, check_product, check_quantise, check_shared
from edge_engines.qdq.places import DEQUANTISE, PRODUCTS, QUANTISE, Places, describe, is_op, look_up
from edge_engines.qdq.values import check_codes, check_scale, check_zero_point
from edge_runtime.errors import BuildError

_OTHER_KINDS = (
    "DynamicQuantizeLinear", "QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger", "QLinearAdd", "QGemm",
    "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention",
)  # fmt: skip
_SHOWN = 3


def lint(model: onnx.ModelProto, folder: Path, *, weight_only: Collection[str] = ()) -> list[Fault]:
    """Return every finding in graph order, warnings among them; `folder` holds the model's external data.

    Products named in `weight_only`, or after one of them, take float activations on purpose. Raises BuildError when a
    weight can't be read.
    """
    places = look_up(model, folder, weight_only)
    found = [fault for node in model.graph.node for fault in _check_node(node, places)]
    return found + list(check_shared(places))


def check_quantised(model: onnx.ModelProto, folder: Path, *, weight_only: Collection[str] = ()) -> list[Fault]:
    """Return the warnings; raise BuildError naming the first faults when there are any."""
    found = lint(model, folder, weight_only=weight_only)
    faults = [fault for fault in found if not fault.is_warning]
    if faults:
        shown = " | ".join(map(str, faults[:_SHOWN]))
        more = f" | and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise BuildError(
            f"the Q/DQ of this graph has {len(faults)} faults: {shown}{more}",
            remedy="nothing was compiled; please report this with the model's name",
        )
    return found


def _check_node(node: onnx.NodeProto, places: Places) -> Iterator[Fault]:
    if is_op(node, QUANTISE):
        yield from check_scale(node, places)
        yield from check_zero_point(node, places)
        yield from check_quantise(node, places)
    elif is_op(node, DEQUANTISE):
        yield from check_scale(node, places)
        yield from check_zero_point(node, places)
        yield from check_dequantise(node, places)
        if places.is_weight(node):
            yield from check_codes(node, places)
    elif is_op(node, *PRODUCTS):
        yield from check_product(node, places)
    elif node.op_type in (*_OTHER_KINDS, QUANTISE, DEQUANTISE):
        expected = f"{QUANTISE} and {DEQUANTISE} of ONNX itself"
        yield Fault("operator", describe(node), node.output[0], f"{node.domain or 'ai.onnx'}.{node.op_type}", expected)
    yield from _check_inside(node)


def _check_inside(node: onnx.NodeProto) -> Iterator[Fault]:
    for attribute in node.attribute:
        for inner in attribute.g.node if attribute.HasField("g") else ():
            if inner.op_type in (QUANTISE, DEQUANTISE, *_OTHER_KINDS):
                place = f"{inner.op_type} inside {node.op_type}"
                yield Fault("operator", describe(node), inner.output[0], place, "quantisation in the top graph only")
            yield from _check_inside(inner)
