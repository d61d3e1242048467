"""Plan the INT8 of an open checkpoint: measure and choose, or take the choice of a table and hold it to the gate."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from edge_engines.checkpoint.open import Checkpoint
from edge_engines.progress import Progress
from edge_engines.sensitivity.alphas import smoothed
from edge_engines.sensitivity.assess import Assessment, assess
from edge_engines.sensitivity.by_hand import check_table, chosen_units, reasons_of, scores_of
from edge_engines.sensitivity.gate import Judge
from edge_engines.sensitivity.journal import open_journal
from edge_engines.sensitivity.measure import EffectMeter
from edge_engines.sensitivity.select import GATE, THRESHOLD, Choice
from edge_engines.sensitivity.subject import Subject
from edge_engines.sensitivity.table import Table, make_table
from edge_engines.texts.sets import TextSets
from edge_runtime.errors import BuildError


def plan_int8(
    model: Checkpoint,
    texts: TextSets,
    progress: Progress,
    *,
    threshold: float = THRESHOLD,
    gate: float = GATE,
    chosen: Table | None = None,
    journal: Path | None = None,
) -> tuple[Assessment, Table]:
    """Return what INT8 does to a model with the choice (its `plan` is what is built), and the table of both.

    With `chosen`, precision and smoothing are the table's; ranges and scales are collected on `texts`, and the gate
    judges that one choice. Results are kept in the folder `journal` and taken from there when nothing that they depend
    on has changed. Raises BuildError when the gate fails, or when the table does not fit the model.
    """
    begun = time.monotonic()
    spec = model.spec.for_capacity(max(text.ids.shape[1] for text in (texts.calibration, texts.ranking, texts.gate)))
    kept = open_journal(journal, model.digest, progress.note)
    as_computed = hashlib.sha256(repr(spec).encode()).hexdigest()
    subject = Subject(spec, model, texts, kept.within("spec", as_computed), progress)
    if chosen is None:
        found = assess(subject, threshold=threshold, gate=gate)
    else:
        check_table(chosen, spec, model.digest)
        found = judge_table(chosen, subject, gate=gate)
    if kept.hits:
        progress.note(f"{kept.hits} results were measured before and taken from {journal}")
    return found, make_table(
        found,
        model=model.source.name,
        checkpoint_sha256=model.digest,
        texts={name: getattr(texts, name).digest for name in ("calibration", "ranking", "gate")},
        threshold=threshold,
        gate=gate,
        seconds=time.monotonic() - begun,
        cache_hits=kept.hits,
    )


def judge_table(table: Table, subject: Subject, *, gate: float) -> Assessment:
    """Run the gate once on the choice of a checked table. Raises BuildError with the numbers when it fails."""
    int8, texts, alphas = chosen_units(table), subject.texts, table.alphas
    model = smoothed(subject.spec, subject.weights, subject.measured_ranges(), alphas)
    subject.progress.step("checking the gate", None)
    judge = Judge(model.passes, texts.gate, model.scales, subject.gate(alphas), subject.progress)
    upper, ratio = judge(int8), judge.checks[int8].ratio.ratio
    if not upper <= gate:
        raise BuildError(
            f"the plan's {len(int8)} INT8 units fail the gate: the perplexity is x {ratio:.4f}, with 95 % confidence "
            f"at most x {upper:.4f}, at most x {gate:g} is allowed",
            remedy="leave more units in fp16, or raise --gate knowingly",
        )
    joint = EffectMeter(model.passes, texts.ranking.ids, model.scales, subject.ranking(alphas)).of(int8)
    subject.cost.layer_runs += model.passes.num_layer_runs
    return Assessment(
        scores=scores_of(table),
        alphas=alphas,
        scales=model.scales,
        factors=model.factors,
        choice=Choice(int8, reasons_of(table), upper, num_checks=1),
        final=judge.checks[int8],
        checks=list(judge.checks.values()),
        rule_only=None,
        base_losses=judge.base_losses,
        base_perplexity=judge.base_perplexity,
        joint=joint,
        num_model_passes=subject.cost.layer_runs / (len(subject.spec.layers) * len(texts.ranking.ids)),
    )
