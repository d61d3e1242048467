"""Builds in INT8: measured, gated, written, run. The engine has the last word, and a plan of one's own is obeyed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

import edge_engines
from edge_engines import int8_build
from edge_engines.progress import NoProgress
from edge_engines.sensitivity.table import FILE_NAME, Table, read_table, write_table
from edge_runtime import open_session
from edge_runtime.errors import BuildError
from edge_runtime.manifest import Manifest, read_manifest
from support.tiny_engines import GOLDEN, expected, tiny_int8_options


def build(name: str, out: Path, tmp_path: Path, **options: object) -> Manifest:
    return edge_engines.build(
        GOLDEN / name, out, precision="int8", capacity=64, int8_options=tiny_int8_options(tmp_path, **options)
    )


def change(table: Table, unit: str, precision: str) -> Table:
    units = [msgspec.structs.replace(row, precision=precision) if row.unit == unit else row for row in table.units]
    return msgspec.structs.replace(table, units=units)


@pytest.mark.parametrize("name", ["llama-tied", "qwen2"])
def test_an_int8_engine_says_what_was_chosen_and_how_it_stands(name: str, tmp_path: Path) -> None:
    manifest = build(name, tmp_path / "engine", tmp_path)
    assert read_manifest(tmp_path / "engine") == manifest
    assert (manifest.precision, manifest.kv_dtype, manifest.lowering) == ("int8", "float32", "ort")
    assert {unit.precision for unit in manifest.units} <= {"int8", "fp32"}
    gate = manifest.gate
    assert gate is not None
    assert gate.upper <= gate.limit == 1.2
    assert abs(gate.ratio - gate.simulated_ratio) < 0.02  # codes at a rounding border flip: up to 0.009 measured
    table = read_table(tmp_path / "engine" / FILE_NAME)
    assert {row.unit for row in table.units} == {unit.unit for unit in manifest.units}
    assert (tmp_path / "engine/report.html").stat().st_size > 10_000


def test_an_int8_engine_answers_much_like_the_model(tmp_path: Path) -> None:
    """Random weights leave no margin between tokens, so logits are compared: 0.05 measured, unrelated 1.4."""
    build("qwen3", tmp_path / "engine", tmp_path)
    want = expected("qwen3")
    with open_session(tmp_path / "engine") as session:
        whole = session.prefill(0, want.ids).copy()
        session.prefill(1, want.ids[:15])
        chunked = session.prefill(1, want.ids[15:], 15).copy()
    assert np.linalg.norm(whole - want.logits[-1]) < 0.15 * np.linalg.norm(want.logits[-1])
    assert np.linalg.norm(chunked - whole) < 0.05 * np.linalg.norm(whole)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3"])
def test_precision_auto_builds_what_it_chose_and_reports_what_it_tried(name: str, tmp_path: Path) -> None:
    manifest = edge_engines.build(
        GOLDEN / name, tmp_path / "engine", precision="auto", capacity=64, int8_options=tiny_int8_options(tmp_path)
    )
    assert read_manifest(tmp_path / "engine") == manifest
    assert manifest.gate is not None
    assert manifest.gate.upper <= manifest.gate.limit
    assert "budget.json" in {entry.name for entry in manifest.files}
    tried = json.loads((tmp_path / "engine/report.json").read_text())["pareto"]
    assert sum(point["chosen"] for point in tried) == 1
    assert {"all int8", "all w8", "all w4"} <= {point["name"] for point in tried}
    forms = {unit.precision for unit in manifest.units}
    assert len(forms) > 1
    assert forms <= {"fp32", "int8", "w8", "w4"}
    with open_session(tmp_path / "engine") as session:
        assert np.isfinite(session.prefill(0, expected(name).ids)).all()


def test_two_slots_answer_as_one_would(tmp_path: Path) -> None:
    """Scales are fixed, so a neighbour can't change an answer: bit for bit the same products."""
    build("qwen3", tmp_path / "engine", tmp_path)
    ids = expected("qwen3").ids
    with open_session(tmp_path / "engine") as session:
        session.prefill(0, ids[:12])
        session.prefill(1, ids[5:25])
        both = session.decode([0, 1], [3, 4], [12, 20]).copy()
        alone = np.stack([session.decode([0], [3], [12])[0].copy(), session.decode([1], [4], [20])[0].copy()])
    assert np.allclose(both, alone, atol=1e-4)


