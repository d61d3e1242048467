"""Measure how decode slows down as the context grows."""

from __future__ import annotations

from dataclasses import dataclass

from edge_tools.bench.bed import Bed
from edge_tools.bench.stats import Stats, summarise

STEPS = 16
ROUNDS = 2
LENGTHS = (32, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, slots=True)
class ContextResult:
    """Decode with `length` tokens already in the slot."""

    length: int
    step: Stats
    tokens_per_s: float
    limit_share: float


def measure_context(bed: Bed, bandwidth_gb_s: float) -> list[ContextResult]:
    """Decode STEPS tokens at each length that leaves room for them; the fullest slot is always among them."""
    steps = min(STEPS, bed.capacity // 2)
    fullest = bed.capacity - steps
    lengths = [*(n for n in LENGTHS if n < fullest), fullest]
    times: dict[int, list[float]] = {n: [] for n in lengths}
    bed.prefill_ms(0, fullest)
    for _ in range(ROUNDS):
        for n in lengths:
            times[n] += bed.decode([0], n, steps).step_ms
    return [_result(bed, n, summarise(t), steps, bandwidth_gb_s) for n, t in times.items()]


def _result(bed: Bed, length: int, step: Stats, steps: int, bandwidth_gb_s: float) -> ContextResult:
    limit = bed.limit_ms(1, length + steps / 2, bandwidth_gb_s)
    return ContextResult(length, step, 1e3 / step.p50_ms, limit / step.p50_ms)
