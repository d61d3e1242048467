"""Take the steps of a build that only an INT8 KV cache has: choose its scales, and gate it where no unit is INT8 too.

With INT8 units the gate of those runs the engine with its cache, so it judges both.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_engines.checkpoint.open import Checkpoint
from edge_engines.graph.lowering import KvScales
from edge_engines.int8_build import Int8Options, engine_ratio
from edge_engines.perplexity import perplexity, perplexity_ratio, token_losses
from edge_engines.progress import Progress
from edge_engines.sensitivity.blocks import Keep, keep_exactly, multiply_exactly
from edge_engines.sensitivity.command import load_texts
from edge_engines.sensitivity.gate import BOOTSTRAP_SEED, Losses
from edge_engines.sensitivity.kv import RoundedKv, collect_kv_ranges, kv_scales, run_keeping
from edge_engines.sensitivity.measure import compare_rows, log_probabilities
from edge_engines.sensitivity.passes import Ids, Passes
from edge_engines.texts.sets import TextSets
from edge_engines.unit_choice import UnitChoice
from edge_runtime.errors import BuildError
from edge_runtime.manifest import GateFacts, Manifest


@dataclass(frozen=True, slots=True)
class KvChoice:
    """The scales of one checkpoint's cache, and the texts they are from and will be judged by."""

    scales: KvScales
    texts: TextSets


def choose_kv(model: Checkpoint, units: UnitChoice | None, options: Int8Options, progress: Progress) -> KvChoice:
    """Calibrate the cache of the weights that the graph is written from, smoothing of INT8 `units` folded in.

    Raises BuildError for keys or values that are not finite.
    """
    texts = units.texts if units else load_texts(model, options.calibration, options.sizes)
    weights = units.weights(model) if units else model
    progress.step("collecting ranges of the KV cache", len(model.spec.layers))
    ranges = collect_kv_ranges(Passes(weights.spec, weights), texts.calibration.ids, progress.advance)
    return KvChoice(kv_scales(ranges), texts)


def gate_kv(
    folder: Path, draft: Manifest, model: Checkpoint, chosen: KvChoice, limit: float, progress: Progress
) -> GateFacts:
    """Run the gate's text through the engine in `folder` as a user would run it, and hold it against the FP32 model.

    Raises BuildError when the upper bound of the perplexity's ratio is above `limit`.
    """
    passes, ids = Passes(model.spec, model), chosen.texts.gate.ids[:, : draft.geometry.capacity]
    progress.step("simulating the KV cache", 4 * len(model.spec.layers))
    base = _losses(passes, ids, keep_exactly, progress)
    simulated = perplexity_ratio(base, _losses(passes, ids, RoundedKv(chosen.scales), progress), seed=BOOTSTRAP_SEED)
    kl, same_top1 = _effect(passes, chosen.texts.ranking.ids, chosen.scales, progress)
    ratio = engine_ratio(folder, draft, ids, base, progress)
    if not ratio.upper <= limit:  # NaN fails too
        raise BuildError(
            f"the engine with an INT8 KV cache fails the gate: its perplexity is {ratio.ratio:.4f} times the "
            f"baseline's, at most {ratio.upper:.4f}; {limit:g} is allowed, and the simulation gave "
            f"{simulated.ratio:.4f}",
            remedy="build with --kv float, give --calibration text of your own, or raise --gate knowingly",
        )
    progress.note(f"the engine's perplexity is x {ratio.ratio:.4f}, at most {ratio.upper:.4f} (limit {limit:g})")
    return GateFacts(
        limit=limit,
        ratio=ratio.ratio,
        upper=ratio.upper,
        base_perplexity=perplexity(base),
        tokens=base.size,
        simulated_ratio=simulated.ratio,
        kl=kl,
        same_top1=same_top1,
    )


def _losses(passes: Passes, ids: Ids, keep: Keep, progress: Progress) -> Losses:
    stream = run_keeping(passes, passes.embed(ids), multiply_exactly, keep, progress.advance)
    rows = zip(passes.logits(stream), ids, strict=True)
    return np.array([token_losses(logits, row) for logits, row in rows])


def _effect(passes: Passes, ids: Ids, scales: KvScales, progress: Progress) -> tuple[float, float]:
    """Return the mean divergence per token, and the share of tokens whose likeliest next one is the same."""
    streams = [
        run_keeping(passes, passes.embed(ids), multiply_exactly, keep, progress.advance)
        for keep in (keep_exactly, RoundedKv(scales))
    ]
    pairs = zip(*(passes.logits(stream) for stream in streams), strict=True)
    rows = [compare_rows(log_probabilities(base), logits) for base, logits in pairs]
    divergence, same = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return float(divergence.mean()), float(same.mean())
