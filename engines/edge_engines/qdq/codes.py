"""Make symmetric INT8 codes and scales that pass the lint: -127..127, zero point 0, scales normal in FP16 too."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import BuildError

MAX_CODE = 127  # -128 is never used: a product of two codes then fits any accumulator, and negation is exact (case C14)
SMALLEST_SCALE = 2.0**-14  # smallest normal FP16 number
LARGEST_SCALE = 65504.0  # largest FP16 number

Float32 = NDArray[np.float32]
Codes = NDArray[np.int8]


def activation_scale(absmax: float, name: str) -> float:
    """Return the scale of a tensor that reaches `absmax`; 1 for a dead one (case C17).

    Raises BuildError for NaN, infinity and what FP16 can't scale (case C18).
    """
    if not math.isfinite(absmax) or absmax / MAX_CODE > LARGEST_SCALE:
        raise BuildError(
            f"activations of {name} reach {absmax}", remedy="the model is broken, or the samples are not what it takes"
        )
    return max(absmax / MAX_CODE, SMALLEST_SCALE) if absmax > 0 else 1.0


def quantise_weight(
    weight: Float32, axis: int, dtype: type[np.floating] = np.float32
) -> tuple[Codes, NDArray[np.floating]]:
    """Return codes shaped like `weight` and one scale [weight.shape[axis]] of type `dtype` per output channel.

    The codes are made with the scales as `dtype` holds them. A channel whose codes are all zero gets scale 1 (case
    C17). The caller has made sure that the weight is finite.
    """
    others = tuple(i for i in range(weight.ndim) if i != axis)
    wanted = np.abs(weight).max(axis=others, initial=0) / MAX_CODE
    scales = np.maximum(wanted, SMALLEST_SCALE).astype(dtype)
    codes = to_codes(weight, _along(scales, axis, weight.ndim))
    scales[~codes.any(axis=others)] = 1
    return codes, scales


def to_codes(x: Float32, scale: NDArray[np.floating] | float) -> Codes:
    """Return the nearest codes, ties to even; values beyond the range are clipped to -127 and 127."""
    codes: Codes = np.clip(np.rint(x / np.asarray(scale, np.float32)), -MAX_CODE, MAX_CODE).astype(np.int8)
    return codes


def from_codes(codes: Codes, scales: NDArray[np.floating], axis: int) -> Float32:
    """Return the numbers that codes with one scale per channel of `axis` stand for."""
    return codes.astype(np.float32) * _along(scales, axis, codes.ndim).astype(np.float32)


def _along(scales: NDArray[np.floating], axis: int, ndim: int) -> NDArray[np.floating]:
    """Shape [N] so that it multiplies along `axis`."""
    return scales.reshape([-1 if i == axis else 1 for i in range(ndim)])
