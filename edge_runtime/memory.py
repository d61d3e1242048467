"""Decide whether something fits into the memory that is available. Pure; imports nothing heavy.

Plans, builds and the loading of an engine ask it.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT_BACK = 0.1  # share of the available memory that is never planned with (product.md A8)


@dataclass(frozen=True, slots=True)
class Fit:
    """The answer, in bytes."""

    needed: int
    available: int
    kept_back: float

    @property
    def usable(self) -> int:
        """What may be used of `available`."""
        return int(self.available * (1 - self.kept_back))

    @property
    def is_enough(self) -> bool:
        """Whether it fits."""
        return self.needed <= self.usable

    @property
    def missing(self) -> int:
        """Bytes that are missing; 0 where it fits."""
        return max(0, self.needed - self.usable)

    def refusal(self, what: str) -> str:
        """Say by how much `what` does not fit, for the message of an error."""
        return (
            f"{what} needs about {in_mb(self.needed)}, {in_mb(self.available)} are available and "
            f"{self.kept_back:.0%} of that is kept back: {in_mb(self.missing)} too much"
        )


def fits(needed: int, available: int, kept_back: float = KEPT_BACK) -> Fit:
    """Hold `needed` bytes against `available` (MemAvailable on unified memory) less the share `kept_back`, 0 to 1."""
    assert needed >= 0, needed
    assert available >= 0, available
    assert 0 <= kept_back < 1, kept_back
    return Fit(needed, available, kept_back)


def in_mb(size: int) -> str:
    """Write bytes in MB (10^6), rounded up, so that what is missing never reads as 0."""
    return f"{-(-size // 10**6):,} MB"
