"""Plans of earlier builds: taken only for exactly the same, never when damaged, never fatal."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from edge_engines.compile import kept
from edge_engines.compile.frames import Compiled, CompileRequest, ModuleFacts
from edge_engines.compile.kept import KEPT_PLANS, keep_plan, plan_key, take_plan
from edge_runtime.manifest import FileEntry

MODULE = ModuleFacts("tensorrt_rtx", "1.7.0", "1.7.0", ["8.6"], None)
SOURCE = [FileEntry("model.onnx", 5, "aa"), FileEntry("model.onnx.data", 9, "bb")]
DONE = Compiled(4, "layers.json", "none", 12.5, 1)


def request(folder: Path, **other: object) -> CompileRequest:
    folder.mkdir(exist_ok=True)
    plain = CompileRequest(
        "tensorrt-rtx", str(folder), "model.onnx", "model.plan", "layers.json", [], [], ["8.6"], None, None, None
    )
    return msgspec.structs.replace(plain, **other)


def compiled(folder: Path) -> CompileRequest:
    made = request(folder)
    (folder / "model.plan").write_bytes(b"plan")
    (folder / "layers.json").write_text("{}")
    return made


def test_a_kept_plan_is_taken_into_another_folder(tmp_path: Path) -> None:
    made, other = compiled(tmp_path / "first"), request(tmp_path / "second")
    key = plan_key(made, SOURCE, MODULE)
    keep_plan(tmp_path / "plans", key, made, DONE)
    assert plan_key(other, SOURCE, MODULE) == key
    assert take_plan(tmp_path / "plans", key, other) == DONE
    assert (tmp_path / "second/model.plan").read_bytes() == b"plan"
    assert (tmp_path / "second/layers.json").read_text() == "{}"


def test_everything_that_decides_a_plan_is_in_its_key(tmp_path: Path) -> None:
    plain = request(tmp_path / "x")
    other_weights = [SOURCE[0], FileEntry("model.onnx.data", 9, "bc")]
    keys = {
        plan_key(plain, SOURCE, MODULE),
        plan_key(plain, other_weights, MODULE),
        plan_key(request(tmp_path / "x", compute_capabilities=["8.9"]), SOURCE, MODULE),
        plan_key(request(tmp_path / "x", optimization_level=5), SOURCE, MODULE),
        plan_key(request(tmp_path / "x", workspace_bytes=1), SOURCE, MODULE),
        plan_key(plain, SOURCE, msgspec.structs.replace(MODULE, version="1.7.1")),
        plan_key(plain, SOURCE, msgspec.structs.replace(MODULE, library="1.7.1")),
    }
    assert len(keys) == 7


@pytest.mark.parametrize("name", ["model.plan", "layers.json", "kept.json"])
def test_a_damaged_plan_is_not_taken(name: str, tmp_path: Path) -> None:
    made = compiled(tmp_path / "first")
    keep_plan(tmp_path / "plans", "key", made, DONE)
    (tmp_path / "plans/key" / name).write_bytes(b"other")
    assert take_plan(tmp_path / "plans", "key", request(tmp_path / "second")) is None


def test_only_the_latest_plans_are_kept(tmp_path: Path) -> None:
    made = compiled(tmp_path / "first")
    for number in range(KEPT_PLANS + 2):
        keep_plan(tmp_path / "plans", f"key{number}", made, DONE)
    assert len(list((tmp_path / "plans").iterdir())) == KEPT_PLANS


def test_an_interrupted_copy_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled(tmp_path / "first")

    def interrupt(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(kept.shutil, "copyfile", interrupt)
    with pytest.raises(KeyboardInterrupt):
        keep_plan(tmp_path / "plans", "key", made, DONE)
    assert not list((tmp_path / "plans").iterdir())


def test_a_cache_that_can_not_be_written_is_never_fatal(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file")
    keep_plan(tmp_path / "plans", "key", compiled(tmp_path / "first"), DONE)
    assert take_plan(tmp_path / "plans", "key", request(tmp_path / "second")) is None
