"""Measure decode at batch 1: time per token, share of the bandwidth limit, and what Python adds."""

from __future__ import annotations

from dataclasses import dataclass

from edge_tools.bench.bed import PROMPT, Bed
from edge_tools.bench.stats import Stats, summarise

STEPS = 96


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """`limit_share` is limit over median: 1 means that memory is read at full speed."""

    step: Stats
    engine: Stats
    outside: Stats
    outside_share: float  # median outside over median step
    tokens_per_s: float
    limit_ms: float
    limit_share: float


def measure_decode(bed: Bed, bandwidth_gb_s: float) -> DecodeResult:
    """Decode STEPS tokens after a prompt of PROMPT tokens, in slot 0."""
    prompt = min(PROMPT, bed.capacity // 2)
    steps = min(STEPS, bed.capacity - prompt)
    bed.prefill_ms(0, prompt)
    decoded = bed.decode([0], prompt, steps)
    step, outside = summarise(decoded.step_ms), summarise(decoded.outside_ms)
    limit = bed.limit_ms(1, prompt + steps / 2, bandwidth_gb_s)
    return DecodeResult(
        step=step,
        engine=summarise(decoded.engine_ms),
        outside=outside,
        outside_share=outside.p50_ms / step.p50_ms,
        tokens_per_s=1e3 / step.mean_ms,
        limit_ms=limit,
        limit_share=limit / step.p50_ms,
    )
