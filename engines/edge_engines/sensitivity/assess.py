"""Assess a model for INT8: ranges, smoothing, scores of each unit, choice under the gate. The steps in order.

Three disjoint texts: C gives ranges, R ranks units and chooses the smoothing, G is the gate's. Deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import Float32, ModelSpec, Weights
from edge_engines.perplexity import Ratio, perplexity_ratio, token_losses
from edge_engines.progress import Progress
from edge_engines.sensitivity.blocks import BODY_UNITS, HEAD, Multiply, multiply_exactly
from edge_engines.sensitivity.int8 import Int8Multiply, activation_scale
from edge_engines.sensitivity.measure import (
    Effect,
    EffectMeter,
    LocalError,
    list_units,
    log_probabilities,
    measure_local,
)
from edge_engines.sensitivity.passes import Ids, Passes, collect_ranges
from edge_engines.sensitivity.select import GATE, THRESHOLD, Candidate, Choice, choose_int8
from edge_engines.sensitivity.smoothing import FoldedWeights, Smoothing
from edge_engines.texts.sets import TextSets

ALPHAS = (0.5, 0.65, 0.8)  # tried for each kind of unit, besides leaving it alone
BOOTSTRAP_SEED = 0


@dataclass(frozen=True, slots=True)
class UnitScore:
    """Everything that was measured of one unit."""

    unit: str
    num_weights: int
    local: LocalError
    effect: Effect


@dataclass(frozen=True, slots=True)
class Assessment:
    """What INT8 does to a model, and the choice that follows."""

    scores: Sequence[UnitScore]  # in graph order
    alphas: Mapping[str, float]  # smoothing per kind of unit; a kind that is not named is left alone
    scales: Mapping[str, float]  # activation scale of each unit's input, behind smoothing
    choice: Choice
    ratio: Ratio  # of the chosen set on the gate's text
    base_perplexity: float
    joint: Effect  # of the chosen set on the ranking text
    num_model_passes: float  # cost: layers run over all sequences, in passes over the ranking text

    @property
    def int8_share(self) -> float:
        """Share of the body's weights that runs INT8."""
        body = [score for score in self.scores if score.unit != HEAD]
        chosen = sum(score.num_weights for score in body if score.unit in self.choice.int8)
        return chosen / sum(score.num_weights for score in body)


def assess(
    spec: ModelSpec,
    weights: Weights,
    texts: TextSets,
    progress: Progress,
    *,
    threshold: float = THRESHOLD,
    gate: float = GATE,
) -> Assessment:
    """Measure and choose. Needs the model's FP32 bytes once, and the logits of the ranking text once.

    Raises BuildError when activations are not finite or no choice passes the gate.
    """
    num_layers = len(spec.layers)
    progress.step("collecting ranges", num_layers)
    ranges = collect_ranges(Passes(spec, weights), texts.calibration.ids, progress.advance)
    progress.step("choosing the smoothing", (len(ALPHAS) + 1) * (len(BODY_UNITS) + 1))
    alphas = choose_alphas(spec, weights, ranges, texts.ranking.ids, progress)

    passes, scales = smoothed(spec, weights, ranges, alphas)
    progress.step("measuring each unit's own error", num_layers)
    local = measure_local(passes, texts.ranking.ids, scales, progress.advance)
    units = list_units(spec)
    progress.step("measuring each unit's effect on the logits", len(units))
    meter = EffectMeter(passes, texts.ranking.ids, scales, _base(passes, texts.ranking.ids))
    effects = dict(_each(meter, units, progress))
    scores = [UnitScore(unit, _num_weights(passes, unit), local[unit], effects[unit]) for unit in units]

    progress.step("checking the gate", None)
    judge = _Judge(passes, texts.gate.ids, scales, progress)
    candidates = [Candidate(s.unit, s.num_weights, s.local.score, s.effect.kl) for s in scores]
    choice = choose_int8(candidates, judge, threshold=threshold, gate=gate)
    return Assessment(
        scores=scores,
        alphas=alphas,
        scales=scales,
        choice=choice,
        ratio=judge.ratios[choice.int8],
        base_perplexity=judge.base_perplexity,
        joint=meter.of(choice.int8),
        num_model_passes=passes.num_layer_runs / (num_layers * len(texts.ranking.ids)),
    )


