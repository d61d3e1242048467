"""Check the numbers of one Quantize or Dequantize: scale, zero point, codes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import TensorProto

from edge_engines.qdq.codes import MAX_CODE, SMALLEST_SCALE
from edge_engines.qdq.faults import Fault
from edge_engines.qdq.places import DEQUANTISE, Places, describe, int_attribute, is_op

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


def check_scale(node: onnx.NodeProto, places: Places) -> Iterator[Fault]:
    """Yield faults of the values and the type of a scale; its shape is the operands' matter."""
    name, constants = node.input[1], places.constants
    if name not in constants:
        yield Fault("scale", describe(node), name, "computed while the model runs", "a constant")
        return
    if constants.dtype(name) not in FLOATS:
        yield Fault("type", describe(node), name, f"scale of type {type_name(constants.dtype(name))}", "FP32 or FP16")
        return
    values = constants.array(name).astype(np.float64).reshape(-1)
    wrong = ~(np.isfinite(values) & (values >= SMALLEST_SCALE))  # NaN fails too
    if wrong.any():
        at = int(wrong.argmax())
        more = f" and {int(wrong.sum()) - 1} more" if wrong.sum() > 1 else ""
        found = f"scale[{at}] = {values[at]:g}{more}"
        yield Fault("scale", describe(node), name, found, f"finite and at least 2^-14 = {SMALLEST_SCALE:.3g}")


def check_zero_point(node: onnx.NodeProto, places: Places) -> Iterator[Fault]:
    """Yield faults of the zero point, and of the integer type it implies."""
    name, constants = node.input[2] if len(node.input) > 2 else "", places.constants
    if name and name not in constants:
        yield Fault("zero point", describe(node), name, "computed while the model runs", "absent, or int8 zeros")
    elif name and constants.array(name).any():
        found = f"zero point {constants.array(name).reshape(-1)[0]}"
        yield Fault("zero point", describe(node), name, found, "absent, or int8 zeros")
    kind = _integer_type(node, name, places)
    if kind is not None and kind != TensorProto.INT8:
        found = f"codes of type {type_name(kind)}"
        if kind == TensorProto.INT32:
            yield Fault("bias", describe(node), node.input[0], found, "a bias in float")
        else:
            yield Fault("type", describe(node), node.input[0], found, "INT8")


def check_codes(node: onnx.NodeProto, places: Places) -> Iterator[Fault]:
    """Yield faults of a weight's codes: -128 is unused, a channel of zeros has scale 1."""
    name, constants = node.input[0], places.constants
    if constants.dtype(name) != TensorProto.INT8:
        return
    codes = constants.array(name)
    if codes.size and codes.min() < -MAX_CODE:
        where = tuple(int(i) for i in np.unravel_index(int(codes.argmin()), codes.shape))
        yield Fault("codes", describe(node), name, f"code {codes.min()} at {list(where)}", f"-{MAX_CODE} to {MAX_CODE}")
    if node.input[1] not in constants:
        return
    scales = constants.array(node.input[1])
    axis = int_attribute(node, "axis", 1) % max(codes.ndim, 1)
    if scales.ndim != 1 or scales.shape[0] != codes.shape[axis]:
        return  # the operands' matter
    dead = ~codes.any(axis=tuple(i for i in range(codes.ndim) if i != axis)) & (scales != 1)
    if dead.any():
        at = int(dead.argmax())
        found = f"channel {at} is all zeros with scale {float(scales[at]):g}"
        yield Fault("dead channel", describe(node), node.input[1], found, "scale 1")


def type_name(number: int) -> str:
    """Return the name of an ONNX element type."""
    return str(TensorProto.DataType.Name(number))


def _integer_type(node: onnx.NodeProto, zero_point: str, places: Places) -> int | None:
    """Return the type of the codes, None where another node decides it and is checked itself."""
    if is_op(node, DEQUANTISE):
        return places.constants.dtype(node.input[0]) if places.is_weight(node) else None
    if zero_point:
        return places.constants.dtype(zero_point) if zero_point in places.constants else None
    return int_attribute(node, "output_dtype", 0) or TensorProto.UINT8  # what ONNX takes when nothing is said
