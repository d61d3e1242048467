import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.errors import RequestError
from edge_runtime.session.sampling import MAX_SEED, TOP_P_SLACK, Sampler, SamplingParams


def row(*values: float) -> NDArray[np.float32]:
    logits = np.array(values, dtype=np.float32)
    logits.flags.writeable = False  # the session owns it: any write is an error
    return logits


def random_row(vocab: int, seed: int, scale: float = 3.0) -> NDArray[np.float32]:
    return row(*np.random.default_rng(seed).normal(0, scale, vocab))


def sampler(vocab: int, known_ids: int | None = None, **params: object) -> Sampler:
    return Sampler(SamplingParams(**params), known_ids or vocab, vocab)  # type: ignore[arg-type]


def drawn_ids(probabilities: Sequence[float], draws: int = 600, **params: object) -> set[int]:
    chooser = sampler(len(probabilities), temperature=1.0, seed=1, **params)
    logits = row(*np.log(probabilities))
    return {chooser.sample(logits) for _ in range(draws)}


def refusal(**params: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**params).check(128)  # type: ignore[arg-type]
    assert caught.value.code == "invalid_request"
    return caught.value


@pytest.mark.parametrize(("vocab", "known"), [(151936, 151665), (151936, 151669), (152064, 151665)])
def test_c11_padded_ids_are_never_chosen(vocab: int, known: int) -> None:
    logits = np.zeros(vocab, dtype=np.float32)
    logits[151900] = 50.0
    logits[7] = 9.0
    logits[known - 1] = 8.0
    assert sampler(vocab, known).sample(logits) == 7
    assert sampler(vocab, known, logit_bias={7: -20.0, 151900: 90.0}).sample(logits) == known - 1
    for params in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.01}, {"repetition_penalty": 1.2}):
        chooser = sampler(vocab, known, temperature=1.0, seed=3, **params)
        chooser.observe([151900])
        assert all(chooser.sample(logits) < known for _ in range(3))


def test_c11_nan_in_the_padding_does_not_count() -> None:
    assert sampler(4, 3).sample(row(0, 2, 1, math.nan)) == 1


def test_c43_unusable_logits_are_an_error_and_never_id_0() -> None:
    for bad in (row(1, math.nan, 2), row(math.nan, 1, 2), row(1, math.inf, 2), row(*[-math.inf] * 3)):
        for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 2}, {"repetition_penalty": 1.5}):
            with pytest.raises(RequestError) as caught:
                sampler(3, **params).sample(bad)
            assert caught.value.code == "numeric_error"


def test_c43_banning_every_id_is_a_numeric_error() -> None:
    with pytest.raises(RequestError) as caught:
        sampler(2, temperature=1.0, logit_bias={0: -math.inf, 1: -math.inf}).sample(row(1, 2))
    assert caught.value.code == "numeric_error"


def test_c44_temperature_zero_and_nearly_zero_are_argmax() -> None:
    for temperature in (0, 1e-9, 1e-6, 1e-320):
        chooser = sampler(2, temperature=temperature, seed=0)
        assert [chooser.sample(row(1, 2)) for _ in range(50)] == [1] * 50
    assert sampler(4).sample(row(1, 5, 5, 5)) == 1  # the first index on ties


@pytest.mark.parametrize("temperature", [-1, math.nan, math.inf, -math.inf, True, "1"])
def test_c44_other_temperatures_are_refused(temperature: object) -> None:
    error = refusal(temperature=temperature)
    assert error.param == "$.temperature"
    assert repr(temperature) in str(error)
    assert ">= 0" in str(error)


def test_c45_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    assert drawn_ids([0.4, 0.3, 0.2, 0.1], top_p=0.8) == {0, 1, 2}
    skewed = [0.5, 0.3, 0.15, 0.05]
    assert [len(drawn_ids(skewed, top_p=p)) for p in (0.6, 0.85, 0, 1)] == [2, 3, 1, 4]
    assert drawn_ids([0.5, 0.25, 0.125, 0.125], top_p=0.75) == {0, 1}  # an exact hit
    assert drawn_ids([0.125, 0.25, 0.125, 0.5], top_p=0.75) == {1, 3}  # wherever they stand


