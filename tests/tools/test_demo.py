"""`edge-runtime demo`: a real answer over MQTT, nothing fetched twice, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from edge_runtime.manifest import MANIFEST_NAME
from edge_tools.broker import find_mosquitto
from support.command import COMMAND, edge_runtime, environment

pytestmark = pytest.mark.model


@pytest.fixture
def home(smollm2_engine_w8: Path, tmp_path: Path) -> Path:
    """Home of a demo that has run before: the engine stands in it."""
    (tmp_path / "smollm2-135m-instruct-w8").symlink_to(smollm2_engine_w8)
    return tmp_path


def offline(tmp_path: Path) -> dict[str, str]:
    """Environment in which nothing can be fetched and nothing was: a second run must not notice."""
    return {"PIP_NO_INDEX": "1", "XDG_CACHE_HOME": str(tmp_path / "empty")}


def test_the_answer_comes_over_mqtt_and_the_report_tells(home: Path) -> None:
    assert find_mosquitto(), (
        "this test needs the mosquitto broker; on Debian and Ubuntu: sudo apt-get install mosquitto"
    )
    said = edge_runtime("demo", "--home", str(home), **offline(home))
    assert said.returncode == 0, said.stderr
    assert "Paris" in said.stdout
    commands = [line.partition("edge_tools ")[2].split()[0] for line in said.stdout.splitlines()[-3:]]
    assert commands == ["build", "serve", "ask"]
    report = json.loads((home / "report.json").read_text())
    assert "Paris" in report["answer"]["text"]
    assert report["broker"] == "mosquitto"
    assert report["tokens_per_s"] > 0
    assert report["ttft_ms"] >= report["answer"]["timings"]["ttft_ms"]


def test_an_engine_that_is_damaged_is_built_again_from_the_cache(home: Path, smollm2_gguf: Path) -> None:
    engine = home / "smollm2-135m-instruct-w8"
    engine.unlink()
    engine.mkdir()
    (engine / MANIFEST_NAME).write_text("{}")
    said = edge_runtime("demo", "--home", str(home), PIP_NO_INDEX="1")
    assert said.returncode == 0, said.stderr
    assert "not a valid manifest" in said.stderr
    assert "Paris" in said.stdout


def test_interrupting_leaves_no_process(home: Path) -> None:
    command = [*COMMAND, "demo", "--home", str(home), "Write a long story about the sea."]
    with subprocess.Popen(command, env=environment(**offline(home)), stdout=subprocess.PIPE) as child:
        assert child.stdout
        while not child.stdout.readline().startswith(b"> "):
            assert child.poll() is None
        family = psutil.Process(child.pid).children(recursive=True)
        assert len(family) >= 3  # broker, supervisor, worker
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(20) == 130
        gone, alive = psutil.wait_procs(family, timeout=5)
        assert not alive
        assert len(gone) == len(family)


def test_a_daemon_that_does_not_start_is_told_in_one_line(home: Path) -> None:
    said = edge_runtime("demo", "--home", str(home), EDGE_ENGINE__THREADS="-1", **offline(home))
    assert said.returncode == 70
    assert "the daemon exited with 78" in said.stderr.splitlines()[-1]
