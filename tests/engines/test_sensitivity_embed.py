"""The embedding as a unit: one INT8 table with a tied head, a table of its own with an untied one."""

from __future__ import annotations

import numpy as np
import pytest

from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import Float32, tensor_shapes
from edge_engines.qdq.codes import to_codes
from edge_engines.sensitivity.alphas import Smoothed, smoothed
from edge_engines.sensitivity.blocks import BODY_UNITS, EMBED, HEAD, multiply_exactly
from edge_engines.sensitivity.int8 import weight_scales
from edge_engines.sensitivity.journal import Journal, open_journal
from edge_engines.sensitivity.measure import EffectMeter, measure_local
from edge_engines.sensitivity.passes import Ids, Passes, collect_ranges
from support.tiny_engines import GOLDEN

TIED, UNTIED, SCALED = "qwen2", "qwen3", "gemma3"  # the last multiplies its embedding, and is tied
EXACT = 2e-6  # a product and a quotient by the same factor in FP32, relative to the largest


def text() -> Ids:
    return np.random.default_rng(5).integers(0, 320, (2, 20))


class Loaded:
    """All weights of a golden model in memory."""

    def __init__(self, name: str) -> None:
        with open_checkpoint(GOLDEN / name) as opened:
            self.spec = opened.spec.for_capacity(64)
            self._tensors = {name: opened.tensor(name) for name, _ in tensor_shapes(self.spec)}

    def tensor(self, name: str) -> Float32:
        return self._tensors[name].copy()


def nowhere() -> Journal:
    return open_journal(None, "", lambda text: None)


def model(name: str, alpha: float | None) -> Smoothed:
    loaded = Loaded(name)
    ranges = collect_ranges(Passes(loaded.spec, loaded), text(), lambda n: None)
    return smoothed(loaded.spec, loaded, ranges, dict.fromkeys((*BODY_UNITS, HEAD), alpha) if alpha else {})


@pytest.mark.parametrize("alpha", [None, 0.65])
@pytest.mark.parametrize("name", [TIED, SCALED])
def test_a_tied_embedding_reads_the_table_of_the_head(name: str, alpha: float | None) -> None:
    passes, factors = model(name, alpha).passes, model(name, alpha).factors.get(HEAD, np.float32(1))
    with open_checkpoint(GOLDEN / name) as opened:
        table, scale = opened.tensor("embed") * factors, opened.spec.embed_scale
    scales = weight_scales(table)
    codes = to_codes(table, scales[:, None])
    ids = text()[0]
    want = codes[ids] * scales[ids, None] / factors * np.float32(scale)
    found = passes.embed(ids[None], {HEAD})[0]
    assert np.abs(found - want).max() <= EXACT * np.abs(want).max()
    assert np.array_equal(found, passes.embed(ids[None], {EMBED, HEAD})[0])
    assert not np.array_equal(found, passes.embed(ids[None], {"layers.0.qkv"})[0])


def test_an_untied_embedding_is_rounded_by_row_and_alone() -> None:
    passes = model(UNTIED, 0.65).passes
    with open_checkpoint(GOLDEN / UNTIED) as opened:
        table = opened.tensor("embed")
    scales = weight_scales(table)
    ids = text()[0]
    want = (to_codes(table, scales[:, None]) * scales[:, None])[ids]
    assert np.array_equal(passes.embed(ids[None], {EMBED})[0], want)
    assert np.array_equal(passes.embed(ids[None], {HEAD})[0], table[ids])


@pytest.mark.parametrize("name", [TIED, UNTIED, SCALED])
def test_rounding_moves_rows_by_less_than_half_a_step(name: str) -> None:
    found = model(name, None)
    local = measure_local(found.passes, text(), found.scales, lambda n: None)
    assert 0 < local[EMBED].score < 0.02  # half a step of 1 / 127, over rows whose largest is about three deviations


def test_effect_of_a_tied_head_is_that_of_both_ends() -> None:
    found = model(TIED, 0.65)
    meter = EffectMeter(found.passes, text(), found.scales, nowhere())
    assert meter.of({HEAD}) == meter.of({EMBED, HEAD})
    assert meter.of({HEAD}) != meter.of({EMBED}) or not found.passes.ends.is_tied


def test_effect_of_an_untied_head_leaves_the_embedding_alone() -> None:
    found = model(UNTIED, 0.65)
    meter = EffectMeter(found.passes, text(), found.scales, nowhere())
    alone = {unit: meter.of({unit}).kl for unit in (EMBED, HEAD)}
    both = meter.of({EMBED, HEAD}).kl
    assert 0 < max(alone.values()) < both < 2 * sum(alone.values())


def test_smoothing_a_tied_head_leaves_the_float_embedding_as_it_is() -> None:
    plain, loud = model(TIED, None).passes, model(TIED, 0.8).passes
    assert np.array_equal(plain.embed(text())[0], loud.embed(text())[0])
    ends = [passes.finish(passes.embed(text()), multiply_exactly) for passes in (plain, loud)]
    first, second = (next(p.logits(end)) for p, end in zip((plain, loud), ends, strict=True))
    assert np.abs(first - second).max() < 1e-4  # as for every folding
