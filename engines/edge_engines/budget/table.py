"""Say what was measured and chosen in budget mode: the content of budget.json."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from edge_engines.graph.linear import Form
from edge_engines.sensitivity.table import GateRow

FORMAT = 1
FILE_NAME = "budget.json"
# Why a unit has its form: it is the cheapest of all that are offered; cheaper ones are ruled out by the unit's own
# error; cheaper ones would cost the gate more than they save; it shares the weights of another unit.
Reason = Literal["cheapest", "hard rule", "gate", "group"]


class OptionRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One form of a unit: its cost, and what it does when the unit alone has it."""

    form: Form
    cost: int  # bytes: of the engine, or of those that a decode step reads
    kl: float  # nats per token on the ranking text
    pooled_error: float
    per_token_error: float
    is_ruled_out: bool  # by its own error
    is_shared_out: bool  # kl is a share of what was measured for all units together


class UnitRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One unit and the form it was given. A tied table goes by the name of the head."""

    unit: str
    form: Form
    reason: Reason
    options: list[OptionRow]


class CheckRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One choice on the gate's text."""

    name: str
    engine_bytes: int  # predicted
    step_bytes: int  # predicted: weights that a decode step reads
    kl: float  # sum of the units' effects
    ratio: float
    upper: float  # 95 % bound
    is_chosen: bool


class FrontRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One choice that no other beats in both: cost and sum of the units' effects, not held against the gate."""

    cost: int
    kl: float


class BudgetTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of budget.json."""

    format: int
    model: str
    checkpoint_sha256: str
    target: str
    objective: Literal["bytes", "time"]
    texts: dict[str, str]  # digest of each text
    threshold: float
    alphas: dict[str, float]  # smoothing per kind of unit
    gate: GateRow
    checks: list[CheckRow]  # in the order in which they were made
    front: list[FrontRow]  # from the least effect to the least cost
    units: list[UnitRow]
    seconds: float
    model_passes: float
    cache_hits: int  # results that had been measured before


def write_budget(folder: Path, table: BudgetTable) -> Path:
    """Write `folder/budget.json` and return its path; the folder is made durable by its owner."""
    path = folder / FILE_NAME
    path.write_bytes(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
    return path
