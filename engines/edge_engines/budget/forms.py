"""Say which forms a unit may have on each lowering, and simulate them as the engine will compute them.

`w8` and `w4` are computed as ONNX Runtime's MatMulNBits does at accuracy level 4: activations are rounded to INT8 by
blocks of the weight's block size, in every step anew; products are exact. Against that operator the simulation differs
by 7e-7 at most, relative (ONNX Runtime 1.32): the rounding of FP32 sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from edge_engines.checkpoint.spec import Float32
from edge_engines.graph.linear import BLOCK_BITS, Form, block_size, quantize_blocks
from edge_engines.sensitivity.blocks import multiply_exactly
from edge_engines.sensitivity.int8 import round_activation, round_weight

Forms = Mapping[str, Form]  # unit -> its form; units that are not named are float

# By lowering, float first. TensorRT's lowerings have no weight-only form: whether it keeps such weights small, or
# dequantises them in every step, is not known for Orin (quantization.md, section 1, 12).
OFFERED: MappingProxyType[str, tuple[Form, ...]] = MappingProxyType(
    {"ort": ("fp32", "w8", "int8", "w4"), "native": ("fp16", "int8"), "portable": ("fp16", "int8")}
)
FLOATS = frozenset(("fp32", "fp16"))


def offered_forms(lowering: str, width: int) -> tuple[Form, ...]:
    """Return the forms of a unit with `width` inputs, float first; those by block need a block size that divides it."""
    return tuple(f for f in OFFERED[lowering] if f not in BLOCK_BITS or block_size(width, BLOCK_BITS[f]) is not None)


class FormMultiply:
    """A Multiply that runs each unit in its form.

    `scales` gives the activation scale of the input of units in INT8. Rounded weights of the last `keep` units are
    kept: a pass runs all sequences through one layer before the next, so they are needed again.
    """

    def __init__(self, forms: Forms, scales: Mapping[str, float], keep: int = 4) -> None:
        self._forms, self._scales, self._keep = forms, scales, keep
        self._rounded: dict[str, Float32] = {}

    def __call__(self, unit: str, x: Float32, weight: Float32) -> Float32:
        """See Multiply."""
        form = self._forms.get(unit, "fp32")
        if form in FLOATS:
            return multiply_exactly(unit, x, weight)
        if unit not in self._rounded:
            while len(self._rounded) >= self._keep:
                self._rounded.pop(next(iter(self._rounded)))
            self._rounded[unit] = round_rows(weight, form)
        rounded_x = round_activation(x, self._scales[unit]) if form == "int8" else round_in_blocks(x, form)
        return multiply_exactly(unit, rounded_x, self._rounded[unit])


def round_rows(weight: Float32, form: Form) -> Float32:
    """Return a weight [out, in], or rows of a table, as they are once stored in `form`."""
    if form in FLOATS:
        return weight
    if form == "int8":
        return round_weight(weight)
    bits = BLOCK_BITS[form]
    size = block_size(weight.shape[1], bits)
    assert size is not None, weight.shape
    return quantize_blocks(weight, size, bits).restored


def round_in_blocks(x: Float32, form: Form) -> Float32:
    """Round activations [S, in] to INT8 by block, as the operator does before it multiplies with weights in `form`."""
    size = block_size(x.shape[1], BLOCK_BITS[form])
    assert size is not None, x.shape
    blocks = x.reshape(len(x), -1, size)
    scales = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    scales[scales == 0] = 1
    rounded: Float32 = np.rint(blocks / scales)
    rounded *= scales
    return rounded.reshape(x.shape)
