"""Losses, ratio, divergence and agreement equal their definitions, at any scale and for large vocabularies."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_engines.perplexity import (
    NUM_RESAMPLES,
    perplexity,
    perplexity_ratio,
    token_losses,
)

EXACT = 1e-12  # float64 sums of a few hundred terms near 1, against math.fsum


def random_logits(rows: int, vocab: int, seed: int, spread: float = 5.0) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(0.0, spread, (rows, vocab))


def slow_log_softmax(row: NDArray[np.float64]) -> list[float]:
    peak = max(row)
    total = math.log(math.fsum(math.exp(x - peak) for x in row))
    return [x - peak - total for x in row]


def test_losses_equal_the_definition() -> None:
    logits, ids = random_logits(6, 300, 1), np.array([3, 299, 0, 17, 17, 250])
    expected = [-slow_log_softmax(logits[s])[ids[s + 1]] for s in range(5)]
    assert token_losses(logits, ids) == pytest.approx(expected, rel=EXACT)


def test_uniform_logits_have_the_perplexity_of_the_vocabulary() -> None:
    losses = token_losses(np.full((9, 777), 12.5, np.float32), np.arange(9))
    assert perplexity(losses) == pytest.approx(777, rel=EXACT)


def test_a_certain_and_right_prediction_costs_nothing() -> None:
    ids = np.array([1, 2, 3])
    logits = np.full((3, 5), -np.inf)
    logits[[0, 1], [2, 3]] = 0.0
    logits[2] = 0.0
    assert token_losses(logits, ids).tolist() == [0.0, 0.0]


def test_log_probabilities_give_the_same_losses_as_logits() -> None:
    logits, ids = random_logits(5, 200, 2), np.array([9, 8, 7, 6, 5])
    logs = np.array([slow_log_softmax(row) for row in logits])
    assert token_losses(logs, ids) == pytest.approx(token_losses(logits, ids), rel=EXACT)


@pytest.mark.parametrize("shift", [1e4, -1e4])
def test_losses_do_not_depend_on_a_common_shift(shift: float) -> None:
    # 1e4 + x keeps x to 1e4 x 2^-52 = 2e-12.
    logits, ids = random_logits(5, 200, 3), np.array([9, 8, 7, 6, 5])
    assert token_losses(logits + shift, ids) == pytest.approx(token_losses(logits, ids), abs=1e-11)


def test_a_vocabulary_of_150000_in_single_precision_loses_nothing() -> None:
    logits = random_logits(30, 150_000, 4).astype(np.float32)  # more rows than one chunk holds
    ids = np.random.default_rng(5).integers(150_000, size=30)
    expected = [-slow_log_softmax(logits[s].astype(np.float64))[ids[s + 1]] for s in (0, 12, 13, 28)]
    assert token_losses(logits, ids)[[0, 12, 13, 28]] == pytest.approx(expected, rel=EXACT)


def test_half_precision_logits_are_summed_in_double() -> None:
    logits = random_logits(4, 5000, 6).astype(np.float16)  # their sum of exponentials overflows float16
    expected = token_losses(logits.astype(np.float64), np.array([1, 2, 3, 4]))
    assert token_losses(logits, np.array([1, 2, 3, 4])).tolist() == expected.tolist()


def test_a_nan_stays_in_its_row() -> None:
    logits = random_logits(4, 50, 7)
    logits[1, 3] = np.nan
    assert np.isnan(token_losses(logits, np.array([1, 2, 3, 4]))).tolist() == [False, True, False]


@pytest.mark.parametrize(("shape", "count"), [((3, 9), 4), ((1, 9), 1), ((9,), 9)])
def test_logits_that_do_not_fit_the_ids_are_refused(shape: tuple[int, ...], count: int) -> None:
    with pytest.raises(ValueError, match=r"\[S, V\] and \[S\] with S >= 2"):
        token_losses(np.zeros(shape), np.zeros(count, np.int64))


def random_losses(n: int, length: int, seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).gamma(2.0, 1.5, (n, length))


def test_the_ratio_is_that_of_the_two_perplexities() -> None:
    base, losses = random_losses(5, 40, 8), random_losses(5, 40, 9)
    assert perplexity_ratio(base, losses, 0).ratio == pytest.approx(perplexity(losses) / perplexity(base), rel=EXACT)


def test_the_same_model_has_ratio_one_without_doubt() -> None:
    base = random_losses(5, 40, 10)
    same = perplexity_ratio(base, base, 0)
    assert (same.ratio, same.low, same.high, same.standard_error, same.upper) == (1.0, 1.0, 1.0, 0.0, 1.0)


def test_a_constant_loss_is_exact_since_the_losses_are_paired() -> None:
    base = random_losses(6, 40, 11)
    ratio = perplexity_ratio(base, base + 0.05, 0)
    assert ratio.ratio == pytest.approx(math.exp(0.05), rel=EXACT)
    assert ratio.standard_error == pytest.approx(0.0, abs=EXACT)


def test_the_standard_error_is_that_of_the_mean_of_the_sequences() -> None:
    # Closed form: deviation of the sequence means / sqrt(N). Four Monte Carlo errors: 4 / sqrt(2 x resamples).
    base, losses = random_losses(18, 60, 12), random_losses(18, 60, 13)
    expected = (losses - base).mean(axis=1).std(ddof=1) / math.sqrt(18)
    found = perplexity_ratio(base, losses, 0).standard_error
    assert found == pytest.approx(expected, rel=4 / math.sqrt(2 * NUM_RESAMPLES))


def test_the_interval_equals_that_of_all_resamples() -> None:
    # Four sequences have 4^4 resamples. A 2.5 % quantile of 4,000 draws lies between the exact quantiles at
    # 2.5 % -+ 4 x sqrt(0.025 x 0.975 / 4000) = 1 %.
    base, losses = random_losses(4, 30, 14), random_losses(4, 30, 15)
    means = (losses - base).mean(axis=1)
    every = np.array([means[list(pick)].mean() for pick in itertools.product(range(4), repeat=4)])
    widened = np.exp(means.mean() + (every - means.mean()) * math.sqrt(4 / 3))
    found = perplexity_ratio(base, losses, 3)
    assert np.quantile(widened, 0.015) <= found.low <= np.quantile(widened, 0.035)
    assert np.quantile(widened, 0.965) <= found.high <= np.quantile(widened, 0.985)


def test_the_gates_bound_is_two_standard_errors_above() -> None:
    ratio = perplexity_ratio(random_losses(9, 30, 16), random_losses(9, 30, 17), 0)
    assert ratio.upper == pytest.approx(math.exp(math.log(ratio.ratio) + 1.96 * ratio.standard_error), rel=EXACT)


def test_the_seed_decides() -> None:
    base, losses = random_losses(9, 30, 18), random_losses(9, 30, 19)
    assert perplexity_ratio(base, losses, 5) == perplexity_ratio(base, losses, 5)
    assert perplexity_ratio(base, losses, 5) != perplexity_ratio(base, losses, 6)


def test_tokens_of_one_text_count_together() -> None:
    base = random_losses(8, 50, 20)
    differences = np.random.default_rng(21).normal(0.0, 0.1, (8, 50))
    differences[0] += 1.0  # one bad text: standard error about 1 / 8; the same losses dealt out evenly: about 0.017
    dealt = np.random.default_rng(0).permutation(differences.ravel()).reshape(8, 50)
    together = perplexity_ratio(base, base + differences, 0).standard_error
    assert perplexity_ratio(base, base + dealt, 0).standard_error < together / 4


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Losses with an effect of the text and dependence between neighbours, 18 texts as in the gate, 400 trials.

    For normal sequence means the two-sided interval covers P(|t| < 1.96) = 93.4 % with 17 degrees of freedom, and the
    gate's one-sided bound P(t < 1.96) = 96.7 %. Four binomial errors of 400 trials: 5.0 % and 3.6 %.
    """
    truth, rng = 0.02, np.random.default_rng(22)
    inside = below = 0
    for trial in range(400):
        noise = rng.normal(0.0, 0.3, (18, 64))
        noise[:, 1:] += 0.5 * noise[:, :-1]
        differences = truth + rng.normal(0.0, 0.03, (18, 1)) + noise
        ratio = perplexity_ratio(np.ones((18, 64)), 1 + differences, trial)
        inside += ratio.low <= math.exp(truth) <= ratio.high
        below += math.exp(truth) <= ratio.upper
    assert inside / 400 == pytest.approx(0.934, abs=0.050)
    assert below / 400 == pytest.approx(0.967, abs=0.036)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e6])
def test_a_broken_model_never_passes_a_limit(bad: float) -> None:
    base = random_losses(4, 30, 23)
    losses = base.copy()
    losses[2, 7] = bad
    ratio = perplexity_ratio(base, losses, 0)
    assert not ratio.upper <= 1.05
    assert not ratio.ratio <= 1.05


@pytest.mark.parametrize(("one", "other"), [((1, 30), (1, 30)), ((4, 30), (4, 29)), ((30,), (30,))])
def test_losses_that_cannot_be_paired_are_refused(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="with N >= 2"):
        perplexity_ratio(np.ones(one), np.ones(other), 0)
