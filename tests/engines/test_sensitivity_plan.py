"""The plan that a build takes: measured, or from a table that a person has edited."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_engines.checkpoint.open import Checkpoint, open_checkpoint
from edge_engines.progress import NoProgress
from edge_engines.sensitivity.assess import Assessment
from edge_engines.sensitivity.command import load_texts
from edge_engines.sensitivity.plan import Int8Plan
from edge_engines.sensitivity.planning import plan_int8
from edge_engines.sensitivity.smoothing import FoldedWeights
from edge_engines.sensitivity.table import Table, UnitRow, read_table, write_table
from edge_engines.texts.sets import SetSize, TextSets, TextSizes
from edge_runtime.errors import BuildError
from support.tiny_engines import GOLDEN

SIZES = TextSizes(SetSize(4, 48), SetSize(2, 32), SetSize(6, 48))
Found = tuple[Assessment, Table]


@pytest.fixture(scope="module")
def ids_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "prompts.npy"
    np.save(path, np.random.default_rng(9).integers(0, 320, (12, 48)))
    return path


def plan(name: str, ids_file: Path, chosen: Table | None = None, gate: float = 1.5) -> Found:
    with open_checkpoint(GOLDEN / name) as model:
        return plan_int8(model, texts(model, ids_file), NoProgress(), gate=gate, chosen=chosen)


def texts(model: Checkpoint, ids_file: Path) -> TextSets:
    return load_texts(model, ids_file, SIZES)


@pytest.fixture(scope="module")
def tied(ids_file: Path) -> Found:
    return plan("qwen2", ids_file)


@pytest.fixture(scope="module")
def untied(ids_file: Path) -> Found:
    return plan("qwen3", ids_file)


def edited(table: Table, precision: dict[str, str]) -> Table:
    """Return the table after a person has changed the precision of some units."""
    rows = [msgspec.structs.replace(row, precision=precision.get(row.unit, row.precision)) for row in table.units]
    return msgspec.structs.replace(table, units=rows)


def renamed(table: Table, unit: str, name: str) -> Table:
    rows = [msgspec.structs.replace(r, unit=name) if r.unit == unit else r for r in table.units]
    return msgspec.structs.replace(table, units=rows)


def row(table: Table, unit: str) -> UnitRow:
    return next(found for found in table.units if found.unit == unit)


def test_plan_names_the_units_of_the_table(tied: Found, untied: Found) -> None:
    for found, table in (tied, untied):
        assert found.plan.int8 == {r.unit for r in table.units if r.precision == "int8"}
        assert set(found.plan.scales) == found.plan.int8 - {"embed"}
        assert all(scale == float(np.float16(scale)) for scale in found.plan.scales.values())


def test_plan_of_the_table_is_the_measured_plan(tied: Found, ids_file: Path, tmp_path: Path) -> None:
    table = read_table(write_table(tmp_path, tied[1]))
    found, again = plan("qwen2", ids_file, table)
    assert found.plan.digest == tied[0].plan.digest
    assert again.gate.ratio == tied[1].gate.ratio
    assert again.gate.checks == 1
    assert again.units == tied[1].units


def test_plan_digest_depends_on_everything(tied: Found) -> None:
    plan = tied[0].plan
    unit = min(plan.scales)
    others = [
        Int8Plan(plan.int8 - {unit}, plan.scales, plan.factors),
        Int8Plan(plan.int8, {**plan.scales, unit: plan.scales[unit] * 2}, plan.factors),
        Int8Plan(plan.int8, plan.scales, {u: s * np.float32(2) for u, s in plan.factors.items()}),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == 3 + bool(plan.factors)


def test_units_changed_by_hand_are_marked_and_judged(untied: Found, ids_file: Path) -> None:
    changed = edited(untied[1], {"layers.0.qkv": "fp16", "layers.1.down": "fp16"})
    found, table = plan("qwen3", ids_file, changed)
    assert {r.unit for r in table.units if r.reason == "by hand"} == {"layers.0.qkv", "layers.1.down"}
    assert "layers.0.qkv" not in found.plan.int8
    assert table.int8_share < untied[1].int8_share
    assert table.gate.ratio != untied[1].gate.ratio


def test_a_tied_head_left_in_float_keeps_one_unsmoothed_table(tied: Found, ids_file: Path) -> None:
    found, table = plan("qwen2", ids_file, edited(tied[1], {"head": "fp16", "embed": "fp16"}))
    assert [row(table, unit).reason for unit in ("embed", "head")] == ["by hand", "by hand"]
    assert "head" not in found.plan.factors
    with open_checkpoint(GOLDEN / "qwen2") as model:
        assert FoldedWeights(model.spec, model, found.plan.factors).spec.tied_head


def test_a_choice_by_hand_that_fails_the_gate_is_refused_with_the_numbers(untied: Found, ids_file: Path) -> None:
    with pytest.raises(BuildError, match=r"14 INT8 units fail the gate: .* at most x 1\.0\d+, at most x 0\.9"):
        plan("qwen3", ids_file, edited(untied[1], {r.unit: "int8" for r in untied[1].units}), gate=0.9)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: renamed(t, "layers.1.o", "layers.1.out"), r"unknown: layers\.1\.out"),
        (lambda t: msgspec.structs.replace(t, units=t.units[:-1]), "missing: head"),
        (lambda t: msgspec.structs.replace(t, units=[*t.units, t.units[1]]), r"named twice: layers\.0\.qkv"),
        (lambda t: msgspec.structs.replace(t, checkpoint_sha256="0" * 64), "another checkpoint"),
        (lambda t: msgspec.structs.replace(t, alphas={"out": 0.5}), r"alphas\.out"),
        (lambda t: msgspec.structs.replace(t, alphas={"down": 1.5}), r"alphas\.down is 1\.5"),
        (lambda t: edited(t, {"head": "fp16"}), "one table for both"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_in_one_line(tied: Found, ids_file: Path, change, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(BuildError, match=text) as refused:
        plan("qwen2", ids_file, change(tied[1]))
    assert "\n" not in str(refused.value)


def test_what_the_pooled_rule_alone_would_choose_is_reported(untied: Found) -> None:
    rule = untied[1].rule_only
    assert rule is not None
    assert rule.ratio > 0
