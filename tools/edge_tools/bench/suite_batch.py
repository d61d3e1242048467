"""Measure what a second answer costs: decode with one slot against all slots, in turns."""

from __future__ import annotations

from dataclasses import dataclass

from edge_tools.bench.bed import PROMPT, Bed
from edge_tools.bench.stats import Stats, summarise

ROUNDS = 4
STEPS = 24


@dataclass(frozen=True, slots=True)
class BatchResult:
    """`gain` is the ratio of tokens per second of all answers together: 2 slots at the time of 1 would be 2.0."""

    slots: int
    alone: Stats
    together: Stats
    tokens_per_s: float  # all slots
    limit_share: float
    gain: float


def measure_batch(bed: Bed, bandwidth_gb_s: float) -> BatchResult | None:
    """Decode alternately on one slot and on all of them; None when the engine has one slot only."""
    if bed.slots == 1:
        return None
    prompt = min(PROMPT, bed.capacity // 2)
    steps = min(STEPS, bed.capacity - prompt)
    for slot in range(bed.slots):
        bed.prefill_ms(slot, prompt)
    alone: list[float] = []
    together: list[float] = []
    for _ in range(ROUNDS):
        alone += bed.decode([0], prompt, steps).step_ms
        together += bed.decode(range(bed.slots), prompt, steps).step_ms
    one, all_slots = summarise(alone), summarise(together)
    return BatchResult(
        slots=bed.slots,
        alone=one,
        together=all_slots,
        tokens_per_s=bed.slots * 1e3 / all_slots.p50_ms,
        limit_share=bed.limit_ms(bed.slots, prompt + steps / 2, bandwidth_gb_s) / all_slots.p50_ms,
        gain=bed.slots * one.p50_ms / all_slots.p50_ms,
    )
