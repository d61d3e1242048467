"""Find the cheapest point of a front that passes the gate, with few checks. Pure: checking is the caller's.

Effects of units add up only roughly, so the sum of a point tells where to look, and the gate has the word: the place is
bracketed by interpolation and bisection, and the neighbours beyond it are tried too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from edge_engines.budget.front import Point
from edge_runtime.errors import BuildError

MAX_CHECKS = 9  # until the place is found; a front of 500 points needs no more by bisection alone
NEIGHBOURS = 2  # points beyond the first that fails
SAFETY = 0.95  # share of the room that a prediction takes: it is off by a few percent


def find_cheapest(
    front: Sequence[Point],
    check: Callable[[Point], float],
    limit: float,
    *,
    max_checks: int = MAX_CHECKS,
    neighbours: int = NEIGHBOURS,
) -> Point:
    """Return the cheapest point that was seen to pass: the upper bound that `check` returns is at most `limit`.

    `front` falls in cost. Raises BuildError with the numbers when not even its first point passes.
    """
    search = _Search(front, check, limit)
    if not search.passes(0):
        raise BuildError(
            f"no choice of forms passes the gate: the most accurate one has an upper bound of the perplexity ratio of "
            f"{search.uppers[0]:.4f}, at most {limit:g} is allowed",
            remedy="raise --gate knowingly, or build with --precision fp32 or fp16",
        )
    good, bad = 0, len(front)  # what passes, what does not
    for turn in range(max_checks):
        if bad - good <= 1:
            break
        place = search.predicted() if turn % 3 < 2 else good
        if not good < place < bad:
            place = (good + bad) // 2
        good, bad = (place, bad) if search.passes(place) else (good, place)
    for place in range(bad + 1, min(bad + 1 + neighbours, len(front))):
        if search.passes(place):
            good = place
    return front[good]


class _Search:
    """The bounds that are known."""

    def __init__(self, front: Sequence[Point], check: Callable[[Point], float], limit: float) -> None:
        self._front, self._check, self._limit = front, check, limit
        self.uppers: dict[int, float] = {}

    def passes(self, place: int) -> bool:
        if place not in self.uppers:
            self.uppers[place] = self._check(self._front[place])
        return self.uppers[place] <= self._limit  # NaN does not

    def predicted(self) -> int:
        """Return the last place whose sum of effects is predicted to pass.

        The logarithm of the bound grows with the sum; how steeply is known from the check nearest to the limit. Before
        there is one, a small divergence is taken to be about the loss it costs.
        """
        room = math.log(self._limit) if self._limit > 1 else 0.0
        steepness = {
            place: math.log(upper) / self._front[place].effect
            for place, upper in self.uppers.items()
            if 0 < upper < math.inf and self._front[place].effect > 0
        }
        nearest = min(steepness, key=lambda place: abs(math.log(self.uppers[place]) - room), default=None)
        slope = steepness[nearest] if nearest is not None else 1.0
        budget = SAFETY * room / slope if slope > 0 else math.inf
        return max((place for place, point in enumerate(self._front) if point.effect <= budget), default=0)
