"""The choice of INT8 units against brute force, and each of its rules."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, combinations

import numpy as np
import pytest

from edge_engines.sensitivity.knapsack import STEPS, Item, most_bytes
from edge_engines.sensitivity.select import Candidate, choose_int8
from edge_runtime.errors import BuildError


def make(kls: list[float], sizes: list[int] | None = None, errors: list[float] | None = None) -> list[Candidate]:
    sizes, errors = sizes or [100] * len(kls), errors or [0.01] * len(kls)
    return [Candidate(f"u{i}", s, e, k) for i, (k, s, e) in enumerate(zip(kls, sizes, errors, strict=True))]


class Additive:
    """A model whose perplexity ratio is exp of the sum of its units' effects."""

    def __init__(self, candidates: list[Candidate]) -> None:
        self._kl: Mapping[str, float] = {c.unit: c.kl for c in candidates}
        self.calls: list[frozenset[str]] = []

    def __call__(self, int8: frozenset[str]) -> float:
        self.calls.append(int8)
        return float(np.exp(sum(self._kl[unit] for unit in int8)))


def test_all_units_run_int8_when_the_gate_allows_it() -> None:
    candidates = make([0.001] * 10)
    choice = choose_int8(candidates, Additive(candidates))
    assert len(choice.int8) == 10
    assert choice.num_checks == 1


def test_a_unit_above_the_threshold_stays_fp16_whatever_the_gate_says() -> None:
    candidates = make([0.0] * 3, errors=[0.01, 0.11, 0.0999])
    choice = choose_int8(candidates, Additive(candidates))
    assert choice.reasons == {"u0": "int8", "u1": "hard rule", "u2": "int8"}


def test_the_most_harmful_per_byte_stay_fp16() -> None:
    candidates = make([0.03, 0.03, 0.02, 0.001], sizes=[1000, 100, 1000, 1000])
    choice = choose_int8(candidates, Additive(candidates))
    assert choice.int8 in ({"u2", "u3"}, {"u0", "u3"})
    assert choice.reasons["u1"] == "gate"
    assert choice.upper <= 1.05


def test_the_most_bytes_run_int8_not_the_fewest_effects() -> None:
    """u0 is the worst per byte but small; without it all others fit."""
    candidates = make([0.040, 0.011, 0.010, 0.0], sizes=[100, 1000, 1000, 1000])
    choice = choose_int8(candidates, Additive(candidates))
    assert choice.int8 == {"u1", "u2", "u3"}


def test_units_are_given_back_when_the_gate_has_more_room_than_predicted() -> None:
    """Only u0 harms more than its effect says: with it out, the others lose a fifth of what was predicted."""
    candidates = make([0.02, *[0.005] * 12], sizes=[100] * 13)

    def check(int8: frozenset[str]) -> float:
        return float(np.exp(0.10 * ("u0" in int8) + 0.001 * len(int8 - {"u0"})))

    choice = choose_int8(candidates, check)
    assert choice.int8 == {f"u{i}" for i in range(1, 13)}
    assert "given back" in choice.reasons.values()


def test_choice_measures_no_set_twice_and_few_in_all() -> None:
    rng = np.random.default_rng(3)
    candidates = make(rng.exponential(0.004, 120).tolist())
    gate = Additive(candidates)
    choice = choose_int8(candidates, gate)
    assert len(gate.calls) == len(set(gate.calls)) == choice.num_checks <= 8  # one that fails, one that passes, 3 + 3
    assert choice.upper <= 1.05


@pytest.mark.parametrize("seed", range(40))
def test_chosen_bytes_are_within_a_twentieth_of_the_best_on_a_small_model(seed: int) -> None:
    """Brute force over 2^8 sets."""
    rng = np.random.default_rng(seed)
    candidates = make(rng.exponential(0.015, 8).tolist(), rng.integers(50, 150, 8).tolist())
    gate = Additive(candidates)
    choice = choose_int8(candidates, gate)
    size = {c.unit: c.num_bytes for c in candidates}
    sets = chain.from_iterable(combinations(size, n) for n in range(9))
    best = max(sum(size[u] for u in units) for units in sets if gate(frozenset(units)) <= 1.05)
    assert sum(size[u] for u in choice.int8) >= 0.95 * best


