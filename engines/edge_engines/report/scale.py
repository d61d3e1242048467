"""Choose the round numbers of an axis and place values on it."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tick:
    """A labelled place on an axis: percent of the width from the left, or pixels from the top."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps `low`..`high` linearly to 0..1; what lies outside is moved to the nearer end."""

    low: float
    high: float

    def part(self, value: float) -> float:
        """Return where `value` lies, 0 to 1."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def percent(self, value: float) -> float:
        """Return the distance from the left in percent of the width."""
        return round(100 * self.part(value), 3)

    def pixels(self, value: float, height: float) -> float:
        """Return the distance from the top of a plot `height` pixels high, whose bottom is `low`."""
        return round(height * (1 - self.part(value)), 2)

    def round_numbers(self, at_most: int) -> list[tuple[float, str]]:
        """Return up to `at_most` round numbers on the scale with their labels, all with the same digits."""
        step = _round_step((self.high - self.low) / at_most)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        digits = max(0, -math.floor(math.log10(step) + 1e-9))
        digits += step * 10**digits % 1 > 1e-9  # 0.25 has one digit more than its magnitude says
        return [(i * step, f"{i * step:.{digits}f}") for i in range(first, last + 1)]


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5 times a power of ten that is at least `least`."""
    magnitude = 10.0 ** math.floor(math.log10(least))
    return next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= least * (1 - 1e-9))
