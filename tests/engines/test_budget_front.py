"""The search of budget mode on numbers made here: the front against brute force, the walk along it with few checks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest

from edge_engines.budget.front import Option, Point, pareto_front, spread
from edge_engines.budget.options import allowed, explain
from edge_engines.budget.table import OptionRow
from edge_engines.budget.walk import find_cheapest
from edge_engines.graph.linear import Form
from edge_runtime.errors import BuildError

FORMS: tuple[Form, ...] = ("fp32", "w8", "int8", "w4")
BYTES = (4.0, 1.0625, 1.01, 0.625)
HARM = (0.0, 0.01, 1.0, 20.0)  # how the forms compare on the whole

Options = dict[str, list[Option]]


def toy(seed: int, num_units: int = 8) -> Options:
    """Units of sizes and sensitivities that differ a hundredfold, forms in no fixed order of harm."""
    rng = np.random.default_rng(seed)
    options: Options = {}
    for unit in range(num_units):
        size, sensitivity = rng.uniform(0.3, 30) * 1e6, 10 ** rng.uniform(-5, -3)
        harms = [h * sensitivity * rng.lognormal(0, 1) for h in HARM]
        options[f"u{unit}"] = [Option(*o) for o in zip(FORMS, (int(size * b) for b in BYTES), harms, strict=True)]
    return options


class BruteForce:
    """All choices there are."""

    def __init__(self, options: Options) -> None:
        self._costs, self._effects = np.zeros(1), np.zeros(1)
        for offered in options.values():
            self._costs = np.add.outer(self._costs, [o.cost for o in offered]).ravel()
            self._effects = np.add.outer(self._effects, [o.effect for o in offered]).ravel()

    def least_cost(self, budget: float) -> int:
        return int(self._costs[self._effects <= budget].min())


def of_front(front: list[Point], budget: float) -> Point:
    return [point for point in front if point.effect <= budget * (1 + 1e-12)][-1]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("most_points", [4096, 128])
def test_chosen_forms_are_within_five_percent_of_the_best(seed: int, most_points: int) -> None:
    """quantization.md, section 7, 11. Exact with the points kept by default, 3 % off with 128, of 65,536 choices."""
    options = toy(seed)
    front, all_choices = pareto_front(options, most_points), BruteForce(options)
    for budget in 10 ** np.linspace(-5, -1, 9):
        assert of_front(front, budget).cost <= 1.05 * all_choices.least_cost(budget)


def test_few_units_are_solved_exactly() -> None:
    options = toy(7, num_units=5)  # 1,024 choices: nothing is thinned
    front, all_choices = pareto_front(options), BruteForce(options)
    for budget in 10 ** np.linspace(-5, -1, 9):
        assert of_front(front, budget).cost == all_choices.least_cost(budget)


@pytest.mark.parametrize("num_units", [1, 8, 60])
def test_no_point_of_the_front_is_dominated(num_units: int) -> None:
    front = pareto_front(toy(3, num_units))
    for before, after in itertools.pairwise(front):
        assert after.cost < before.cost
        assert after.effect > before.effect


def test_front_reaches_from_no_effect_to_the_least_bytes() -> None:
    options = toy(5, 40)
    front = pareto_front(options)
    assert set(front[0].forms.values()) == {"fp32"}
    assert front[-1].cost == sum(min(o.cost for o in offered) for offered in options.values())


def test_points_say_what_their_forms_add_up_to() -> None:
    options = toy(2, 40)
    for point in pareto_front(options)[::97]:
        picked = [next(o for o in options[unit] if o.form == form) for unit, form in point.forms.items()]
        assert list(point.forms) == list(options)
        assert point.cost == sum(o.cost for o in picked)
        assert point.effect == pytest.approx(math.fsum(o.effect for o in picked), rel=1e-12)


def test_the_same_options_give_the_same_front() -> None:
    assert pareto_front(toy(4, 60)) == pareto_front(toy(4, 60))


def test_equal_options_are_decided_by_their_order() -> None:
    options = {"a": [Option("fp32", 10, 0.0), Option("w8", 4, 0.1), Option("int8", 4, 0.1)]}
    assert [point.forms["a"] for point in pareto_front(options)] == ["fp32", "w8"]


def test_spread_points_save_at_least_the_share_asked_for() -> None:
    front = pareto_front(toy(4, 60))
    kept = spread(front, 0.01)
    assert kept[0] is front[0]
    assert kept[-1] is front[-1]
    assert all(b.cost <= a.cost * 0.99 for a, b in itertools.pairwise(kept[:-1]))
    assert len(kept) < len(front) / 10


class Gate:
    """A made-up gate whose bound grows with the sum of effects, which it counts the checks of."""

    def __init__(self, bound: Callable[[Point], float]) -> None:
        self._bound = bound
        self.asked: list[Point] = []

    def __call__(self, point: Point) -> float:
        self.asked.append(point)
        return self._bound(point)


@pytest.mark.parametrize("slope", [0.3, 1.0, 4.0])
def test_cheapest_passing_point_is_found_with_few_checks(slope: float) -> None:
    """The sum of effects mispredicts the joint effect by up to a quarter, from point to point."""
    front = spread(pareto_front(toy(6, 120)), 0.005)
    gate = Gate(lambda p: math.exp(slope * p.effect * (1 + 0.25 * math.sin(p.cost))))
    found = find_cheapest(front, gate, 1.05)
    passing = [point for point in front if gate(point) <= 1.05]
    assert len(front) > 200
    assert gate(found) <= 1.05
    assert found.cost <= 1.05 * passing[-1].cost  # of a ragged edge, not always the very last
    assert len(gate.asked) - len(front) <= 1 + 9 + 2 + 1


def test_neighbour_that_passes_against_prediction_is_taken() -> None:
    front = [Point(100 - i, 0.01 * i, {}) for i in range(60)]
    gate = Gate(lambda p: 1.06 if 70 < p.cost < 75 or p.cost < 69 else 1.0)  # a hole in front of 70 and 69
    assert find_cheapest(front, gate, 1.05, max_checks=20, neighbours=6).cost == 69


def test_last_point_is_taken_when_everything_passes() -> None:
    front = [Point(100 - i, 0.01 * i, {}) for i in range(60)]
    assert find_cheapest(front, Gate(lambda _: 1.0), 1.05).cost == 41


def test_a_gate_that_nothing_passes_is_refused_with_the_numbers() -> None:
    with pytest.raises(BuildError, match=r"1\.0000, at most 0\.9"):
        find_cheapest([Point(100, 0.0, {}), Point(50, 0.1, {})], Gate(lambda _: 1.0), 0.9)


def test_nothing_is_taken_that_is_not_a_number() -> None:
    front = [Point(100 - i, 0.01 * i, {}) for i in range(10)]
    assert find_cheapest(front, Gate(lambda p: 1.0 if p.cost > 95 else math.nan), 1.05).cost == 96


def row(form: Form, cost: int, *, is_ruled_out: bool = False) -> OptionRow:
    return OptionRow(form, cost, 0.1, 0.05, 0.05, is_ruled_out, False)


def test_reasons_follow_from_what_is_cheaper() -> None:
    rows = {
        "smallest": [row("fp32", 40), row("w8", 11), row("w4", 6)],
        "ruled": [row("fp32", 40), row("w8", 11), row("w4", 6, is_ruled_out=True)],
        "gated": [row("fp32", 40), row("w8", 11), row("int8", 10, is_ruled_out=True), row("w4", 6)],
    }
    found = explain(rows, {"smallest": "w4", "ruled": "w8", "gated": "w8"})
    assert [unit.reason for unit in found] == ["cheapest", "hard rule", "gate"]
    assert [option.form for option in allowed(rows)["gated"]] == ["fp32", "w8", "w4"]