@pytest.mark.parametrize("noise", [0.2, 0.5])
def test_a_wrong_prediction_costs_checks_but_never_the_gate(noise: float) -> None:
    """The loss is a third more than the sum of effects that are off by e^noise, and a hundredth on top."""
    rng = np.random.default_rng(7)
    effects = rng.exponential(0.0012, 120) * rng.lognormal(0, 1, 120)
    real = effects * rng.lognormal(0, noise, 120)
    candidates = make(effects.tolist())
    choice = choose_int8(candidates, lambda int8: float(np.exp(0.01 + 1.3 * sum(real[int(u[1:])] for u in int8))))
    best = int((np.cumsum(np.sort(real)) * 1.3 <= np.log(1.05) - 0.01).sum())
    assert choice.upper <= 1.05
    assert choice.num_checks <= 12
    assert len(choice.int8) >= 0.9 * best


def test_a_larger_gate_never_gives_fewer_bytes() -> None:
    """No point of the front is dominated by another."""
    candidates = make(np.random.default_rng(5).exponential(0.004, 60).tolist())
    shares = [
        len(choose_int8(candidates, Additive(candidates), gate=gate).int8) for gate in (1.01, 1.02, 1.05, 1.1, 1.3)
    ]
    assert shares == sorted(shares)
    assert len(set(shares)) == len(shares)


def test_a_harmful_unit_that_its_effect_does_not_show_is_found_by_ranking_anew() -> None:
    """u7 has an ordinary effect on the ranking text and a large one on the gate's."""
    candidates = make([0.0005] * 40)

    def check(int8: frozenset[str]) -> float:
        return float(np.exp(0.15 * ("u7" in int8) + 0.0005 * len(int8)))

    blind = choose_int8(candidates, check)
    failed: list[frozenset[str]] = []

    def rerank(int8: frozenset[str]) -> dict[str, float]:
        failed.append(int8)
        return {"u7": 0.15, "unknown": 1.0}

    seeing = choose_int8(candidates, check, rerank=rerank)
    assert seeing.int8 == {f"u{i}" for i in range(40)} - {"u7"}
    assert len(seeing.int8) > len(blind.int8)
    assert failed[0] == {f"u{i}" for i in range(40)}


def test_a_gate_below_one_is_an_error_whose_square_adds_up() -> None:
    candidates = make([0.0004, 0.0009, 0.0016, 0.0025, 0.0036])
    kl = {c.unit: c.kl for c in candidates}
    choice = choose_int8(candidates, lambda int8: float(np.sqrt(sum(kl[u] for u in int8))), gate=0.06)
    assert choice.int8 == {"u0", "u1", "u2"}
    assert choice.num_checks <= 4


@pytest.mark.parametrize("upper", [float("nan"), float("inf")])
def test_a_set_whose_loss_is_not_finite_fails(upper: float) -> None:
    candidates = make([0.001] * 6)
    choice = choose_int8(candidates, lambda int8: upper if "u3" in int8 else 1.0)
    assert choice.int8 <= {"u0", "u1", "u2", "u4", "u5"}
    assert choice.upper == 1.0


def test_a_model_that_fails_without_any_int8_is_refused_with_the_numbers() -> None:
    with pytest.raises(BuildError, match=r"1\.2000, at most 1\.05"):
        choose_int8(make([0.1, 0.1]), lambda int8: 1.2)


@pytest.mark.parametrize("seed", range(20))
def test_the_knapsack_is_the_best_there_is(seed: int) -> None:
    """Against all 2^10 picks. Costs are rounded up by at most 1 / STEPS of the budget, so that much less is spent."""
    rng = np.random.default_rng(seed)
    items = [Item(f"i{i}", int(rng.integers(1, 100)), float(rng.exponential())) for i in range(10)]
    picked = most_bytes(items, 3.0)
    picks = chain.from_iterable(combinations(items, n) for n in range(11))
    best = max(sum(i.num_bytes for i in p) for p in picks if sum(i.cost for i in p) <= 3.0 * (1 - 10 / STEPS))
    assert sum(i.cost for i in items if i.name in picked) <= 3.0
    assert sum(i.num_bytes for i in items if i.name in picked) >= best
