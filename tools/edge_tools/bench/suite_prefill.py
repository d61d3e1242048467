"""Measure prefill by prompt length: time of the whole prompt, tokens per second."""

from __future__ import annotations

from dataclasses import dataclass

from edge_tools.bench.bed import PROMPT, Bed
from edge_tools.bench.stats import Stats, summarise

LENGTHS = (PROMPT, 128, 256, 512, 1024)
ROUNDS = 7


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """One prompt length."""

    length: int
    time: Stats
    tokens_per_s: float


def measure_prefill(bed: Bed) -> list[PrefillResult]:
    """Prefill each length that fits, ROUNDS times; the lengths take turns so that drift hits all alike."""
    lengths = [n for n in LENGTHS if n <= bed.capacity] or [bed.capacity]
    times: dict[int, list[float]] = {n: [] for n in lengths}
    for _ in range(ROUNDS):
        for n in lengths:
            times[n].append(bed.prefill_ms(0, n))
    stats = {n: summarise(t) for n, t in times.items()}
    return [PrefillResult(n, s, n / s.p50_ms * 1e3) for n, s in stats.items()]
