"""Take the choice from a table that a person may have edited: check that it fits the model, say what was changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.sensitivity.assess import UnitScore
from edge_engines.sensitivity.blocks import BODY_UNITS, EMBED, HEAD
from edge_engines.sensitivity.measure import Effect, LocalError, list_units
from edge_engines.sensitivity.select import Reason
from edge_engines.sensitivity.table import FILE_NAME, Table, UnitRow
from edge_runtime.errors import BuildError

KINDS = (*BODY_UNITS, HEAD)


def check_table(table: Table, spec: ModelSpec, checkpoint_sha256: str) -> None:
    """Refuse a table that is not of this checkpoint. Raises BuildError naming what is wrong."""
    if table.checkpoint_sha256 != checkpoint_sha256:
        raise BuildError(
            f"{FILE_NAME} was measured on another checkpoint: {table.model} with SHA-256 "
            f"{table.checkpoint_sha256[:12]}, this one has {checkpoint_sha256[:12]}",
            remedy="measure this checkpoint, or build the one that was measured",
        )
    _check_names([row.unit for row in table.units], list_units(spec))
    for kind, alpha in table.alphas.items():
        if kind not in KINDS or not 0 <= alpha <= 1:
            raise BuildError(
                f"{FILE_NAME}: alphas.{kind} is {alpha:g}", remedy=f"give {', '.join(KINDS)} a number from 0 to 1"
            )
    rows = {row.unit: row for row in table.units}
    if spec.tied_head and rows[EMBED].precision != rows[HEAD].precision:
        raise BuildError(
            f"{FILE_NAME}: {EMBED} is {rows[EMBED].precision} and {HEAD} is {rows[HEAD].precision}, but this model has "
            "one table for both",
            remedy="give both the same precision",
        )


def chosen_units(table: Table) -> frozenset[str]:
    """Return the units that the table has in INT8."""
    return frozenset(row.unit for row in table.units if row.precision == "int8")


def reasons_of(table: Table) -> dict[str, Reason]:
    """Return the reason of each unit: the measured one where the precision follows from it, else `by hand`."""
    rows = {row.unit: row for row in table.units}
    return {unit: row.reason if _follows(row, rows) else "by hand" for unit, row in rows.items()}


def scores_of(table: Table) -> list[UnitScore]:
    """Return what was measured of each unit."""
    return [
        UnitScore(
            row.unit,
            row.weights,
            LocalError(row.pooled_error, row.per_token_error, row.worst_token_error),
            row.score_without_smoothing,
            Effect(row.kl, row.kl_p99, row.kl_max, row.same_top1),
        )
        for row in table.units
    ]


def _check_names(named: list[str], units: list[str]) -> None:
    faults = {
        "unknown": [unit for unit in named if unit not in units],
        "missing": [unit for unit in units if unit not in named],
        "named twice": [unit for unit, count in Counter(named).items() if count > 1],
    }
    for fault, names in faults.items():
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise BuildError(
                f"{FILE_NAME}: {fault}: {', '.join(names[:3])}{more}",
                remedy=f"name each of the {len(units)} units once, from {units[0]} to {units[-1]}",
            )


def _follows(row: UnitRow, rows: Mapping[str, UnitRow]) -> bool:
    """Say whether a precision is the one that was measured, which its reason tells."""
    if row.reason == "group":
        return _follows(rows[HEAD], rows)
    return row.reason != "by hand" and (row.precision == "int8") == (row.reason in ("int8", "given back"))
