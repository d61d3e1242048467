"""The compiler process fails in every way it can (case C27): the build says how, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import edge_engines
from edge_engines import pipeline
from edge_engines.compile.frames import CompileRequest
from edge_engines.compile.process import ask_compiler
from edge_engines.compile.tensorrt import CompileOptions, Compiler, find_compiler
from edge_engines.progress import NoProgress
from edge_runtime.errors import BuildError
from support import fake_compiler
from support.tiny_engines import GOLDEN

OPTIONS = CompileOptions(("8.6",))
WAIT_S = 10

Behave = Callable[[str], None]


class Recorder(NoProgress):
    """Progress that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def request(folder: Path) -> CompileRequest:
    (folder / "model.onnx").write_bytes(b"graph")
    return CompileRequest(
        "tensorrt-rtx", str(folder), "model.onnx", "model.plan", "layers.json", [], [], ["8.6"], None, None, None
    )


@pytest.fixture
def behave(monkeypatch: pytest.MonkeyPatch) -> Behave:
    """Let builds use a fake compiler of the given behaviour."""

    def choose(behaviour: str) -> None:
        def find(target: str, precision: str, options: CompileOptions) -> Compiler:
            return find_compiler(target, precision, options, fake_compiler.command(behaviour))

        monkeypatch.setattr(pipeline, "find_compiler", find)

    return choose


def build(out: Path, **more: object) -> None:
    options: dict[str, object] = {"compile_options": OPTIONS, **more}
    edge_engines.build(
        GOLDEN / "qwen3",
        out,
        target="tensorrt-rtx",
        precision="fp16",
        capacity=32,
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.native
@pytest.mark.parametrize(
    ("behaviour", "text"),
    [
        ("is_killed_mid_write", "killed, most likely for memory.*more memory"),
        ("succeeds_without_a_file", "success with a plan of 4 bytes, 0 bytes are there"),
        ("writes_an_empty_file", "0 bytes are there"),
        ("writes_less_than_it_says", "plan of 4 bytes, 2 bytes are there"),
        ("crashes", r"died \(exit 1\): RuntimeError: something inside"),
        ("leaves_without_a_word", r"died \(exit 0\)"),
        ("fails_with_reason", "can't build this graph: no kernel"),
        ("speaks_nonsense", "unexpected: b'&&&& RUNNING"),
    ],
)
def test_c27_a_compiler_that_fails_leaves_nothing(behaviour: str, text: str, behave: Behave, tmp_path: Path) -> None:
    behave(behaviour)
    with pytest.raises(BuildError, match=text) as failed:
        build(tmp_path / "engine")
    assert "\n" not in str(failed.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.native
def test_a_failed_compilation_keeps_the_engine_that_was_there(behave: Behave, tmp_path: Path) -> None:
    behave("works")
    build(tmp_path / "engine")
    before = (tmp_path / "engine/engine.json").read_bytes()
    behave("is_killed_mid_write")
    with pytest.raises(BuildError):
        build(tmp_path / "engine", force=True)
    assert (tmp_path / "engine/engine.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


def test_a_build_that_memory_can_not_hold_is_refused_before_the_graph_is_written(
    behave: Behave,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    behave("works")
    memory = psutil.virtual_memory()._replace(available=100_000_000)
    monkeypatch.setattr(pipeline.psutil, "virtual_memory", lambda: memory)
    with pytest.raises(BuildError, match=r"this build needs about \d+ MB, 100 MB are available"):
        build(tmp_path / "engine")
    assert not list(tmp_path.iterdir())


@pytest.mark.native
def test_a_build_that_was_stopped_behind_the_compiler_does_not_compile_again(behave: Behave, tmp_path: Path) -> None:
    options = CompileOptions(("8.6",), plans=tmp_path / "plans")
    behave("works")
    build(tmp_path / "first", compile_options=options)
    behave("fails_with_reason")  # whoever compiles now is found out
    build(tmp_path / "second", compile_options=options)
    assert (tmp_path / "second/model.plan").read_bytes() == (tmp_path / "first/model.plan").read_bytes()


def test_a_silent_compiler_is_said_to_be_at_work(tmp_path: Path) -> None:
    progress = Recorder()
    ask_compiler(request(tmp_path), progress, command=fake_compiler.command("is_slow"), silence_s=0.05)
    assert any(note.startswith("still compiling") for note in progress.notes)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_compiler_ends_with_the_build_however_that_ended(how: signal.Signals, tmp_path: Path) -> None:
    """SIGINT reaches the build alone, as Ctrl-C does: the compiler leads a group of its own."""
    script = (
        "import sys; from pathlib import Path\n"
        "from engines.test_compile_faults import request\n"
        "from edge_engines.compile.process import ask_compiler\n"
        "from edge_engines.progress import NoProgress\n"
        "from support import fake_compiler\n"
        "class Told(NoProgress):\n"
        "    def step(self, name, total): print(name, flush=True)\n"
        "ask_compiler(request(Path(sys.argv[1])), Told(), command=fake_compiler.command('hangs'))\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        compiler = compiler_of(child.pid)
        child.send_signal(how)
        child.wait(WAIT_S)
    compiler.wait(WAIT_S)
    assert not compiler.is_running()


def compiler_of(pid: int) -> psutil.Process:
    (compiler,) = psutil.Process(pid).children()
    return compiler
