"""Say which forms each unit may be given, at what cost and with which effect, and why it got the one it has."""

from __future__ import annotations

from collections.abc import Mapping

from edge_engines.budget.costs import Costs, Objective
from edge_engines.budget.forms import Forms
from edge_engines.budget.front import Option
from edge_engines.budget.measure import Measured
from edge_engines.budget.table import OptionRow, Reason, UnitRow
from edge_engines.graph.linear import Form

Measurements = Mapping[str, Mapping[Form, Measured]]  # by unit and form, of all forms but float


def list_options(
    measured: Measurements, costs: Costs, float_form: Form, objective: Objective, threshold: float
) -> dict[str, list[OptionRow]]:
    """Return all forms of each unit, float first.

    The hard rule: a unit whose output errs by more than `threshold` in a form is not given that form. What it does in
    other forms is of no account, so a unit that INT8 is too coarse for may still have weights of 8 or 4 bits.
    """
    prices = costs.of_units({unit: (float_form, *forms) for unit, forms in measured.items()}, objective)
    rows: dict[str, list[OptionRow]] = {}
    for unit, forms in measured.items():
        rows[unit] = [OptionRow(float_form, prices[unit][float_form], 0.0, 0.0, 0.0, False, False)]
        for form, found in forms.items():
            error = found.local
            is_ruled_out = not error.score <= threshold  # NaN is
            rows[unit].append(
                OptionRow(
                    form,
                    prices[unit][form],
                    found.kl,
                    error.pooled,
                    error.per_token,
                    is_ruled_out,
                    found.is_shared_out,
                )
            )
    return rows


def allowed(rows: Mapping[str, list[OptionRow]]) -> dict[str, list[Option]]:
    """Return what the search may take."""
    return {
        unit: [Option(row.form, row.cost, row.kl) for row in forms if not row.is_ruled_out]
        for unit, forms in rows.items()
    }


def explain(rows: Mapping[str, list[OptionRow]], forms: Forms) -> list[UnitRow]:
    """Return each unit with its form and the reason."""
    return [UnitRow(unit, forms[unit], _reason(offered, forms[unit]), offered) for unit, offered in rows.items()]


def _reason(offered: list[OptionRow], form: Form) -> Reason:
    cost = next(row.cost for row in offered if row.form == form)
    cheaper = [row for row in offered if row.cost < cost]
    if not cheaper:
        return "cheapest"
    return "hard rule" if all(row.is_ruled_out for row in cheaper) else "gate"
