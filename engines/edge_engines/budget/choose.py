"""Choose the form of every unit: the steps in order.

ranges -> smoothing -> own errors and effects -> front of choices -> the cheapest of it that passes the gate.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_engines.budget.costs import COMPUTE, Costs, Objective
from edge_engines.budget.forms import Forms, offered_forms
from edge_engines.budget.front import pareto_front, spread
from edge_engines.budget.judge import FormJudge, Verdict
from edge_engines.budget.measure import FormMeter, measure_forms
from edge_engines.budget.model import FormModel
from edge_engines.budget.options import allowed, explain, list_options
from edge_engines.budget.smoothing import choose_alphas, smoothed
from edge_engines.budget.table import FORMAT, BudgetTable, FrontRow, OptionRow, write_budget
from edge_engines.budget.trials import Trials
from edge_engines.budget.walk import find_cheapest
from edge_engines.checkpoint.open import Checkpoint
from edge_engines.checkpoint.spec import Float32, ModelSpec
from edge_engines.graph.int8_units import Int8Units
from edge_engines.int8_build import Int8Options
from edge_engines.perplexity import perplexity
from edge_engines.planning.options import Target
from edge_engines.progress import Progress
from edge_engines.report.data import Board, ParetoPoint
from edge_engines.sensitivity.assess import AIM
from edge_engines.sensitivity.blocks import EMBED, HEAD
from edge_engines.sensitivity.command import load_texts
from edge_engines.sensitivity.gate import Losses
from edge_engines.sensitivity.journal import Journal, open_journal
from edge_engines.sensitivity.measure import Effect
from edge_engines.sensitivity.smoothing import FoldedWeights
from edge_engines.sensitivity.subject import Subject
from edge_engines.sensitivity.table import GateRow
from edge_engines.texts.sets import TextSets
from edge_runtime.errors import UsageError
from edge_runtime.manifest import UnitPrecision

LEAST_GAIN = 0.005  # of the cost: less is not worth the check of a whole new choice


@dataclass(frozen=True, slots=True)
class AutoChosen:
    """One of several forms for each unit, the cheapest that pass the gate. See UnitChoice."""

    forms: Forms  # of every unit in graph order, `embed` and `head` among them
    scales: Mapping[str, float]  # of the input of each unit in INT8
    factors: Mapping[str, Float32]  # of smoothing, per unit
    table: BudgetTable
    texts: TextSets
    base_losses: Losses  # [N, S - 1] of the gate's text

    @property
    def simulated(self) -> GateRow:
        """See UnitChoice.simulated."""
        return self.table.gate

    @property
    def sensitivity(self) -> None:
        """See UnitChoice.sensitivity."""
        return None

    def units(self, spec: ModelSpec) -> Int8Units:
        """See UnitChoice.units."""
        shares = spec.tied_head and self.forms[HEAD] == "int8"
        factors = self.factors.get(HEAD, np.ones(spec.hidden, np.float32)) if shares else None
        return Int8Units(self.scales, self.forms[EMBED] == "int8", factors)

    def weights(self, model: Checkpoint) -> FoldedWeights:
        """See UnitChoice.weights."""
        return FoldedWeights(model.spec, model, self.factors)

    def precisions(self, form: Callable[[str], str]) -> list[UnitPrecision]:
        """See UnitChoice.precisions."""
        reasons = {row.unit: row.reason for row in self.table.units}
        return [UnitPrecision(unit, form(unit), reasons.get(unit, "group")) for unit in self.forms]

    def write(self, folder: Path) -> None:
        """See UnitChoice.write."""
        write_budget(folder, self.table)

    def pareto(self, boards: Sequence[Board]) -> list[ParetoPoint]:
        """See UnitChoice.pareto; times of a token are predicted for the first of `boards`."""
        board = boards[0] if boards else None
        return [
            ParetoPoint(
                row.name,
                row.engine_bytes,
                row.ratio,
                row.step_bytes / (board.gb_per_s * 1e6) if board else None,
                board.name if board else None,
                row.is_chosen,
            )
            for row in self.table.checks
            if math.isfinite(row.ratio)
        ]


def choose_auto(
    model: Checkpoint,
    options: Int8Options,
    progress: Progress,
    *,
    target: Target,
    lowering: str,
    capacity: int,
    objective: Objective = "bytes",
) -> AutoChosen:
    """Measure, and choose the cheapest forms that pass the gate in simulation.

    Needs the model's FP32 bytes twice or three times, and the logits of the ranking text once. Raises BuildError when
    no choice passes, UsageError for options that say how INT8 alone is chosen.
    """
    if options.plan is not None:
        raise UsageError(
            "a plan says which layers are INT8; precision auto chooses among more than that",
            remedy="leave the plan out, or build with --precision int8",
        )
    begun = time.monotonic()
    subject, kept = _open_subject(model, options, progress)
    ranges = subject.measured_ranges()
    alphas = choose_alphas(subject, ranges, lowering)
    ready = smoothed(subject, ranges, alphas, lowering)
    meter = FormMeter(ready, subject.texts.ranking.ids, subject.ranking(alphas).within("forms", lowering))
    measured = measure_forms(meter, lowering, progress)
    costs = Costs(ready.spec, target, lowering, capacity)
    rows = list_options(measured, costs, COMPUTE[lowering], objective, options.threshold)
    front = spread(pareto_front(allowed(rows)), LEAST_GAIN)

    progress.step("checking the gate", None)
    judge = FormJudge(ready, subject.texts.gate, subject.gate(alphas).within("forms", lowering))
    trials = Trials(judge, costs, progress)
    found = find_cheapest(front, trials, 1 + AIM * (options.gate - 1) if options.gate > 1 else options.gate)
    _try_uniform(trials, ready, lowering, rows)

    subject.cost.layer_runs += ready.passes.num_layer_runs
    checks = trials.rows(found.forms)
    verdict, joint = judge.judge(found.forms), meter.of(found.forms)
    table = BudgetTable(
        format=FORMAT,
        model=model.source.name,
        checkpoint_sha256=model.digest,
        target=target,
        objective=objective,
        texts={name: getattr(subject.texts, name).digest for name in ("calibration", "ranking", "gate")},
        threshold=options.threshold,
        alphas=alphas,
        gate=_gate_row(options.gate, verdict, joint, judge.base_losses, len(checks)),
        checks=checks,
        front=[FrontRow(point.cost, point.effect) for point in front],
        units=explain(rows, found.forms),
        seconds=round(time.monotonic() - begun, 1),
        model_passes=round(subject.cost.layer_runs / (ready.passes.num_layers * len(meter.ids)), 1),
        cache_hits=kept.hits,
    )
    return _chosen(found.forms, ready, table, subject.texts, judge.base_losses)


def _open_subject(model: Checkpoint, options: Int8Options, progress: Progress) -> tuple[Subject, Journal]:
    texts = load_texts(model, options.calibration, options.sizes)
    spec = model.spec.for_capacity(max(text.ids.shape[1] for text in (texts.calibration, texts.ranking, texts.gate)))
    kept = open_journal(options.journal, model.digest, progress.note)
    as_computed = hashlib.sha256(repr(spec).encode()).hexdigest()
    return Subject(spec, model, texts, kept.within("spec", as_computed), progress), kept


def _try_uniform(trials: Trials, model: FormModel, lowering: str, rows: Mapping[str, Sequence[OptionRow]]) -> None:
    """Hold against the gate what has one form everywhere, whatever the hard rule says: to compare the choice with."""
    offered = {unit: offered_forms(lowering, model.width(unit)) for unit in model.units}
    for form in {form: None for forms in offered.values() for form in forms}:
        forms = {unit: form if form in found else found[0] for unit, found in offered.items()}
        effects = [row.kl for unit, options in rows.items() for row in options if row.form == forms[unit]]
        trials.of(forms, math.fsum(effects))


def _gate_row(limit: float, verdict: Verdict, joint: Effect, base_losses: Losses, num_checks: int) -> GateRow:
    ratio = verdict.ratio
    return GateRow(
        limit=limit,
        ratio=ratio.ratio,
        low=ratio.low,
        high=ratio.high,
        upper=ratio.upper,
        by_domain=verdict.by_domain,
        base_perplexity=perplexity(base_losses),
        kl=joint.kl,
        kl_p99=joint.kl_p99,
        kl_max=joint.kl_max,
        same_top1=joint.same_top1,
        checks=num_checks,
    )


def _chosen(chosen: Forms, model: FormModel, table: BudgetTable, texts: TextSets, base_losses: Losses) -> AutoChosen:
    forms = {EMBED: chosen[HEAD], **chosen} if model.is_tied else dict(chosen)
    scales = {unit: model.scales[unit] for unit, form in forms.items() if form == "int8" and unit != EMBED}
    is_plain = model.is_tied and forms[HEAD] != "int8"  # a tied table that is not smoothed
    factors = {unit: s for unit, s in model.factors.items() if unit != HEAD or not is_plain}
    return AutoChosen(forms, scales, factors, table, texts, base_losses)
