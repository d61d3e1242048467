"""Choose which units run INT8: as many bytes as the accuracy gate allows. Pure: measuring is the caller's.

Effects of units add up, and what the gate measures grows with their sum: so each check of the gate tells how large a
sum the next one may have, and the set with the most bytes within that sum is a knapsack. Few checks are needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_engines.sensitivity.knapsack import Item, most_bytes
from edge_runtime.errors import BuildError

THRESHOLD = 0.1  # product rule A2: a layer whose output error is above this stays in FP16
GATE = 1.05  # product rule A4: largest allowed perplexity, as a multiple of the baseline's
MAX_SHRINKS = 8  # failed checks before all units are left in FP16
MAX_GROWS = 3  # checks of larger sets once one has passed
SAFETY = 0.95  # share of the room that a first try takes: predictions are off by a few percent
DOUBT = 0.8  # and less after each try that failed nevertheless
MIN_GAIN = 0.005  # of all bytes: less is not worth the check of a whole new set

Reason = Literal["int8", "hard rule", "gate", "given back", "group", "by hand"]
Rerank = Callable[[frozenset[str]], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A unit with what is known of it."""

    unit: str
    num_bytes: int  # saved when it runs INT8 instead of FP16
    local_error: float
    kl: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome: units in INT8, and the reason of each unit's precision."""

    int8: frozenset[str]
    reasons: Mapping[str, Reason]
    upper: float
    num_checks: int


def choose_int8(
    candidates: Sequence[Candidate],
    check: Callable[[frozenset[str]], float],
    *,
    threshold: float = THRESHOLD,
    gate: float = GATE,
    give_back: int = 4,
    rerank: Rerank | None = None,
) -> Choice:
    """Return the units that run INT8.

    `check(int8 units)` measures the upper 95 % bound of the perplexity ratio, 1 for a perfect model; with a `gate`
    below 1, that of a relative error, 0 for a perfect one. It is called about five times, at most MAX_SHRINKS +
    MAX_GROWS + `give_back` times. `rerank(int8 units)` is called for each set that fails and returns effects that
    replace those of some units: where it failed more is known than before. Raises BuildError when even FP16 alone
    fails the gate.
    """
    ruled_out = {c.unit for c in candidates if not c.local_error <= threshold}
    search = _Search([c for c in candidates if c.unit not in ruled_out], check, gate, rerank)
    first = search.shrink()
    int8 = search.give_back(search.grow(first), give_back)
    reasons: dict[str, Reason] = dict.fromkeys(ruled_out, "hard rule")
    for candidate in search.candidates:
        unit = candidate.unit
        reasons[unit] = ("int8" if unit in first else "given back") if unit in int8 else "gate"
    return Choice(int8, reasons, search.upper(int8), search.num_checks)


class _Search:
    """What is known so far: effects of units, and the bound of each set that was measured, none of them twice."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        check: Callable[[frozenset[str]], float],
        limit: float,
        rerank: Rerank | None,
    ) -> None:
        self.candidates, self._check, self._limit, self._rerank = candidates, check, limit, rerank
        self._bytes = {c.unit: c.num_bytes for c in candidates}
        self._effects = {c.unit: c.kl for c in candidates}
        self._known: dict[frozenset[str], float] = {}

    @property
    def num_checks(self) -> int:
        return len(self._known)

    def upper(self, int8: frozenset[str]) -> float:
        if int8 not in self._known:
            self._known[int8] = self._check(int8)
        return self._known[int8]

    def shrink(self) -> frozenset[str]:
        """Return a set that passes: all units, or fewer until one does."""
        int8 = frozenset(self._bytes)
        for failed in range(1, MAX_SHRINKS + 1):
            if self._passes(int8):
                return int8
            budget = SAFETY * self._room(int8) * DOUBT ** (failed - 1)
            int8 = self._within(budget) if failed < MAX_SHRINKS - 1 else frozenset()
        raise BuildError(
            f"no choice of INT8 layers passes the gate: with none, the upper bound of the perplexity ratio is "
            f"{self.upper(int8):.4f}, at most {self._limit:g} is allowed",
            remedy="build with --precision fp16, or raise --gate knowingly",
        )

    def grow(self, int8: frozenset[str]) -> frozenset[str]:
        """Return a set with as many more bytes as the room that is left allows."""
        too_much = math.inf  # sum of effects that has failed
        for _ in range(MAX_GROWS):
            larger = self._within(min(self._room(int8), (self._sum(int8) + too_much) / 2))
            if self._size(larger) - self._size(int8) < MIN_GAIN * self._size(self._bytes):
                break
            if self._passes(larger):
                int8 = larger
            else:
                too_much = self._sum(larger)
        return int8

    def give_back(self, int8: frozenset[str], tries: int) -> frozenset[str]:
        """Return the set with single units added that pass, largest first, of those that are predicted to fit."""
        out = sorted(
            (c for c in self.candidates if c.unit not in int8), key=lambda c: (-c.num_bytes, self._effects[c.unit])
        )
        for candidate in out:
            larger = int8 | {candidate.unit}
            fits = self._sum(larger) <= self._room(int8)
            if tries > 0 and fits and larger not in self._known:
                tries -= 1
                int8 = larger if self._passes(larger) else int8
        return int8

    def _passes(self, int8: frozenset[str]) -> bool:
        """Check a set; when it fails the first time, effects are ranked anew."""
        is_new = int8 not in self._known
        if self.upper(int8) <= self._limit:
            return True
        if is_new and self._rerank is not None:
            self._effects |= {u: kl for u, kl in self._rerank(int8).items() if u in self._effects}
        return False

    def _room(self, int8: frozenset[str]) -> float:
        """Return the sum of effects that is predicted to meet the limit, from a set that was measured."""
        total, loss, allowed = self._sum(int8), self._loss(self.upper(int8)), self._loss(self._limit)
        if not math.isfinite(loss):
            return 0.0
        if total <= 0:
            return allowed  # nothing is known but that a small divergence is about the loss that it costs
        return total * allowed / loss if loss > 0 else math.inf

    def _loss(self, upper: float) -> float:
        """Return what effects add up to: the logarithm of a ratio, the square of an error."""
        if self._limit < 1:
            return upper * upper
        return max(math.log(upper), 0.0) if upper > 0 else math.nan

    def _within(self, budget: float) -> frozenset[str]:
        items = [Item(c.unit, c.num_bytes, self._effects[c.unit]) for c in self.candidates]
        return most_bytes(items, budget)

    def _sum(self, int8: Collection[str]) -> float:
        return math.fsum(self._effects[unit] for unit in int8)

    def _size(self, int8: Collection[str]) -> int:
        return sum(self._bytes[unit] for unit in int8)
