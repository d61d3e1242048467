"""Summarise measured times. All in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Stats:
    """Times of one kind of step, in milliseconds."""

    count: int
    mean_ms: float
    p50_ms: float
    p99_ms: float


def summarise(times_ms: Sequence[float]) -> Stats:
    """Return mean, median and 99th percentile (linear between samples) of at least one time."""
    p50, p99 = np.percentile(times_ms, (50, 99))
    return Stats(len(times_ms), float(np.mean(times_ms)), float(p50), float(p99))