def test_a_plan_edited_by_hand_is_obeyed(tmp_path: Path) -> None:
    first = build("qwen3", tmp_path / "first", tmp_path)
    table = read_table(tmp_path / "first" / FILE_NAME)
    chosen = {unit.unit: unit.precision for unit in first.units}
    moved = "layers.1.down"
    assert chosen[moved] == "int8"
    plan = write_table(tmp_path / "edited", change(table, moved, "fp16"))
    second = build("qwen3", tmp_path / "second", tmp_path, plan=plan)
    units = {unit.unit: unit for unit in second.units}
    assert units[moved].precision == "fp32"
    assert units[moved].reason == "by hand"
    assert {name: unit.precision for name, unit in units.items() if name != moved} == {
        name: precision for name, precision in chosen.items() if name != moved
    }


def test_the_same_build_twice_gives_the_same_engine(tmp_path: Path) -> None:
    first, second = (build("mistral-window", tmp_path / name, tmp_path) for name in ("a", "b"))
    digests = [{e.name: e.sha256 for e in m.files if e.name.startswith("model.")} for m in (first, second)]
    assert digests[0] == digests[1]
    assert first.units == second.units


class StopsAt(NoProgress):
    """Progress that ends the build, as Ctrl-C does, when its n-th step begins."""

    def __init__(self, number: int) -> None:
        self.left, self.names = number, list[str]()

    def step(self, name: str, total: int | None) -> None:
        self.names.append(name)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_build_stopped_at_any_step_goes_on_to_the_same_engine(tmp_path: Path) -> None:
    options = tiny_int8_options(tmp_path, journal=tmp_path / "journal")

    def run(out: Path, progress: NoProgress) -> dict[str, str]:
        made = edge_engines.build(
            GOLDEN / "qwen2", out, precision="int8", capacity=64, int8_options=options, progress=progress
        )
        return {entry.name: entry.sha256 for entry in made.files if entry.name.startswith("model.")}

    whole = StopsAt(0)
    wanted = run(tmp_path / "whole", whole)
    assert len(whole.names) > 8
    (tmp_path / "journal").rename(tmp_path / "journal of the whole run")
    for number in range(1, len(whole.names) + 1):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "engine", StopsAt(number))
        assert not (tmp_path / "engine").exists()
    assert run(tmp_path / "engine", NoProgress()) == wanted


def test_when_no_layer_bears_int8_there_is_a_report_and_no_engine(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no layer can run INT8.*engine-refused"):
        build("llama-tied", tmp_path / "engine", tmp_path, threshold=0.0)
    assert not (tmp_path / "engine").exists()
    assert {path.name for path in (tmp_path / "engine-refused").iterdir()} == {
        "report.html", "report.json", "sensitivity.json",
    }  # fmt: skip


def test_an_engine_that_fails_where_its_simulation_passed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random logits in the place of the engine's: the last word is the engine's."""

    def noise(folder: Path, manifest: Manifest, ids: np.ndarray) -> Iterator[np.ndarray]:
        for row in ids:
            yield np.random.default_rng(0).normal(0, 9, (len(row), manifest.geometry.vocab)).astype(np.float32)

    monkeypatch.setattr(int8_build, "engine_logits", noise)
    with pytest.raises(BuildError, match=r"the engine fails the gate.*1\.2 is allowed, and the simulation gave"):
        build("qwen3", tmp_path / "engine", tmp_path)
    assert not (tmp_path / "engine").exists()
    assert "engine fails the gate" in (tmp_path / "engine-refused/report.html").read_text()


def test_without_tokenizer_and_token_ids_the_remedy_is_said(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no tokenizer.*--calibration FILE\.npy"):
        edge_engines.build(GOLDEN / "qwen2", tmp_path / "engine")
    assert not list(tmp_path.iterdir())
