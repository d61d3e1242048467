"""Simulated INT8, smoothing, and the scores of each unit: planted faults are found, folding changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import Float32, ModelSpec, Weights
from edge_engines.qdq.codes import to_codes
from edge_engines.reference import logits
from edge_engines.sensitivity.blocks import BODY_UNITS, EMBED, HEAD, Block, multiply_exactly, unit_name
from edge_engines.sensitivity.int8 import (
    Int8Multiply,
    activation_scale,
    round_activation,
    round_weight,
    weight_scales,
)
from edge_engines.sensitivity.journal import open_journal
from edge_engines.sensitivity.measure import (
    EffectMeter,
    compare_rows,
    list_units,
    log_probabilities,
    measure_local,
)
from edge_engines.sensitivity.passes import Ids, Passes, collect_ranges
from edge_engines.sensitivity.smoothing import FoldedWeights, Smoothing
from edge_runtime.errors import BuildError
from support.tiny_engines import FAMILIES, GOLDEN, expected

ALPHAS = dict.fromkeys((*BODY_UNITS, HEAD), 0.65)


def nothing(n: int) -> None: ...


def text(name: str, num: int = 3, length: int = 20) -> Ids:
    vocab = 320
    return np.random.default_rng(11).integers(0, vocab, (num, length))


class Changed:
    """Weights of which some are changed as they are read."""

    def __init__(self, weights: Weights, change: dict[str, Callable[[Float32], Float32]]) -> None:
        self._weights, self._change = weights, change

    def tensor(self, name: str) -> Float32:
        tensor = self._weights.tensor(name)
        return self._change[name](tensor) if name in self._change else tensor


def last_logits(spec: ModelSpec, weights: Weights, ids: list[int]) -> Float32:
    passes = Passes(spec, weights)
    stream = passes.finish(passes.embed(np.array([ids])), multiply_exactly)
    return next(passes.logits(stream))


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_compute_the_logits_of_transformers(name: str) -> None:
    want = expected(name)
    with open_checkpoint(GOLDEN / name) as model:
        found = last_logits(model.spec.for_capacity(64), model, want.ids)
    assert np.abs(found - want.logits).max() < 2e-4  # as for the engines; measured 3e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_folding_leaves_the_model_as_it_is(name: str) -> None:
    """Biased, grouped, normed heads, tied and untied, one-plus norms: all of them are among the families."""
    ids = expected(name).ids
    with open_checkpoint(GOLDEN / name) as model:
        spec = model.spec.for_capacity(64)
        ranges = collect_ranges(Passes(spec, model), text(name), nothing)
        factors = Smoothing(ALPHAS).factors(spec, model, ranges)
        folded = FoldedWeights(spec, model, factors)
        assert {EMBED, *factors} == set(list_units(spec))
        before, after = logits(spec, model, ids), logits(folded.spec, folded, ids)
    assert np.abs(after - before).max() < 1e-4  # weights are rounded to FP32 once more: 6e-8 relative, some layers


def test_smoothing_narrows_a_planted_outlier_channel() -> None:
    """Channel 5 of one down input is 1000 times as large: alone it takes all codes, smoothed it shares them."""
    with open_checkpoint(GOLDEN / "llama-tied") as model:
        spec = model.spec.for_capacity(64)
        loud: dict[str, Callable[[Float32], Float32]] = {
            "layers.1.up": lambda w: w * np.where(np.arange(len(w)) == 5, 1000, 1)[:, None].astype(np.float32),
            "layers.1.down": lambda w: w / np.where(np.arange(w.shape[1]) == 5, 1000, 1).astype(np.float32),
        }
        weights = Changed(model, loud)
        plain, smoothed = scored(spec, weights, {}), scored(spec, weights, ALPHAS)
    assert max(plain, key=lambda unit: plain[unit]) == "layers.1.down"
    assert plain["layers.1.down"] > 0.1
    assert smoothed["layers.1.down"] < 0.05
    assert smoothed["layers.1.down"] < plain["layers.1.down"] / 4


def scored(spec: ModelSpec, weights: Weights, alphas: dict[str, float]) -> dict[str, float]:
    ids = text("")
    ranges = collect_ranges(Passes(spec, weights), ids, nothing)
    factors = Smoothing(alphas).factors(spec, weights, ranges)
    folded = FoldedWeights(spec, weights, factors)
    scales = {u: activation_scale(float((r / factors.get(u, np.float32(1))).max()), u) for u, r in ranges.items()}
    return {u: e.score for u, e in measure_local(Passes(folded.spec, folded), ids, scales, nothing).items()}


def test_pooled_error_misses_what_the_mean_per_token_sees() -> None:
    """One token of size 1000 among ordinary ones sets the scale: their error is total, the pooled one small."""
    x = np.random.default_rng(2).normal(0, 0.5, (50, 32)).astype(np.float32)
    x[7] *= 2000
    weight = np.random.default_rng(3).normal(size=(16, 32)).astype(np.float32)
    errors = local_errors(x, weight, float(np.abs(x).max()))
    assert errors.pooled < 0.05
    assert errors.per_token > 0.5
    assert errors.score == errors.per_token


def test_mean_per_token_misses_the_clipped_spike_that_the_pooled_error_sees() -> None:
    x = np.random.default_rng(2).normal(size=(400, 32)).astype(np.float32)
    x[7] *= 200
    weight = np.random.default_rng(3).normal(size=(16, 32)).astype(np.float32)
    errors = local_errors(x, weight, 4.0)  # a scale made for the ordinary tokens
    assert errors.per_token < 0.05
    assert errors.pooled > 0.5
    assert errors.score == errors.pooled


def local_errors(x: Float32, weight: Float32, absmax: float):  # type: ignore[no-untyped-def]
    from edge_engines.sensitivity.measure import _Sums

    sums, multiply = _Sums(), Int8Multiply({"u": activation_scale(absmax, "u")}, {"u"})
    sums.add(multiply_exactly("u", x, weight), multiply("u", x, weight))
    return sums.result()


def test_running_only_the_layers_behind_equals_the_whole_run_bit_for_bit() -> None:
    with open_checkpoint(GOLDEN / "qwen3") as model:
        spec, ids = model.spec.for_capacity(64), text("")
        passes = Passes(spec, model)
        scales = {u: activation_scale(float(r.max()), u) for u, r in collect_ranges(passes, ids, nothing).items()}
        base = [log_probabilities(x) for x in passes.logits(passes.finish(passes.embed(ids), multiply_exactly))]
        meter = EffectMeter(passes, ids, scales, open_journal(None, "", print))
        for unit in (unit_name(1, "down"), unit_name(2, "qkv"), HEAD):
            multiply = Int8Multiply(scales, {unit})
            stream = passes.finish(passes.embed(ids, {unit}), multiply)
            kls = [compare_rows(b, x)[0] for b, x in zip(base, passes.logits(stream, multiply), strict=True)]
            assert meter.of({unit}).kl == float(np.concatenate(kls).mean())
        assert meter.of(set()).kl == pytest.approx(0.0, abs=1e-9)  # the baseline against itself
        assert meter.of(set()).same_top1 == 1.0
        assert meter.of(set(list_units(spec))).kl > meter.of({"layers.1.down"}).kl > 0


def test_int8_products_are_those_of_integer_arithmetic() -> None:
    rng = np.random.default_rng(4)
    x, weight = (rng.normal(size=shape).astype(np.float32) for shape in ((5, 48), (7, 48)))
    scale = activation_scale(float(np.abs(x).max()), "u")
    codes_x, scales_w = to_codes(x, scale), weight_scales(weight)
    codes_w = to_codes(weight, scales_w[:, None])
    exact = (codes_x.astype(np.int64) @ codes_w.astype(np.int64).T) * (scale * scales_w.astype(np.float64))
    found = Int8Multiply({"u": scale}, {"u"})("u", x, weight)
    assert np.abs(found - exact).max() < 1e-5 * np.abs(exact).max()  # FP32 sums of 48 terms


def test_c17_zero_channels_and_dead_activations_have_a_positive_scale_and_stay_zero() -> None:
    weight = np.ones((3, 4), np.float32)
    weight[1] = 0
    assert (weight_scales(weight) > 0).all()
    assert (round_weight(weight)[1] == 0).all()
    assert activation_scale(0.0, "dead") > 0
    assert (round_activation(np.zeros((2, 4), np.float32), activation_scale(0.0, "dead")) == 0).all()


@pytest.mark.parametrize("absmax", [float("nan"), float("inf")])
def test_c18_a_range_that_is_not_finite_is_refused_by_name(absmax: float) -> None:
    with pytest.raises(BuildError, match=r"layers\.3\.down"):
        activation_scale(absmax, "layers.3.down")


def test_c16_codes_are_symmetric() -> None:
    codes = to_codes(np.linspace(-9, 9, 1000).astype(np.float32), activation_scale(1.0, "u"))
    assert (codes.min(), codes.max()) == (-127, 127)


def test_c20_ranges_hold_one_number_per_channel_however_many_sequences() -> None:
    with open_checkpoint(GOLDEN / "qwen2") as model:
        passes = Passes(model.spec.for_capacity(64), model)
        few, many = (collect_ranges(passes, text("", num), nothing) for num in (2, 12))
    assert {u: r.shape for u, r in few.items()} == {u: r.shape for u, r in many.items()}
    # The first sequences are among the others, in a larger multiplication: FP32 sums of 64 to 112 terms
    assert all((many[unit] >= few[unit] * (1 - 1e-5)).all() for unit in few)
    assert few["layers.0.down"].shape == (112,)


def test_divergence_and_agreement_match_their_definitions() -> None:
    rng = np.random.default_rng(6)
    p, q = (rng.normal(size=(4, 9)) for _ in range(2))
    base = log_probabilities(p.astype(np.float32))
    divergence, same = compare_rows(base, q.astype(np.float32))
    share_p, share_q = (np.exp(t) / np.exp(t).sum(axis=1, keepdims=True) for t in (p, q))
    assert np.abs(divergence - (share_p * np.log(share_p / share_q)).sum(axis=1)).max() < 1e-5  # FP32 logs
    assert same.tolist() == (p.argmax(axis=1) == q.argmax(axis=1)).tolist()


def test_a_block_reads_each_of_its_weights_once() -> None:
    reads: list[str] = []

    class Counted:
        def __init__(self, weights: Weights) -> None:
            self._weights = weights

        def tensor(self, name: str) -> Float32:
            reads.append(name)
            return self._weights.tensor(name)

    with open_checkpoint(GOLDEN / "gemma3") as model:
        Block(model.spec.for_capacity(64), Counted(model), 2)
    assert len(reads) == len(set(reads)) == 13  # seven matrices, four norms, q and k norm


def test_activations_saturate_where_quantize_linear_does() -> None:
    """At -128 below, as the operator does: a simulation that stops at -127 differs from every engine there."""
    found = round_activation(np.array([[-300.0, -127.6, 127.6, 300.0]], np.float32), 1.0)
    assert found.tolist() == [[-128.0, -128.0, 127.0, 127.0]]
