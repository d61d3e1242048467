"""Choose how strongly each kind of unit is smoothed when it may get any form.

What helps INT8, whose activations share one scale, may harm weights of 4 bits. So an alpha is scored by the sum of the
effects of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edge_engines.budget.forms import offered_forms
from edge_engines.budget.measure import FormMeter
from edge_engines.budget.model import FormModel
from edge_engines.checkpoint.spec import Float32
from edge_engines.sensitivity.alphas import ALPHAS, KINDS
from edge_engines.sensitivity.int8 import activation_scale
from edge_engines.sensitivity.smoothing import Smoothing
from edge_engines.sensitivity.subject import Subject

SCORED = ("int8", "w4")  # w8 does a hundredth of the harm of either


def choose_alphas(subject: Subject, ranges: Mapping[str, Float32], lowering: str) -> dict[str, float]:
    """Return the alpha of each kind of unit that is smoothed: the one whose forms of that kind move the logits least.

    One alpha per kind, scored on text that gave no ranges: an alpha per unit over-fits. One model at a time is in
    memory.
    """
    subject.progress.step("choosing the smoothing", (len(ALPHAS) + 1) * len(KINDS))
    best: dict[str, tuple[float, float]] = {}
    base: Sequence[Float32] | None = None
    for alpha in (0.0, *ALPHAS):
        effects, base = _measure_kinds(subject, ranges, alpha, lowering, base)
        best = {kind: min(best.get(kind, (np.inf, 0.0)), (kl, alpha)) for kind, kl in effects.items()}
    return {kind: alpha for kind, (_, alpha) in best.items() if alpha}


def _measure_kinds(
    subject: Subject, ranges: Mapping[str, Float32], alpha: float, lowering: str, base: Sequence[Float32] | None
) -> tuple[dict[str, float], Sequence[Float32]]:
    """Return the effect of each kind of unit when all is smoothed by `alpha`, and the baseline it is measured from."""
    ranking = subject.texts.ranking
    model = smoothed(subject, ranges, dict.fromkeys(KINDS, alpha) if alpha else {}, lowering)
    journal = subject.calibrated.within("ranking", ranking.digest, "smoothing of forms", lowering, str(alpha))
    meter = FormMeter(model, ranking.ids, journal, base)
    effects: dict[str, float] = {}
    for kind in KINDS:
        units = [unit for unit in model.units if unit.rpartition(".")[2] == kind]
        forms = [form for form in offered_forms(lowering, model.width(units[0])) if form in SCORED]
        effects[kind] = sum(meter.of(dict.fromkeys(units, form)).kl for form in forms)
        subject.progress.advance(1)
    subject.cost.layer_runs += model.passes.num_layer_runs
    return effects, meter.base


def smoothed(subject: Subject, ranges: Mapping[str, Float32], alphas: Mapping[str, float], lowering: str) -> FormModel:
    """Fold smoothing into a model, and set the activation scale of each unit behind it."""
    factors = Smoothing(alphas).factors(subject.spec, subject.weights, ranges)
    one = np.float32(1)
    scales = {
        unit: activation_scale(float((seen / factors.get(unit, one)).max()), unit) for unit, seen in ranges.items()
    }
    return FormModel(subject.spec, subject.weights, factors, scales, lowering)
