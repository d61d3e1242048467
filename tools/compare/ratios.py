"""Turn the times of the rounds into one ratio with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np


@dataclass(frozen=True, slots=True)
class Sample:
    """Times of one block in one round, in milliseconds per prefill or decode step."""

    ours_ms: float
    theirs_ms: float

    @property
    def ratio(self) -> float:
        """Their time over ours: above 1 we are faster."""
        return self.theirs_ms / self.ours_ms


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the result. Times and ratio are medians over the rounds; low to high holds their middle half."""

    kind: str  # "prefill" or "decode"
    batch: int
    prompt_tokens: int
    ours_ms: float
    theirs_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    target: float
    met: bool


def figure_of(kind: str, batch: int, prompt_tokens: int, samples: Sequence[Sample], target: float) -> Figure:
    """Summarise the samples of at least one round; a median of ratios, so that drift between rounds cancels."""
    low, ratio, high = np.percentile([sample.ratio for sample in samples], (25, 50, 75))
    return Figure(
        kind=kind,
        batch=batch,
        prompt_tokens=prompt_tokens,
        ours_ms=round(median(sample.ours_ms for sample in samples), 2),
        theirs_ms=round(median(sample.theirs_ms for sample in samples), 2),
        ratio=round(float(ratio), 3),
        ratio_low=round(float(low), 3),
        ratio_high=round(float(high), 3),
        target=target,
        met=bool(ratio >= target),
    )
