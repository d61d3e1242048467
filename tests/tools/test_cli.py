"""What a user sees of the command line: help that teaches, errors in one line, exit codes of the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from support.command import COMMAND, edge_runtime, environment

VERBS = ("build", "serve", "ask", "inspect", "bench", "demo")


def test_without_arguments_the_help_is_shown() -> None:
    said = edge_runtime()
    assert said.returncode == 0
    assert all(verb in said.stdout for verb in (*VERBS, "config"))


@pytest.mark.parametrize("verb", VERBS)
def test_help_teaches_by_example(verb: str) -> None:
    said = edge_runtime(verb, "--help")
    assert said.returncode == 0
    assert f"edge-runtime {verb}" in said.stdout.partition("xamples")[2]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["nothing"], 2, "No such command 'nothing'; see: edge-runtime --help"),
        (["build"], 2, "Missing argument 'CHECKPOINT'; see: edge-runtime build --help"),
        (["build", "x", "-o", "o", "--precision", "int3"], 2, "'--precision'"),
        (["build", "x", "-o", "o", "--batch", "3"], 2, "'--batch'"),
        (["build", "no/such/model", "-o", "o"], 2, "no/such/model: no such file or folder"),
        (["serve"], 2, "no engine named; give --engine FOLDER"),
        (["serve", "--engine", "no/such/engine"], 78, "no/such/engine: no such engine folder"),
        (["serve", "--config", "no/such.toml"], 78, "no/such.toml: No such file"),
        (["serve", "--port", "0"], 2, "'--port'"),
        (["inspect", "no/such/engine"], 78, "no/such/engine: no such engine folder"),
        (["bench", "no/such/engine"], 78, "no/such/engine: no such engine folder"),
        (["bench", ".", "--json", "no/such/folder/x.json"], 2, "no/such/folder"),
        (["ask", "hello", "--port", "1"], 70, "no connection to the broker at 127.0.0.1:1"),
        (["ask", ""], 2, "the question is empty"),
        (["ask", "hello", "--password-file", "no/such/file"], 78, "no/such/file"),
        (["config"], 2, "Missing command; see: edge-runtime config --help"),
    ],
)
def test_an_error_is_one_line_and_a_status(arguments: list[str], status: int, says: str) -> None:
    said = edge_runtime(*arguments)
    assert said.returncode == status
    assert says in said.stderr
    assert said.stderr.startswith("edge-runtime: ")
    assert said.stderr.count("\n") == 1
    assert said.stdout == ""


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    for arguments in (["--debug", "inspect", "nowhere"], ["inspect", "nowhere", "--debug"]):
        said = edge_runtime(*arguments)
        assert said.returncode == 78
        assert "Traceback" in said.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    line = " ".join([*COMMAND, "--help"]) + " | head -1"
    said = subprocess.run(["bash", "-c", line], env=environment(), capture_output=True, text=True, check=False)
    assert said.stdout.startswith("Usage:")
    assert said.stderr == ""


def test_version_is_printed() -> None:
    assert edge_runtime("--version").stdout.startswith("edge-runtime ")


@pytest.mark.model
def test_inspect_tells_and_verifies(smollm2_engine_w8: Path) -> None:
    said = edge_runtime("inspect", str(smollm2_engine_w8))
    assert said.returncode == 0
    assert "2 slots x 512 tokens" in said.stdout
    assert "w8" in said.stdout
    manifest = json.loads(edge_runtime("inspect", str(smollm2_engine_w8), "--json").stdout)
    assert manifest["geometry"]["capacity"] == 512


@pytest.mark.model
def test_inspect_finds_a_changed_file(smollm2_engine_w8: Path, tmp_path: Path) -> None:
    for file in smollm2_engine_w8.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").unlink()
    content = (smollm2_engine_w8 / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(content[:-1] + b" ")
    said = edge_runtime("inspect", str(tmp_path))
    assert said.returncode == 78
    assert "tokenizer.json: SHA-256" in said.stderr
    assert edge_runtime("inspect", str(tmp_path), "--no-verify").returncode == 0


@pytest.mark.model
def test_no_command_reports_its_use_to_the_vendor_of_onnx_runtime(smollm2_engine_w8: Path, tmp_path: Path) -> None:
    said = edge_runtime("bench", str(smollm2_engine_w8), "--suite", "prefill", HOME=str(tmp_path))
    assert said.returncode == 0, said.stderr
    assert list(tmp_path.iterdir()) == []  # the report would be queued below ~/.cache


@pytest.mark.model
@pytest.mark.slow
def test_bench_ends_with_one_json_line(smollm2_engine_w8: Path, tmp_path: Path) -> None:
    said = edge_runtime("bench", str(smollm2_engine_w8), "--suite", "decode", "--json", str(tmp_path / "result.json"))
    assert said.returncode == 0, said.stderr
    record = json.loads(said.stdout.splitlines()[-1])
    assert record == json.loads((tmp_path / "result.json").read_text())
    assert record["decode"]["step"]["p50_ms"] > 0
    assert record["batch"] is None


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("suite", ["mqtt", "cold"])
def test_bench_measures_the_whole_way_too(suite: str, smollm2_engine_w8: Path) -> None:
    said = edge_runtime("bench", str(smollm2_engine_w8), "--suite", suite)
    assert said.returncode == 0, said.stderr
    record = json.loads(said.stdout.splitlines()[-1])
    assert record[suite]["rounds"] > 0
    assert record["decode"] is None


@pytest.mark.model
def test_an_interrupted_build_leaves_nothing(smollm2_gguf: Path, tmp_path: Path) -> None:
    command = [*COMMAND, "build", str(smollm2_gguf), "-o", str(tmp_path / "out")]
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr
        child.stderr.readline()  # the first step has begun
        os.kill(child.pid, signal.SIGINT)
        rest = child.stderr.read()
    assert child.returncode == 130
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []
