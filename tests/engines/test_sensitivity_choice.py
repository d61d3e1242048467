"""What the choice rests on: effects that order units rightly, blame where it belongs, groups that decide together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.progress import NoProgress
from edge_engines.sensitivity.alphas import Smoothed, smoothed
from edge_engines.sensitivity.blame import find_blamed
from edge_engines.sensitivity.gate import Check, Judge
from edge_engines.sensitivity.journal import Journal, open_journal
from edge_engines.sensitivity.measure import EffectMeter, list_units
from edge_engines.sensitivity.passes import Ids, Passes, collect_ranges
from edge_engines.texts.sets import TextSet
from support.tiny_engines import GOLDEN

CLIPPED = "layers.1.down"


def nowhere() -> Journal:
    return open_journal(None, "", lambda text: None)


def text(seed: int, num: int, length: int) -> Ids:
    return np.random.default_rng(seed).integers(0, 320, (num, length))


@dataclass(frozen=True)
class Tiny:
    """A golden model with absmax ranges of a text."""

    plain: Smoothed
    gate: TextSet


@pytest.fixture(scope="module")
def tiny() -> Iterator[Tiny]:
    with open_checkpoint(GOLDEN / "qwen3") as opened:
        spec = opened.spec.for_capacity(64)
        ranges = collect_ranges(Passes(spec, opened), text(1, 6, 32), lambda n: None)
        gate = text(2, 6, 32)
        yield Tiny(smoothed(spec, opened, ranges, {}), TextSet(gate, ("a", "b") * 3, "digest"))


def judged(tiny: Tiny, scales: dict[str, float]) -> tuple[Check, dict[str, float]]:
    """Return the check of all units, and their effects on a ranking text."""
    passes, units = tiny.plain.passes, list_units(tiny.plain.passes.spec)
    judge = Judge(passes, tiny.gate, scales, nowhere(), NoProgress())
    judge(frozenset(units))
    meter = EffectMeter(passes, text(3, 2, 24), tiny.plain.scales, nowhere())
    return judge.checks[frozenset(units)], {unit: meter.of({unit}).kl for unit in units}


def test_a_unit_that_is_clipped_on_the_gate_alone_is_blamed(tiny: Tiny) -> None:
    """Its scale is a fortieth of what the gate's text needs: as if calibration had met other text only."""
    scales = {**tiny.plain.scales, CLIPPED: tiny.plain.scales[CLIPPED] / 40}
    check, effects = judged(tiny, scales)
    check = replace(check, excess=(0.0, 0.9, 0.0, 0.0, 0.8, 0.0))  # this model was never trained: its own loss is noise
    assert sorted(effects, key=lambda u: -effects[u]).index(CLIPPED) > 0  # the ranking text does not show it
    found = find_blamed(check, effects, tiny.plain.passes, scales, tiny.gate.ids, nowhere())
    assert max(found, key=lambda unit: found[unit]) == CLIPPED
    assert found[CLIPPED] > 5 * effects[CLIPPED]


def test_nobody_is_blamed_for_a_loss_that_was_to_be_expected(tiny: Tiny) -> None:
    check, effects = judged(tiny, dict(tiny.plain.scales))
    check = replace(check, excess=(0.1,) * 6)
    effects = dict.fromkeys(effects, 0.1 / len(effects))
    assert find_blamed(check, effects, tiny.plain.passes, tiny.plain.scales, tiny.gate.ids, nowhere()) == {}


def test_a_check_says_what_each_domain_loses(tiny: Tiny) -> None:
    check, _ = judged(tiny, dict(tiny.plain.scales))
    assert list(check.by_domain) == ["a", "b"]
    assert np.exp(np.mean(check.excess)) == pytest.approx(check.ratio.ratio, rel=1e-12)
    assert np.prod(list(check.by_domain.values())) ** 0.5 == pytest.approx(check.ratio.ratio, rel=1e-12)


def test_leaving_out_units_in_the_order_of_their_effect_lowers_the_divergence(tiny: Tiny) -> None:
    """Noise: one unit more may cancel what another one adds, by a tenth of the whole on this tiny model."""
    passes = tiny.plain.passes
    meter = EffectMeter(passes, text(3, 3, 24), tiny.plain.scales, nowhere())
    units = list_units(passes.spec)
    order = sorted(units, key=lambda unit: -meter.of({unit}).kl)
    joint = [meter.of(set(order[count:])).kl for count in range(len(order) + 1)]
    assert joint[-1] == pytest.approx(0, abs=1e-9)
    assert all(after <= before + 0.1 * joint[0] for before, after in itertools.pairwise(joint))
    assert joint[len(order) // 2] < 0.5 * joint[0]


def test_parts_of_a_unit_share_input_scale_and_decision(tiny: Tiny) -> None:
    """q, k and v read one input, gate and up another: units are named after both, and there is one scale each."""
    spec = tiny.plain.passes.spec
    assert set(tiny.plain.scales) == set(list_units(spec)) - {"embed"}
    block = tiny.plain.passes.block(0)
    heads = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    assert block.weights["qkv"].shape == (heads, spec.hidden)
    assert block.weights["gate_up"].shape == (2 * spec.ffn, spec.hidden)


def test_a_journal_gives_the_same_check(tiny: Tiny, tmp_path: Path) -> None:
    passes, scales = tiny.plain.passes, tiny.plain.scales
    found = []
    for _ in range(2):
        judge = Judge(passes, tiny.gate, scales, open_journal(tmp_path, "a" * 64, print), NoProgress())
        judge(frozenset({CLIPPED}))
        found.append((judge.checks, judge.base_losses.tobytes()))
    assert found[0] == found[1]
