"""Simulate symmetric INT8: weights per output channel, activations per tensor with a fixed scale.

Products of int8 codes are exact in FP32 sums up to rounding, so quantise-dequantise and multiply is what an INT8 kernel
computes. Codes are -127..127, zero point 0, scales positive and normal numbers of FP16, so that every target can store
them as they are (cases C16, C17, C18).
"""

from __future__ import annotations

from collections.abc import Container, Mapping

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import Float32
from edge_engines.qdq.codes import LARGEST_SCALE, MAX_CODE, SMALLEST_SCALE
from edge_engines.sensitivity.blocks import multiply_exactly
from edge_runtime.errors import BuildError


def activation_scale(absmax: float, name: str) -> float:
    """Return the scale of a tensor that reaches `absmax`; 1 for a dead one. Raises BuildError for NaN and infinity."""
    if not absmax / MAX_CODE <= LARGEST_SCALE:
        raise BuildError(f"activations of {name} reach {absmax}", remedy="the model or the calibration text is broken")
    return float(_scales(np.array([absmax]))[0])


def weight_scales(weight: Float32) -> Float32:
    """Return one scale per output channel of [out, in]; 1 for a channel of zeros."""
    return _scales(np.maximum(weight.max(axis=1), -weight.min(axis=1)))


def _scales(absmax: NDArray[np.floating]) -> Float32:
    """Return the nearest scales that FP16 holds as normal numbers; 1 where nothing is to be scaled."""
    nearest = np.maximum((absmax / MAX_CODE).astype(np.float16).astype(np.float32), SMALLEST_SCALE)
    scales: Float32 = np.where(absmax > 0, nearest, 1.0).astype(np.float32)
    return scales


def round_activation(x: Float32, scale: float) -> Float32:
    """Quantise and dequantise with one scale."""
    rounded: Float32 = x / np.float32(scale)
    np.rint(rounded, out=rounded)
    np.clip(rounded, -MAX_CODE - 1, MAX_CODE, out=rounded)  # where QuantizeLinear saturates, everywhere
    rounded *= np.float32(scale)
    return rounded


def round_weight(weight: Float32) -> Float32:
    """Quantise and dequantise [out, in] per output channel; nothing needs clipping, the scales being its own."""
    scales = weight_scales(weight)[:, None]
    rounded: Float32 = weight / scales
    np.rint(rounded, out=rounded)
    rounded *= scales
    return rounded


class Int8Multiply:
    """A Multiply that runs the units in `int8` in simulated INT8 and the others in FP32.

    `scales` gives the activation scale of each unit's input. Rounded weights of the last `keep` units are kept: a pass
    runs all sequences through one layer before the next, so they are needed again.
    """

    def __init__(self, scales: Mapping[str, float], int8: Container[str], keep: int = 4) -> None:
        self._scales, self._int8, self._keep = scales, int8, keep
        self._rounded: dict[str, Float32] = {}

    def __call__(self, unit: str, x: Float32, weight: Float32) -> Float32:
        """See Multiply."""
        if unit not in self._int8:
            return multiply_exactly(unit, x, weight)
        if unit not in self._rounded:
            while len(self._rounded) >= self._keep:
                self._rounded.pop(next(iter(self._rounded)))
            self._rounded[unit] = round_weight(weight)
        return multiply_exactly(unit, round_activation(x, self._scales[unit]), self._rounded[unit])
