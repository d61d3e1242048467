"""Rotary frequencies follow the configuration in each of its layouts, or the configuration is refused."""

from __future__ import annotations

import numpy as np
import pytest

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.rotary import inverse_frequencies, read_rotary
from edge_engines.checkpoint.spec import Rotary
from edge_runtime.errors import CheckpointError

DIGITS = 5e-6  # relative: half a unit of the sixth digit, to which the case gives its values


def rotary(head_dim: int = 64, absent_base: float | None = None, **values: object) -> Rotary:
    return read_rotary(Config(file="config.json", values=values), head_dim, absent_base=absent_base)


def llama3(factor: float, kind_key: str = "rope_type") -> dict[str, object]:
    return {
        kind_key: "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


@pytest.mark.parametrize("kind_key", ["rope_type", "type"])
@pytest.mark.parametrize(
    ("head_dim", "factor", "blended", "counts", "last"),
    [
        (64, 32.0, [1.65133, 3.29226, 9.66673], (15, 14), 9.41831e-08),
        (128, 8.0, [1.20748, 1.55341, 2.02631, 2.69453, 3.68425, 5.25733], (29, 29), 3.06893e-07),
    ],
)
def test_c02_llama3_scaling_keeps_blends_and_divides(
    kind_key: str, head_dim: int, factor: float, blended: list[float], counts: tuple[int, int], last: float
) -> None:
    num_unchanged, num_divided = counts
    found = rotary(head_dim, rope_theta=500000.0, rope_scaling=llama3(factor, kind_key))
    divisors = np.array(inverse_frequencies(500000.0, head_dim)) / np.array(found.inv_freq)
    end = num_unchanged + len(blended)
    assert (divisors[:num_unchanged] == 1).all()
    np.testing.assert_allclose(divisors[num_unchanged:end], blended, rtol=DIGITS)
    np.testing.assert_allclose(divisors[end:], factor, rtol=1e-12)
    assert len(divisors) - end == num_divided
    assert found.inv_freq[-1] == pytest.approx(last, rel=DIGITS)
    assert found.kind == "llama3"


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "su", "mrope", "LLAMA3", 3])
def test_c02_an_unknown_rope_type_is_refused(key: str, kind: object) -> None:
    with pytest.raises(CheckpointError, match=rf"{key} = .*expected one of default, linear, llama3"):
        rotary(rope_theta=1e4, rope_scaling={key: kind, "factor": 4.0})


def test_c02_a_scaling_without_a_kind_is_refused() -> None:
    with pytest.raises(CheckpointError, match="rope_type is missing"):
        rotary(rope_theta=1e4, rope_scaling={"factor": 4.0})


def test_c02_a_missing_factor_is_named() -> None:
    scaling = llama3(8.0)
    del scaling["low_freq_factor"]
    with pytest.raises(CheckpointError, match=r"rope_scaling: low_freq_factor is missing"):
        rotary(rope_theta=5e5, rope_scaling=scaling)


@pytest.mark.parametrize("base", [500000.0, 1000000])
def test_c03_the_base_is_found_in_both_layouts(base: float) -> None:
    old = rotary(rope_theta=base)
    new = rotary(rope_parameters={"rope_theta": base, "rope_type": "default"})
    assert old == new
    assert old.base == base
    assert old.inv_freq[1] == pytest.approx(base ** (-1 / 32), rel=1e-12)


def test_c03_scaling_is_found_in_the_newer_layout() -> None:
    new = rotary(rope_parameters={"rope_theta": 5e5, **llama3(8.0)})
    assert new == rotary(rope_theta=5e5, rope_scaling=llama3(8.0))


def test_c03_a_missing_base_is_an_error_unless_the_family_gives_it_a_meaning() -> None:
    assert rotary(absent_base=1e4).base == 1e4
    assert rotary(absent_base=1e4, rope_parameters={"rope_type": "default"}).base == 1e4
    with pytest.raises(CheckpointError, match="rope_theta is missing"):
        rotary()
    with pytest.raises(CheckpointError, match="rope_theta is null"):
        rotary(absent_base=1e4, rope_theta=None)


@pytest.mark.parametrize("base", [0, -1.0, "1e4", True, float("nan"), float("inf")])
def test_an_impossible_base_is_refused(base: object) -> None:
    with pytest.raises(CheckpointError, match=r"rope_theta = .*expected a finite number above 0"):
        rotary(rope_theta=base)


def test_layouts_that_disagree_are_refused() -> None:
    with pytest.raises(CheckpointError, match="disagree"):
        rotary(rope_theta=1e4, rope_parameters={"rope_theta": 1e6})
    with pytest.raises(CheckpointError, match="disagree"):
        rotary(rope_theta=1e4, rope_scaling={"rope_type": "llama3", "type": "linear", "factor": 2.0})


def test_null_scaling_means_none_and_linear_divides_all() -> None:
    plain = rotary(rope_theta=1e4, rope_scaling=None)
    linear = rotary(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 4.0})
    assert plain.kind == "default"
    assert linear.inv_freq == tuple(f / 4 for f in plain.inv_freq)


def test_rotation_of_a_part_of_the_head_is_refused() -> None:
    with pytest.raises(CheckpointError, match="partial_rotary_factor"):
        rotary(rope_theta=1e4, partial_rotary_factor=0.5)


def test_tables_that_differ_by_layer_type_are_refused() -> None:
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(CheckpointError, match="differs by layer type"):
        rotary(rope_parameters=nested)