@pytest.mark.parametrize("top_p", [-0.1, 1.1, math.nan])
def test_c45_top_p_outside_0_to_1_is_refused(top_p: float) -> None:
    assert refusal(top_p=top_p).param == "$.top_p"


def test_c46_top_k_beyond_the_vocabulary_0_and_minus_1_are_no_limit() -> None:
    logits = random_row(128, seed=4)

    def run(top_k: int) -> list[int]:
        chooser = sampler(128, temperature=1.5, top_k=top_k, seed=11)
        return [chooser.sample(logits) for _ in range(40)]

    free = run(0)
    assert run(9999999) == run(128) == run(-1) == free
    assert len(set(free)) > 5
    assert run(1) == [int(logits.argmax())] * 40


@pytest.mark.parametrize("top_k", [-2, 1.5, True, "3"])
def test_c46_other_top_k_are_refused(top_k: object) -> None:
    assert refusal(top_k=top_k).param == "$.top_k"


def test_c46_rows_of_a_mixed_batch_equal_their_solo_result() -> None:
    batches = [np.stack([random_row(128, i), random_row(128, 1000 + i)]) for i in range(20)]  # [B, V]

    def pair() -> tuple[Sampler, Sampler]:
        return sampler(128), sampler(128, temperature=1.0, top_k=64, top_p=0.95, seed=5)

    greedy, warm = pair()
    mixed = [(greedy.sample(batch[0]), warm.sample(batch[1])) for batch in batches]
    greedy, _ = pair()
    assert [greedy.sample(batch[0]) for batch in batches] == [first for first, _ in mixed]
    _, warm = pair()
    assert [warm.sample(batch[1]) for batch in batches] == [second for _, second in mixed]


def test_c48_penalty_lowers_both_signs_once_per_distinct_id() -> None:
    """[2, -1] with penalty 1.5 becomes [1.33333, -1.5]: a rival just below or above each value shows it (1e-5)."""
    for seen in ([0, 1], [0, 0, 0, 0, 0, 1]):
        chooser = sampler(3, repetition_penalty=1.5)
        chooser.observe(seen)
        assert chooser.sample(row(2, -1, 1.33332)) == 0
        assert chooser.sample(row(2, -1, 1.33334)) == 2
        assert chooser.sample(row(-9, -1, -1.50001)) == 1
        assert chooser.sample(row(-9, -1, -1.49999)) == 2


def test_c48_penalty_1_changes_nothing() -> None:
    chooser = sampler(3, repetition_penalty=1)
    chooser.observe([0, 1, 2])
    assert chooser.sample(row(2, -1, 1.99999)) == 0


@pytest.mark.parametrize("penalty", [0, -1.5, math.nan, math.inf])
def test_c48_penalty_of_0_or_less_is_refused(penalty: float) -> None:
    assert refusal(repetition_penalty=penalty).param == "$.repetition_penalty"


def test_ids_seen_in_different_calls_are_all_remembered() -> None:
    chooser = sampler(3, repetition_penalty=2.0)
    chooser.observe([0])
    chooser.observe([1])
    assert chooser.sample(row(3, 3, 2)) == 2


def test_bias_moves_the_choice_and_minus_infinity_bans() -> None:
    assert sampler(3, logit_bias={2: 1.5}).sample(row(1, 2, 1)) == 2
    assert sampler(3, logit_bias={1: -math.inf}).sample(row(1, 2, 1)) == 0
    banned = sampler(3, temperature=1.0, seed=0, logit_bias={1: -math.inf})
    assert 1 not in {banned.sample(row(1, 9, 1)) for _ in range(100)}


@pytest.mark.parametrize(
    "bias", [{128: 1.0}, {-1: 1.0}, {3: math.nan}, {3: math.inf}, {3: 1e39}, {3: 10**400}, {True: 1.0}]
)
def test_bias_of_unknown_ids_or_other_values_is_refused(bias: dict[int, float]) -> None:
    assert refusal(logit_bias=bias).param == "$.logit_bias"


