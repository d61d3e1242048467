"""Choose how strongly each kind of unit is smoothed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from edge_engines.checkpoint.spec import Float32, ModelSpec, Weights
from edge_engines.sensitivity.blocks import BODY_UNITS, HEAD
from edge_engines.sensitivity.int8 import activation_scale
from edge_engines.sensitivity.measure import EffectMeter
from edge_engines.sensitivity.passes import Passes
from edge_engines.sensitivity.smoothing import FoldedWeights, Smoothing
from edge_engines.sensitivity.subject import Subject

ALPHAS = (0.5, 0.65, 0.8)  # tried for each kind of unit, besides leaving it alone
KINDS = (*BODY_UNITS, HEAD)


@dataclass(frozen=True, slots=True)
class Smoothed:
    """A model with smoothing folded in, and what INT8 needs to know of each unit."""

    passes: Passes
    scales: Mapping[str, float]
    factors: Mapping[str, Float32]


def choose_alphas(subject: Subject, ranges: Mapping[str, Float32], baseline: Sequence[Float32]) -> dict[str, float]:
    """Return the smoothing of each kind of unit: the alpha whose INT8 of that kind alone moves the logits least.

    One alpha per kind, scored on text that gave no ranges: an alpha per unit over-fits.
    """
    subject.progress.step("choosing the smoothing", (len(ALPHAS) + 1) * len(KINDS))
    ids, best = subject.texts.ranking.ids, dict[str, tuple[float, float]]()
    for alpha in (0.0, *ALPHAS):
        alphas = dict.fromkeys(KINDS, alpha) if alpha else {}
        model = smoothed(subject.spec, subject.weights, ranges, alphas)
        meter = EffectMeter(model.passes, ids, model.scales, subject.ranking(alphas), baseline)
        for kind in KINDS:
            kl = meter.of({unit for unit in model.scales if unit.rpartition(".")[2] == kind}).kl
            best[kind] = min(best.get(kind, (np.inf, 0.0)), (kl, alpha), key=lambda pair: pair[0])
            subject.progress.advance(1)
        subject.cost.layer_runs += model.passes.num_layer_runs
        del model, meter  # memory holds one model at a time
    return {kind: alpha for kind, (_, alpha) in best.items() if alpha}


def smoothed(spec: ModelSpec, weights: Weights, ranges: Mapping[str, Float32], alphas: Mapping[str, float]) -> Smoothed:
    """Fold smoothing into a model, and set the activation scale of each unit behind it."""
    factors = Smoothing(alphas).factors(spec, weights, ranges)
    folded = FoldedWeights(spec, weights, factors)
    one = np.float32(1)
    scales = {
        unit: activation_scale(float((seen / factors.get(unit, one)).max()), unit) for unit, seen in ranges.items()
    }
    return Smoothed(Passes(folded.spec, folded, folded.tied_by), scales, factors)
