"""Say what a build needs of a choice of precisions, whichever way it was made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from edge_engines.checkpoint.open import Checkpoint
from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.graph.int8_units import Int8Units
from edge_engines.graph.linear import Form
from edge_engines.report.data import Board, ParetoPoint
from edge_engines.sensitivity.gate import Losses
from edge_engines.sensitivity.smoothing import FoldedWeights
from edge_engines.sensitivity.table import GateRow, Table
from edge_engines.texts.sets import TextSets
from edge_runtime.errors import BuildError
from edge_runtime.manifest import UnitPrecision


class UnitChoice(Protocol):
    """The precision of each unit of one checkpoint, with what the engine will be held against."""

    @property
    def texts(self) -> TextSets:
        """Return the texts it was made with."""
        ...

    @property
    def base_losses(self) -> Losses:
        """Return the baseline's losses [N, S - 1] on the gate's text."""
        ...

    @property
    def simulated(self) -> GateRow:
        """Return how the choice stood in simulation."""
        ...

    @property
    def forms(self) -> Mapping[str, Form] | None:
        """Return the form of every unit, or None where they are INT8 or float as `units` says."""
        ...

    @property
    def sensitivity(self) -> Table | None:
        """Return what INT8 does to each unit, where that was what was asked."""
        ...

    def units(self, spec: ModelSpec) -> Int8Units:
        """Return what the graph has to know of units in INT8."""
        ...

    def weights(self, model: Checkpoint) -> FoldedWeights:
        """Return the weights that the graph is written from: smoothing folded in."""
        ...

    def precisions(self, form: Callable[[str], str]) -> list[UnitPrecision]:
        """Return precision and reason of each unit; `form` says how the graph has written it."""
        ...

    def pareto(self, boards: Sequence[Board]) -> list[ParetoPoint]:
        """Return other choices that were held against the gate, for the report."""
        ...

    def write(self, folder: Path) -> None:
        """Write what was measured and chosen as JSON."""
        ...


class GateRefusedError(BuildError):
    """No engine, because of its accuracy; `choice` says what was measured."""

    def __init__(self, message: str, *, remedy: str, choice: UnitChoice) -> None:
        super().__init__(message, remedy=remedy)
        self.choice = choice
