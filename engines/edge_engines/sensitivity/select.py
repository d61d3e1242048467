"""Choose which units run INT8: as many bytes as the accuracy gate allows. Pure: measuring is the caller's.

Start with every unit but those that break the hard rule. While the gate fails, units go back to FP16 in the order of
their effect per byte saved, by doubling and then bisection; last, needless ones are given back to INT8, largest first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from edge_runtime.errors import BuildError

THRESHOLD = 0.1  # product rule A2: a layer whose output error is above this stays in FP16
GATE = 1.05  # product rule A4: largest allowed perplexity, as a multiple of the baseline's

Reason = Literal["int8", "hard rule", "gate", "given back", "by hand"]


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
) -> Choice:
    """Return the units that run INT8.

    `check(int8 units)` measures the upper 95 % bound of the perplexity ratio; it is called about log2(N) + `give_back`
    times. Raises BuildError when even FP16 alone fails the gate.
    """
    gated = _Gate(check, gate)
    ruled_out = {c.unit for c in candidates if c.local_error > threshold}
    order = sorted((c for c in candidates if c.unit not in ruled_out), key=lambda c: -c.kl / c.num_bytes)
    num_back = _fewest_back([c.unit for c in order], gated)
    back = order[:num_back]
    int8 = frozenset(c.unit for c in order[num_back:])
    given: set[str] = set()
    for candidate in sorted(back, key=lambda c: -c.num_bytes)[:give_back]:
        if gated.passes(int8 | {candidate.unit}):
            int8 |= {candidate.unit}
            given.add(candidate.unit)
    reasons: dict[str, Reason] = {c.unit: "int8" for c in order[num_back:]}
    reasons |= dict.fromkeys(ruled_out, "hard rule")
    reasons |= {c.unit: "given back" if c.unit in given else "gate" for c in back}
    return Choice(int8, reasons, gated.upper(int8), gated.num_checks)


def _fewest_back(order: Sequence[str], gated: _Gate) -> int:
    """Return how many units, from the front of `order`, must leave INT8: doubling until it passes, then bisection."""

    def passes(count: int) -> bool:
        return gated.passes(frozenset(order[count:]))

    if passes(0):
        return 0
    failed, step = 0, 1
    while not passes(min(step, len(order))):
        if step >= len(order):
            raise BuildError(
                f"no choice of INT8 layers passes the gate: with none, the upper bound of the perplexity ratio is "
                f"{gated.upper(frozenset()):.4f}, at most {gated.limit:g} is allowed",
                remedy="build with --precision fp16, or raise --gate knowingly",
            )
        failed, step = step, step * 2
    passed = min(step, len(order))
    while passed - failed > 1:
        middle = (passed + failed) // 2
        passed, failed = (middle, failed) if passes(middle) else (passed, middle)
    return passed


class _Gate:
    """Remembers what was measured, so that no set is measured twice."""

    def __init__(self, check: Callable[[frozenset[str]], float], limit: float) -> None:
        self._check, self.limit = check, limit
        self._known: dict[frozenset[str], float] = {}

    @property
    def num_checks(self) -> int:
        return len(self._known)

    def upper(self, int8: frozenset[str]) -> float:
        if int8 not in self._known:
            self._known[int8] = self._check(int8)
        return self._known[int8]

    def passes(self, int8: frozenset[str]) -> bool:
        return self.upper(int8) <= self.limit
