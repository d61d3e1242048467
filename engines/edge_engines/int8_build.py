"""Take the steps of a build that only INT8 has: choose the units, then hold the written engine against the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_engines.checkpoint.open import Checkpoint
from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.graph.int8_units import Int8Units
from edge_engines.perplexity import Ratio, perplexity_ratio, token_losses
from edge_engines.progress import Progress
from edge_engines.report.data import Board, ParetoPoint
from edge_engines.sensitivity.command import load_texts
from edge_engines.sensitivity.gate import BOOTSTRAP_SEED, Losses
from edge_engines.sensitivity.passes import Ids
from edge_engines.sensitivity.plan import Int8Plan
from edge_engines.sensitivity.planning import plan_int8
from edge_engines.sensitivity.select import GATE, THRESHOLD
from edge_engines.sensitivity.smoothing import FoldedWeights
from edge_engines.sensitivity.table import GateRow, Table, read_table, write_table
from edge_engines.text_run import engine_logits
from edge_engines.texts.sets import DEFAULT_SIZES, TextSets, TextSizes
from edge_engines.unit_choice import GateRefusedError, UnitChoice
from edge_runtime.manifest import GateFacts, Manifest, UnitPrecision


@dataclass(frozen=True, slots=True)
class Int8Options:
    """How INT8 is chosen; the defaults are the product's rules A2 and A4."""

    calibration: Path | None = None  # text, chats or token ids of the user's own; None: the shipped texts
    plan: Path | None = None  # a sensitivity.json whose choice is taken over
    threshold: float = THRESHOLD
    gate: float = GATE
    journal: Path | None = None  # folder where measurements are kept for the next build; None: nowhere
    sizes: TextSizes = DEFAULT_SIZES


@dataclass(frozen=True, slots=True)
class Chosen:
    """INT8 or float for each unit, by measured sensitivity. See UnitChoice."""

    plan: Int8Plan
    table: Table
    texts: TextSets
    base_losses: Losses  # [N, S - 1] of the gate's text

    @property
    def simulated(self) -> GateRow:
        """See UnitChoice.simulated."""
        return self.table.gate

    @property
    def forms(self) -> None:
        """See UnitChoice.forms."""
        return None

    @property
    def sensitivity(self) -> Table:
        """See UnitChoice.sensitivity."""
        return self.table

    def units(self, spec: ModelSpec) -> Int8Units:
        """See UnitChoice.units."""
        shares = spec.tied_head and "head" in self.plan.int8
        unsmoothed = np.ones(spec.hidden, np.float32)
        return Int8Units(
            self.plan.scales, "embed" in self.plan.int8, self.plan.factors.get("head", unsmoothed) if shares else None
        )

    def weights(self, model: Checkpoint) -> FoldedWeights:
        """See UnitChoice.weights."""
        return FoldedWeights(model.spec, model, self.plan.factors)

    def precisions(self, form: Callable[[str], str]) -> list[UnitPrecision]:
        """See UnitChoice.precisions."""
        return [UnitPrecision(row.unit, form(row.unit), row.reason) for row in self.table.units]

    def pareto(self, boards: Sequence[Board]) -> list[ParetoPoint]:
        """See UnitChoice.pareto."""
        return []

    def write(self, folder: Path) -> None:
        """See UnitChoice.write."""
        write_table(folder, self.table)


def choose_units(model: Checkpoint, options: Int8Options, progress: Progress) -> Chosen:
    """Measure, or take over a plan, and pass the gate in simulation.

    Raises GateRefusedError when no unit may run INT8, BuildError for a plan that does not fit or fails the gate.
    """
    texts = load_texts(model, options.calibration, options.sizes)
    taken = read_table(options.plan) if options.plan is not None else None
    found, table = plan_int8(
        model,
        texts,
        progress,
        threshold=options.threshold,
        gate=options.gate,
        chosen=taken,
        journal=options.journal,
    )
    choice = Chosen(found.plan, table, texts, found.base_losses)
    if not found.plan.int8:
        raise GateRefusedError(
            f"no layer can run INT8: each breaks the threshold of {options.threshold:g} or the gate of "
            f"{options.gate:g}",
            remedy="build with --precision fp16 or w8, or raise --gate or --threshold knowingly",
            choice=choice,
        )
    return choice


def gate_engine(folder: Path, draft: Manifest, chosen: UnitChoice, limit: float, progress: Progress) -> GateFacts:
    """Run the gate's text through the engine in `folder` as a user would run it, and return how it stands.

    The choice was made in simulation; this is the last word. Raises GateRefusedError when the engine fails the gate.
    """
    ids = chosen.texts.gate.ids[:, : draft.geometry.capacity]
    base = chosen.base_losses[:, : ids.shape[1] - 1]
    ratio = engine_ratio(folder, draft, ids, base, progress)
    simulated = chosen.simulated
    facts = GateFacts(
        limit=limit,
        ratio=ratio.ratio,
        upper=ratio.upper,
        base_perplexity=float(np.exp(base.mean())),
        tokens=base.size,
        simulated_ratio=simulated.ratio,
        kl=simulated.kl,
        same_top1=simulated.same_top1,
    )
    progress.note(f"the engine's perplexity is x {facts.ratio:.4f}, at most {facts.upper:.4f} (limit {limit:g})")
    if not facts.upper <= limit:  # NaN fails too
        raise GateRefusedError(
            f"the engine fails the gate: its perplexity is {facts.ratio:.4f} times the baseline's, at most "
            f"{facts.upper:.4f}; {limit:g} is allowed, and the simulation gave {simulated.ratio:.4f}",
            remedy="build with --precision fp16 or w8, give --calibration text of your own, or raise --gate knowingly",
            choice=chosen,
        )
    return facts


def engine_ratio(folder: Path, draft: Manifest, ids: Ids, base: Losses, progress: Progress) -> Ratio:
    """Return the engine's perplexity on `ids` [N, S] by that of a baseline with the losses `base` [N, S - 1]."""
    progress.step("running the gate's text through the engine", len(ids))
    losses = np.empty_like(base)
    for i, logits in enumerate(engine_logits(folder, draft, ids)):
        losses[i] = token_losses(logits, ids[i])
        progress.advance(1)
    return perplexity_ratio(base, losses, seed=BOOTSTRAP_SEED)