@pytest.mark.parametrize("min_p", [-0.1, 1.1, math.nan])
def test_min_p_outside_0_to_1_is_refused(min_p: float) -> None:
    assert refusal(min_p=min_p).param == "$.min_p"


def test_min_p_is_relative_to_the_best() -> None:
    assert drawn_ids([0.5, 0.3, 0.15, 0.05], min_p=0.25) == {0, 1, 2}
    assert drawn_ids([0.5, 0.3, 0.15, 0.05], min_p=1.0) == {0}


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True])
def test_seed_outside_its_range_is_refused(seed: object) -> None:
    assert refusal(seed=seed).param == "$.seed"


def test_a_drawn_seed_is_reported_and_repeats_the_answer() -> None:
    logits = random_row(500, seed=1)
    first = sampler(500, temperature=1.0)
    ids = [first.sample(logits) for _ in range(30)]
    assert 0 <= first.seed <= MAX_SEED
    again = sampler(500, temperature=1.0, seed=first.seed)
    assert [again.sample(logits) for _ in range(30)] == ids
    assert sampler(500, temperature=1.0).seed != first.seed


def test_ties_at_the_border_of_top_k_go_to_the_lower_id() -> None:
    chooser = sampler(5, temperature=1.0, top_k=2, seed=0)
    assert {chooser.sample(row(3, 4, 3, 3, 3)) for _ in range(100)} == {0, 1}


def test_frequencies_follow_the_softmax() -> None:
    logits = row(0.0, 1.0, -1.0, 2.0)
    chooser = sampler(4, temperature=0.8, seed=12)
    draws = 20_000
    counts = np.bincount([chooser.sample(logits) for _ in range(draws)], minlength=4)
    weights = np.exp(logits.astype(np.float64) / 0.8)
    expected = weights / weights.sum()
    # Four standard deviations of a binomial count; the seed is fixed.
    assert np.all(np.abs(counts - draws * expected) < 4 * np.sqrt(draws * expected * (1 - expected)))


@pytest.mark.parametrize("vocab", [3, 128, 5000])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.3, "min_p": 0.1},
        {"temperature": 1.0, "top_k": 40},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 5.0, "top_p": 0.99},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 1.1, "top_p": 0.95, "repetition_penalty": 1.3, "logit_bias": {0: 2.0, 2: -math.inf}},
    ],
)
def test_fast_sampling_equals_the_plain_one(vocab: int, params: dict[str, object]) -> None:
    fast = sampler(vocab, known := vocab - vocab // 10, seed=77, **params)
    fast.observe([0, 1, 1])
    uniform = np.random.Generator(np.random.PCG64(77))
    for i in range(25):
        logits = random_row(vocab, seed=i)
        assert fast.sample(logits) == plain_sample(logits[:known], uniform.random(), [0, 1], **params)  # type: ignore[arg-type]


def plain_sample(
    logits: NDArray[np.float32],
    uniform: float,
    seen: list[int],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1,
    min_p: float = 0,
    repetition_penalty: float = 1,
    logit_bias: dict[int, float] | None = None,
) -> int:
    """Sort everything, filter step by step; candidates stand in order of rank when top_k or top_p is on, else of id."""
    scores = logits.copy()
    for token in seen:
        scores[token] *= np.float32(repetition_penalty) if scores[token] < 0 else 1
        scores[token] /= np.float32(repetition_penalty) if scores[token] > 0 else 1
    for token, bias in (logit_bias or {}).items():
        if token < scores.size:
            scores[token] += np.float32(bias)
    order = sorted(range(scores.size), key=lambda token: (-scores[token], token))
    weights = {t: math.exp((float(scores[t]) - float(scores[order[0]])) / temperature) for t in order}
    top_k = top_k if top_k < scores.size else 0
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        reached = np.cumsum([weights[t] for t in order])
        order = [t for i, t in enumerate(order) if i == 0 or reached[i - 1] < (top_p - TOP_P_SLACK) * reached[-1]]
    if not top_k and top_p == 1:
        order = sorted(order)
    order = [t for t in order if weights[t] >= min_p]
    left = uniform * sum(weights[t] for t in order)
    for t in order:
        left -= weights[t]
        if left < 0:
            return t
    return order[-1]
