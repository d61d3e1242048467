"""The build as a user runs it: what it leaves behind, and what it leaves alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import edge_engines
from edge_engines import folder as engine_folder
from edge_engines.pipeline import default_name
from edge_engines.verify import verify_engine
from edge_runtime import EdgeError, open_session
from edge_runtime.errors import BuildError, CheckpointError, EngineRefusedError, UsageError
from edge_runtime.manifest import MANIFEST_NAME, read_manifest
from support.tiny_engines import GOLDEN, build_tiny

ROOT = Path(__file__).resolve().parents[2]


def test_built_folder_is_complete_and_says_what_it_is(tmp_path: Path) -> None:
    manifest = read_manifest(build_tiny("qwen3", tmp_path / "engine"))
    assert {entry.name for entry in manifest.files} == {
        "model.onnx", "model.onnx.data", "build.log", "report.html", "report.json",
    }  # fmt: skip
    assert manifest.geometry.head_dim == 32
    assert manifest.model.family == "qwen3"
    assert manifest.verify is not None
    assert manifest.verify.same_top1
    assert manifest.model.rotary == [{"base": 1e6, "kind": "default", "dims": 32.0}]
    assert [value.name for value in manifest.inputs[:3]] == ["input_ids", "starts", "logit_rows"]
    assert {unit.precision for unit in manifest.units} == {"fp32"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]


def test_without_a_tokenizer_the_engine_is_built_for_token_ids(tmp_path: Path) -> None:
    notes: list[str] = []

    class Notes:
        def step(self, name: str, total: int | None) -> None: ...

        def advance(self, n: int) -> None: ...

        def note(self, text: str) -> None:
            notes.append(text)

    manifest = edge_engines.build(
        GOLDEN / "qwen2", tmp_path / "engine", precision="fp32", progress=Notes(), capacity=32
    )
    assert not manifest.model.has_text
    assert any("tokenizer" in note for note in notes)


def test_w8_manifest_names_each_unit_and_why(tmp_path: Path) -> None:
    units = {u.unit: u for u in read_manifest(build_tiny("llama-tied", tmp_path / "e", precision="w8")).units}
    assert units["layers.0.qkv"].precision == "w8"
    assert units["layers.2.down"].reason == "--precision w8, blocks of 16"


def test_existing_engine_is_kept_unless_force_is_given(tmp_path: Path) -> None:
    out = build_tiny("qwen2", tmp_path / "engine")
    before = (out / MANIFEST_NAME).read_bytes()
    with pytest.raises(BuildError, match="--force"):
        build_tiny("qwen3", out)
    assert (out / MANIFEST_NAME).read_bytes() == before
    edge_engines.build(GOLDEN / "qwen3", out, precision="fp32", force=True, capacity=32)
    assert read_manifest(out).model.family == "qwen3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]


def test_a_folder_that_is_no_engine_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/draft.txt").write_text("Dear")
    with pytest.raises(BuildError, match="not an engine folder"):
        edge_engines.build(GOLDEN / "qwen2", tmp_path / "letters", force=True)
    with pytest.raises(BuildError, match="is a file"):
        edge_engines.build(GOLDEN / "qwen2", tmp_path / "letters/draft.txt", force=True)
    assert (tmp_path / "letters/draft.txt").read_text() == "Dear"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"precision": "int3"}, UsageError, "fp32, fp16, w8"),
        ({"lowering": "other"}, UsageError, "ort, native"),
        ({"target": "abacus"}, UsageError, "ort-cpu"),
        ({"max_batch": 3}, UsageError, "1 or 2 slots"),
        ({"capacity": 2}, BuildError, "8 to 256"),
        ({"capacity": 100_000}, BuildError, "8 to 256"),
    ],
)
def test_options_out_of_range_are_refused_before_any_work(
    options: dict[str, object], error: type[EdgeError], text: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=text):
        edge_engines.build(GOLDEN / "qwen2", tmp_path / "engine", **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_missing_or_broken_checkpoints_leave_nothing_behind(tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<html>not found</html>")
    for source in (tmp_path / "nowhere", page):
        with pytest.raises(CheckpointError, match=source.name):
            edge_engines.build(source, tmp_path / "engine")
    assert [path.name for path in tmp_path.iterdir()] == ["page.gguf"]


def test_a_full_disk_is_noticed_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(engine_folder.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(BuildError, match="free some space"):
        build_tiny("qwen2", tmp_path / "engine")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_old_engine(tmp_path: Path) -> None:
    out = build_tiny("qwen2", tmp_path / "engine")

    def fail() -> None:
        with engine_folder.new_folder(out) as work:
            (work / "half").write_text("half")
            raise OSError(28, "No space left on device", str(work / "half"))

    with pytest.raises(BuildError, match="No space left"):
        fail()
    assert read_manifest(out).model.family == "qwen2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine"]


@pytest.mark.parametrize("when", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_never_looks_finished(when: signal.Signals, tmp_path: Path) -> None:
    """Stopped inside the temporary folder; only SIGKILL may leave that folder, never `engine`."""
    script = (
        "import sys, time, edge_engines.folder as f, pathlib\n"
        "with f.new_folder(pathlib.Path(sys.argv[1])) as work:\n"
        "    (work / 'part').write_text('x'); print('writing', flush=True); time.sleep(60)\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    out = tmp_path / "engine"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(out)], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"writing\n"
    child.send_signal(when)
    child.wait(10)
    child.stdout.close()
    assert not out.exists()
    if when == signal.SIGINT:
        assert not list(tmp_path.iterdir())


def test_c27_an_engine_that_computes_noise_is_refused(tmp_path: Path) -> None:
    out = build_tiny("qwen2", tmp_path / "engine")
    manifest = read_manifest(out)
    noise = np.random.default_rng(0).normal(size=manifest.geometry.vocab)
    with pytest.raises(BuildError, match="does not compute this model"):
        verify_engine(out, manifest, [1, 2, 3], noise)


def test_c27_an_engine_that_does_not_load_is_refused(tmp_path: Path) -> None:
    out = build_tiny("qwen2", tmp_path / "engine")
    (out / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(BuildError, match="does not run"):
        verify_engine(out, _manifest(out), [1], np.ones(320))


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda out: (out / "model.onnx.data").write_bytes(b""), "0 bytes, the manifest says"),
        (lambda out: os.truncate(out / "model.onnx.data", 1000), "1000 bytes, the manifest says"),
        (lambda out: _flip(out / "model.onnx.data"), "SHA-256"),
        (lambda out: (out / "model.onnx").unlink(), "No such file"),
        (lambda out: (out / MANIFEST_NAME).unlink(), "not a finished engine"),
        (lambda out: (out / MANIFEST_NAME).write_text("{"), "not a valid manifest"),
        (lambda out: _edit(out, '"format": 1', '"format": 9'), "format 9"),
        (lambda out: _edit(out, '"name": "model.onnx"', '"name": "../model.onnx"'), "leaves the engine folder"),
    ],
)
def test_a_damaged_engine_is_refused_before_loading(harm: Callable[[Path], object], text: str, tmp_path: Path) -> None:
    out = build_tiny("llama-tied", tmp_path / "engine")
    harm(out)
    with pytest.raises(EngineRefusedError, match=text) as refused:
        open_session(out)
    assert "edge-runtime build" in str(refused.value)


def test_c26_weights_are_found_from_any_folder_and_belong_to_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = build_tiny("qwen2", tmp_path / "a"), build_tiny("qwen3", tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    with open_session("a", threads=1) as a, open_session("b", threads=1) as b:
        from_a, from_b = a.prefill(0, [1, 2, 3]).copy(), b.prefill(0, [1, 2, 3]).copy()
    monkeypatch.chdir("/")
    with open_session(second, threads=1) as b, open_session(first, threads=1) as a:
        assert np.array_equal(a.prefill(0, [1, 2, 3]), from_a)
        assert np.array_equal(b.prefill(0, [1, 2, 3]), from_b)


@pytest.mark.parametrize("location", ["../outside.data", "/etc/hostname"])
def test_c26_a_graph_that_reads_outside_its_folder_is_refused(location: str, tmp_path: Path) -> None:
    """By its digest: ONNX Runtime 1.23 would follow such a path."""
    import onnx

    out = build_tiny("qwen2", tmp_path / "engine")
    shutil.copy(out / "model.onnx.data", tmp_path / "outside.data")
    graph = onnx.load(out / "model.onnx", load_external_data=False)
    for tensor in graph.graph.initializer:
        for entry in tensor.external_data:
            entry.value = location if entry.key == "location" else entry.value
    onnx.save_model(graph, out / "model.onnx")
    with pytest.raises(EngineRefusedError, match="the manifest says"):
        open_session(out)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models/SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct.q4_1"),
        ("Qwen3 0.6B", "qwen3-0.6b"),
        ("...", "model"),
    ],
)
def test_default_name_is_safe_everywhere(path: str, name: str) -> None:
    assert default_name(Path(path)) == name


@pytest.mark.model
@pytest.mark.slow
def test_building_needs_at_most_1_6_times_the_fp32_bytes(smollm2_gguf: Path, tmp_path: Path) -> None:
    script = "import sys, edge_engines; edge_engines.build(sys.argv[1], sys.argv[2], precision='fp32')"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script, str(smollm2_gguf), str(tmp_path / "e")], env=env, check=True)
    manifest = read_manifest(tmp_path / "e")
    assert manifest.build.peak_memory_bytes <= 1.6 * 4 * manifest.model.parameters


def _manifest(out: Path):  # type: ignore[no-untyped-def]
    from edge_runtime.manifest import Manifest

    return msgspec.json.decode((out / MANIFEST_NAME).read_bytes(), type=Manifest)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _edit(out: Path, old: str, new: str) -> None:
    text = (out / MANIFEST_NAME).read_text()
    assert old in text
    (out / MANIFEST_NAME).write_text(text.replace(old, new))
