"""Pick the items with the most bytes whose cost stays within a budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

STEPS = 4000  # costs are rounded up to budget / STEPS: with 120 items at most 3 % of the budget are left unused


@dataclass(frozen=True, slots=True)
class Item:
    """Something that may be picked."""

    name: str
    num_bytes: int
    cost: float  # 0 or more


def most_bytes(items: Sequence[Item], budget: float) -> frozenset[str]:
    """Return the best pick by dynamic programming over costs in steps; ties go to the items that stand first."""
    if budget == math.inf:
        return frozenset(item.name for item in items)
    free = frozenset(item.name for item in items if item.cost <= 0)
    priced = [item for item in items if 0 < item.cost <= budget]
    best = np.zeros(STEPS + 1, np.int64)  # bytes within each number of steps
    taken = np.zeros((len(priced), STEPS + 1), np.bool_)
    steps = [math.ceil(item.cost / budget * STEPS) for item in priced]
    for row, (item, cost) in enumerate(zip(priced, steps, strict=True)):
        with_item = best[: STEPS + 1 - cost] + item.num_bytes
        taken[row, cost:] = with_item > best[cost:]
        best[cost:] = np.maximum(best[cost:], with_item)
    picked, left = set(free), STEPS
    for row in reversed(range(len(priced))):
        if taken[row, left]:
            picked.add(priced[row].name)
            left -= steps[row]
    return frozenset(picked)
