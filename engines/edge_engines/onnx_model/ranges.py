"""Collect how far each tensor reaches, sample by sample: the largest magnitude and a histogram of magnitudes.

Memory doesn't depend on the number of samples (case C20): ONNX Runtime's own calibrators keep every output of a
collection until its end, and know neither padding nor NaN; so these are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_engines.onnx_model.samples import Array
from edge_engines.qdq.codes import MAX_CODE
from edge_runtime.errors import BuildError

BINS = 4096
PERCENTILES = (99.99, 99.9)
_CUTS = 64  # clipping points that MSE tries, between a fifth of the range and all of it
_DISTINCT = 0.98  # a clipping point closer to a larger one than this is the same


@dataclass(slots=True)
class Histogram:
    """Counts of |x| in BINS equal steps up to `top`, which doubles when a value is beyond it."""

    name: str
    top: float = 0.0
    absmax: float = 0.0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, x: Array) -> None:
        """Count some values; NaN is left out. Raises BuildError for an infinite value (case C18)."""
        values = np.abs(x[~np.isnan(x)]).astype(np.float32, copy=False)
        if not values.size:
            return
        largest = float(values.max())
        if not np.isfinite(largest):
            raise BuildError(f"activations of {self.name} are infinite", remedy="the model or the samples are broken")
        self.absmax = max(self.absmax, largest)
        if largest == 0 and self.top == 0:
            self.counts[0] += values.size
            return
        self.top = self.top or largest
        while largest > self.top:
            self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(axis=1), np.zeros(BINS // 2, np.int64)])
            self.top *= 2
        bins = np.minimum((values * np.float32(BINS / self.top)).astype(np.int32), BINS - 1)
        self.counts += np.bincount(bins.reshape(-1), minlength=BINS)

    def clips(self) -> dict[str, float]:
        """Return the clipping points worth trying, the whole range first, by the name of the rule that gives them."""
        found = {"absmax": self.absmax}
        if self.absmax == 0:
            return found
        wanted = {f"{p:g} %": self._percentile(p) for p in PERCENTILES} | {"mse": self._least_square()}
        for name, point in wanted.items():
            if point > 0 and all(point < _DISTINCT * other or other < _DISTINCT * point for other in found.values()):
                found[name] = point
        return found

    def _percentile(self, percent: float) -> float:
        """Return the magnitude that `percent` of the values stay below."""
        share = np.cumsum(self.counts) / self.counts.sum()
        return float((np.searchsorted(share, percent / 100) + 1) * self.top / BINS)

    def _least_square(self) -> float:
        """Return the clipping point with the least squared error of rounding and clipping together."""
        centres = (np.arange(BINS) + 0.5) * self.top / BINS
        points = np.linspace(0.2, 1.0, _CUTS) * self.absmax

        def error(point: float) -> float:
            beyond = np.maximum(centres - point, 0)
            # inside, rounding to steps of point / 127 leaves a twelfth of a step squared
            return float(self.counts @ np.where(beyond > 0, beyond**2, (point / MAX_CODE) ** 2 / 12))

        return float(min(points, key=error))


def without_padding(x: Array, valid: NDArray[np.bool_] | None) -> Array:
    """Return the rows of `x` [B, S, ..] that are not padding; `x` itself where its axes are others."""
    return x[valid] if valid is not None and x.shape[:2] == valid.shape else x


def check_alive(histograms: Mapping[str, Histogram]) -> None:
    """Raise BuildError for a tensor of which no finite value was seen (case C18)."""
    for name, histogram in histograms.items():
        if not histogram.counts.any():
            raise BuildError(f"activations of {name} were never finite", remedy="the model or the samples are broken")
