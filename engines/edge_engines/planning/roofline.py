"""Say how many tokens per second memory bandwidth allows at most: decode reads every weight once per step.

A ceiling, not a promise: fixed costs per step come on top (jetson.md §10: peers reach 54 to 88 %, 16 % at 135M).
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_engines.planning.memory import MemoryPlan

SHORT_ROWS = 0  # valid KV rows of a "short context": what the first tokens of an answer see


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Tokens per second of all slots together, for one bandwidth; None for two slots where the engine has one."""

    mode: str
    bandwidth_gb_s: float
    short: float
    full: float  # with every slot filled up to the capacity
    short_two: float | None
    full_two: float | None


def ceiling(plan: MemoryPlan, mode: str, bandwidth_gb_s: float) -> Ceiling:
    """Return the ceiling of an engine at a bandwidth in 10^9 bytes per second."""
    has_two = plan.options.batch == 2

    def rate(slots: int, rows: int) -> float:
        return tokens_per_second(bandwidth_gb_s, plan.step_bytes, plan.kv_row_bytes * rows, slots)

    capacity = plan.options.capacity
    return Ceiling(
        mode=mode,
        bandwidth_gb_s=bandwidth_gb_s,
        short=rate(1, SHORT_ROWS),
        full=rate(1, capacity),
        short_two=rate(2, SHORT_ROWS) if has_two else None,
        full_two=rate(2, capacity) if has_two else None,
    )


def tokens_per_second(bandwidth_gb_s: float, weight_bytes: int, kv_bytes: int, slots: int) -> float:
    """Return slots * bandwidth / (weights + slots * KV): weights are read once for all slots, KV once for each."""
    return slots * bandwidth_gb_s * 1e9 / (weight_bytes + slots * kv_bytes)
