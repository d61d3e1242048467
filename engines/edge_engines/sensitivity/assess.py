"""Assess a model for INT8: ranges, smoothing, scores of each unit, choice under the gate. The steps in order.

Three disjoint texts: C gives ranges, R ranks units and chooses the smoothing, G is the gate's. Deterministic; what the
journal holds is not measured again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edge_engines.checkpoint.spec import Float32
from edge_engines.perplexity import Ratio
from edge_engines.sensitivity.alphas import Smoothed, choose_alphas, smoothed
from edge_engines.sensitivity.blame import find_blamed
from edge_engines.sensitivity.blocks import EMBED, HEAD
from edge_engines.sensitivity.gate import Check, Judge, Losses
from edge_engines.sensitivity.journal import Journal
from edge_engines.sensitivity.measure import Effect, EffectMeter, LocalError, find_baseline, list_units, measure_local
from edge_engines.sensitivity.passes import Passes
from edge_engines.sensitivity.plan import Int8Plan
from edge_engines.sensitivity.select import GATE, THRESHOLD, Candidate, Choice, choose_int8
from edge_engines.sensitivity.subject import Subject

AIM = 0.9  # share of the gate's room that a choice may take: a written engine was seen to use 0.05 more of it


@dataclass(frozen=True, slots=True)
class UnitScore:
    """Everything that was measured of one unit."""

    unit: str
    num_weights: int  # of a tied table: all of it, for embedding and head alike
    local: LocalError
    score_without_smoothing: float  # LocalError.score when nothing is smoothed
    effect: Effect  # of embedding and head together where they are tied


@dataclass(frozen=True, slots=True)
class Assessment:
    """What INT8 does to a model, and the choice that follows."""

    scores: Sequence[UnitScore]  # in graph order
    alphas: Mapping[str, float]  # smoothing per kind of unit; a kind that is not named is left alone
    scales: Mapping[str, float]  # activation scale of each unit's input, behind smoothing
    factors: Mapping[str, Float32]  # of smoothing, per unit
    choice: Choice
    final: Check  # of the chosen set on the gate's text
    checks: Sequence[Check]  # all sets that were tried there
    rule_only: Check | None  # the set that the pooled error alone would choose, nothing smoothed; None: not measured
    base_losses: Losses  # of the baseline on the gate's text
    base_perplexity: float
    joint: Effect  # of the chosen set on the ranking text
    num_model_passes: float  # cost: layers run over all sequences, in passes over the ranking text

    @property
    def ratio(self) -> Ratio:
        """Perplexity of the chosen set by that of the baseline."""
        return self.final.ratio

    @property
    def plan(self) -> Int8Plan:
        """What a build needs. A head that stays in float is left unsmoothed, so that a tied table stays one table."""
        int8 = self.choice.int8
        factors = {unit: s for unit, s in self.factors.items() if unit != HEAD or HEAD in int8}
        return Int8Plan(int8, {u: s for u, s in self.scales.items() if u in int8}, factors)


def assess(subject: Subject, *, threshold: float = THRESHOLD, gate: float = GATE) -> Assessment:
    """Measure and choose. Needs the model's FP32 bytes once, a smoothed head's again, and the ranking text's logits.

    Raises BuildError when activations are not finite or no choice passes the gate.
    """
    ranges = subject.measured_ranges()
    baseline = find_baseline(Passes(subject.spec, subject.weights), subject.texts.ranking.ids)
    alphas = choose_alphas(subject, ranges, baseline)
    plain = _local_errors(subject, smoothed(subject.spec, subject.weights, ranges, {}), {})
    model = smoothed(subject.spec, subject.weights, ranges, alphas)
    judge = Judge(model.passes, subject.texts.gate, model.scales, subject.gate(alphas), subject.progress)
    found = _assess_smoothed(subject, model, alphas, plain, baseline, judge, threshold, gate)
    pooled = pooled_rule(plain, threshold, model.passes.ends.is_tied)
    del model, baseline  # memory holds one model at a time
    rule_only = _judge_rule(subject, ranges, pooled, judge.release())
    runs = subject.cost.layer_runs / (len(subject.spec.layers) * len(subject.texts.ranking.ids))
    return replace(found, rule_only=rule_only, num_model_passes=runs)


def _assess_smoothed(
    subject: Subject,
    model: Smoothed,
    alphas: Mapping[str, float],
    plain: Mapping[str, LocalError],
    baseline: list[Float32],
    judge: Judge,
    threshold: float,
    gate: float,
) -> Assessment:
    """Score and choose with smoothing folded in; `plain` are the local errors without it. Empties `baseline`."""
    passes = model.passes
    local = _local_errors(subject, model, alphas)
    ids, ranked = subject.texts.ranking.ids, subject.ranking(alphas)
    effects = _effects(EffectMeter(passes, ids, model.scales, ranked, baseline), subject, passes.ends.is_tied)
    baseline.clear()  # the gate needs the room
    scores = [
        UnitScore(unit, count_weights(passes, unit), local[unit], plain[unit].score, effects[unit])
        for unit in list_units(subject.spec)
    ]
    subject.progress.step("checking the gate", None)
    choice = _choose(judge, scores, model, subject.gate(alphas), threshold, gate)
    final = judge.checks[choice.int8]
    choice = with_embedding(choice, passes.ends.is_tied)
    joint = EffectMeter(passes, ids, model.scales, ranked).of(choice.int8)
    subject.cost.layer_runs += passes.num_layer_runs
    return Assessment(
        scores=scores,
        alphas=alphas,
        scales=model.scales,
        factors=model.factors,
        choice=choice,
        final=final,
        checks=list(judge.checks.values()),
        rule_only=None,
        base_losses=judge.base_losses,
        base_perplexity=judge.base_perplexity,
        joint=joint,
        num_model_passes=0.0,
    )


def _judge_rule(subject: Subject, ranges: Mapping[str, Float32], pooled: frozenset[str], judge: Judge) -> Check:
    """Hold the set that the pooled error alone would choose, nothing smoothed, against the gate."""
    model = smoothed(subject.spec, subject.weights, ranges, {})
    check = judge.check(model.passes, model.scales, pooled, "rule only")
    subject.cost.layer_runs += model.passes.num_layer_runs
    return check


def candidates(scores: Sequence[UnitScore], is_tied: bool) -> list[Candidate]:
    """Return what is chosen as one; the head stands for a tied table, whose worse end counts."""
    local = {score.unit: score.local.score for score in scores}
    if is_tied:
        local[HEAD] = max(local[HEAD], local[EMBED])
    return [
        Candidate(score.unit, score.num_weights, local[score.unit], score.effect.kl)
        for score in scores
        if score.unit != EMBED or not is_tied
    ]


def with_embedding(choice: Choice, is_tied: bool) -> Choice:
    """Return a choice that names the embedding too where the head stood for both."""
    if not is_tied:
        return choice
    int8 = choice.int8 | {EMBED} if HEAD in choice.int8 else choice.int8
    return Choice(int8, {**choice.reasons, EMBED: "group"}, choice.upper, choice.num_checks)


def pooled_rule(local: Mapping[str, LocalError], threshold: float, is_tied: bool) -> frozenset[str]:
    """Return the units that the pooled error alone would let run INT8."""
    units = frozenset(unit for unit, error in local.items() if error.pooled <= threshold)
    return units - {EMBED, HEAD} if is_tied and not {EMBED, HEAD} <= units else units


def count_weights(passes: Passes, unit: str) -> int:
    """Return the number of weights of a unit."""
    if unit in (EMBED, HEAD):
        return passes.ends.head.size
    _, layer, kind = unit.split(".")
    return passes.block(int(layer)).weights[kind].size


def _local_errors(subject: Subject, model: Smoothed, alphas: Mapping[str, float]) -> dict[str, LocalError]:
    subject.progress.step("measuring each unit's own error", len(subject.spec.layers))
    ids, advance = subject.texts.ranking.ids, subject.progress.advance
    return subject.ranking(alphas).once(
        "local", dict[str, LocalError], lambda: measure_local(model.passes, ids, model.scales, advance)
    )


def _effects(meter: EffectMeter, subject: Subject, is_tied: bool) -> dict[str, Effect]:
    """Return the effect of each unit alone; that of a tied table for both its ends."""
    units = list_units(subject.spec)
    subject.progress.step("measuring each unit's effect on the logits", len(units))
    effects = {}
    for unit in units:
        effects[unit] = meter.of({EMBED, HEAD} if is_tied and unit in (EMBED, HEAD) else {unit})
        subject.progress.advance(1)
    return effects


def _choose(
    judge: Judge, scores: Sequence[UnitScore], model: Smoothed, journal: Journal, threshold: float, gate: float
) -> Choice:
    effects = {score.unit: score.effect.kl for score in scores}

    def rerank(int8: frozenset[str]) -> dict[str, float]:
        check = judge.checks[int8]
        found = find_blamed(check, effects, model.passes, model.scales, judge.ids, journal)
        effects.update(found)
        return found

    aim = 1 + AIM * (gate - 1) if gate > 1 else gate
    units = candidates(scores, model.passes.ends.is_tied)
    return choose_int8(units, judge, threshold=threshold, gate=aim, rerank=rerank)