def choose_alphas(
    spec: ModelSpec, weights: Weights, ranges: Mapping[str, Float32], ids: Ids, progress: Progress
) -> dict[str, float]:
    """Return the smoothing of each kind of unit: the alpha whose INT8 of that kind alone moves the logits least.

    One alpha per kind, scored on text that gave no ranges: an alpha per unit over-fits.
    """
    kinds = (*BODY_UNITS, HEAD)
    best: dict[str, tuple[float, float | None]] = {}
    for alpha in (None, *ALPHAS):
        passes, scales = smoothed(spec, weights, ranges, dict.fromkeys(kinds, alpha) if alpha else {})
        meter = EffectMeter(passes, ids, scales, _base(passes, ids))
        for kind in kinds:
            kl = meter.of({unit for unit in scales if unit.rpartition(".")[2] == kind}).kl
            best[kind] = min(best.get(kind, (np.inf, None)), (kl, alpha), key=lambda pair: pair[0])
            progress.advance(1)
    return {kind: alpha for kind, (_, alpha) in best.items() if alpha is not None}


def smoothed(
    spec: ModelSpec, weights: Weights, ranges: Mapping[str, Float32], alphas: Mapping[str, float]
) -> tuple[Passes, dict[str, float]]:
    """Return the model with smoothing folded in, and the activation scale of each unit."""
    factors = Smoothing(alphas).factors(spec, weights, ranges)
    folded = FoldedWeights(spec, weights, factors)
    one = np.float32(1)
    scales = {
        unit: activation_scale(float((seen / factors.get(unit, one)).max()), unit) for unit, seen in ranges.items()
    }
    return Passes(folded.spec, folded), scales


class _Judge:
    """The gate: the perplexity of a set of INT8 units against that of the baseline, on the gate's text."""

    def __init__(self, passes: Passes, ids: Ids, scales: Mapping[str, float], progress: Progress) -> None:
        self._passes, self._ids, self._scales, self._progress = passes, ids, scales, progress
        self._base = self._losses(multiply_exactly)
        self.base_perplexity = float(np.exp(self._base.mean()))
        self.ratios: dict[frozenset[str], Ratio] = {}

    def __call__(self, int8: frozenset[str]) -> float:
        losses = self._losses(Int8Multiply(self._scales, int8))
        ratio = perplexity_ratio(self._base, losses, seed=BOOTSTRAP_SEED)
        self.ratios[int8] = ratio
        self._progress.note(f"{len(int8)} units in INT8: perplexity x {ratio.ratio:.4f}, at most {ratio.upper:.4f}")
        return ratio.upper

    def _losses(self, multiply: Multiply) -> NDArray[np.float64]:
        stream = self._passes.finish(self._passes.embed(self._ids), multiply)
        rows = zip(self._passes.logits(stream, multiply), self._ids, strict=True)
        return np.array([token_losses(logits, ids) for logits, ids in rows])


def _base(passes: Passes, ids: Ids) -> list[Float32]:
    """Return the FP32 log-probabilities [S, V] of each sequence."""
    stream = passes.finish(passes.embed(ids), multiply_exactly)
    return [log_probabilities(logits) for logits in passes.logits(stream)]


def _each(meter: EffectMeter, units: Iterable[str], progress: Progress) -> Iterable[tuple[str, Effect]]:
    for unit in units:
        yield unit, meter.of_one(unit)
        progress.advance(1)


def _num_weights(passes: Passes, unit: str) -> int:
    if unit == HEAD:
        return passes.ends.head.size
    _, layer, kind = unit.split(".")
    return passes.block(int(layer)).weights[kind].size
