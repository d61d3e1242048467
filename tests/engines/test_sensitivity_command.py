"""Measuring a checkpoint as the command does: the table, its file, the same result every time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_engines.progress import NoProgress
from edge_engines.sensitivity.command import measure_checkpoint
from edge_engines.sensitivity.table import FILE_NAME, Table, read_table, write_table
from edge_engines.texts.sets import SetSize, TextSizes
from edge_runtime.errors import BuildError, EdgeError
from support.tiny_engines import GOLDEN

SIZES = TextSizes(SetSize(4, 48), SetSize(2, 32), SetSize(6, 48))


@pytest.fixture(scope="module")
def ids_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "prompts.npy"
    np.save(path, np.random.default_rng(9).integers(0, 320, (12, 48)))
    return path


def measure(name: str, ids_file: Path | None, gate: float = 1.5) -> Table:
    return measure_checkpoint(
        GOLDEN / name, calibration=ids_file, threshold=0.1, gate=gate, progress=NoProgress(), sizes=SIZES
    )


@pytest.fixture(scope="module")
def table(ids_file: Path) -> Table:
    return measure("qwen2", ids_file)


def test_every_unit_is_scored_and_has_a_reason(table: Table) -> None:
    assert [unit.unit for unit in table.units][1:5] == [f"layers.0.{kind}" for kind in ("qkv", "o", "gate_up", "down")]
    assert (table.units[0].unit, table.units[-1].unit) == ("embed", "head")
    assert len(table.units) == 3 * 4 + 2
    for unit in table.units:
        assert unit.pooled_error > 0
        assert unit.kl > 0
        assert unit.reason == "group" or (unit.precision == "int8") == (unit.reason in ("int8", "given back"))
    assert table.gate.upper <= 1.5
    assert table.gate.base_perplexity > 1


def test_a_unit_above_the_threshold_is_not_in_int8(ids_file: Path) -> None:
    found = measure_checkpoint(
        GOLDEN / "qwen2", calibration=ids_file, threshold=0.0, gate=1.5, progress=NoProgress(), sizes=SIZES
    )
    assert {unit.reason for unit in found.units if unit.unit != "embed"} == {"hard rule"}
    assert found.int8_share == 0
    assert found.gate.ratio == 1.0


def test_measuring_again_gives_the_identical_table(table: Table, ids_file: Path) -> None:
    again = measure("qwen2", ids_file)
    assert msgspec.structs.replace(again, seconds=0) == msgspec.structs.replace(table, seconds=0)


@pytest.mark.parametrize("name", ["gemma3", "phi3", "qwen3"])
def test_other_families_are_measured_too(name: str, ids_file: Path) -> None:
    assert len(measure(name, ids_file).units) % 4 == 2


def test_a_gate_that_no_choice_passes_is_refused_with_the_numbers(ids_file: Path) -> None:
    """Below 1 even the baseline fails against itself."""
    with pytest.raises(BuildError, match=r"1\.0000, at most 0\.9"):
        measure("qwen2", ids_file, gate=0.9)


def test_without_a_tokenizer_token_ids_are_asked_for() -> None:
    with pytest.raises(BuildError, match=r"FILE\.npy"):
        measure("qwen2", None)


def test_table_survives_its_file(table: Table, tmp_path: Path) -> None:
    path = write_table(tmp_path / "sens", table)
    assert read_table(path) == table
    assert [p.name for p in path.parent.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda raw: raw[: len(raw) // 2], "not a valid"),
        (lambda raw: raw.replace(b'"int8"', b'"int9"', 1), "precision"),
        (lambda raw: raw.replace(b'"format": 2', b'"format": 8'), "format 8"),
    ],
)
def test_a_damaged_table_is_refused_by_name(table: Table, tmp_path: Path, change, text: str) -> None:  # type: ignore[no-untyped-def]
    path = write_table(tmp_path, table)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(EdgeError, match=text) as refused:
        read_table(path)
    assert FILE_NAME in str(refused.value)


def test_a_folder_that_can_not_be_written_leaves_nothing(table: Table, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BuildError, match="name a folder"):
        write_table(tmp_path / "file", table)
