"""The demo's broker starts, answers and is gone afterwards, whichever program it is."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from edge_runtime.errors import UsageError
from edge_tools.broker import find_mosquitto, free_port, running_broker
from edge_tools.children import running_child

NEEDS_MOSQUITTO = "these tests need the mosquitto broker; on Debian and Ubuntu: sudo apt-get install mosquitto"


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_mosquitto_runs_for_the_block_and_no_longer(tmp_path: Path) -> None:
    assert find_mosquitto(), NEEDS_MOSQUITTO
    with running_broker(tmp_path) as broker:
        assert broker.name == "mosquitto"
        assert is_open(broker.port)
    assert not is_open(broker.port)


def test_iotcore_takes_over_where_there_is_no_mosquitto(tmp_path: Path) -> None:
    with running_broker(tmp_path, program="") as broker:
        assert broker.name == "iotcore"
        assert is_open(broker.port)
    assert not is_open(broker.port)


def test_a_broker_that_exits_is_told_with_its_last_words(tmp_path: Path) -> None:
    bad = tmp_path / "bad-broker"
    bad.write_text("#!/bin/sh\necho no luck today\nexit 3\n")
    bad.chmod(0o755)
    with pytest.raises(UsageError, match="exited with 3: no luck today"), running_broker(tmp_path, program=str(bad)):
        pass


def test_free_ports_are_free() -> None:
    assert not is_open(free_port())


def test_a_child_is_gone_when_its_block_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(KeyboardInterrupt), running_child(command, tmp_path / "log", grace_s=5) as child:
        raise KeyboardInterrupt
    assert child.returncode == -15


def test_a_child_that_ignores_the_request_is_killed_after_its_grace(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    with running_child([sys.executable, "-c", deaf], log, grace_s=0.2) as child:
        while not log.read_text():
            assert child.poll() is None
    assert child.returncode == -9
