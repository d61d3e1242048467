"""Stopping the daemon in every state: exit status 0, partial answers, a retained `offline`, no child left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.messages import parse_status
from support.broker import BROKERS, Broker, free_port
from support.daemon import DaemonProcess, eventually, is_running
from support.peer import Peer

SLOW = {"step_ms": 50}


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with Broker(request.param, tmp_path) as broker:
        yield broker


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Broker]:
    with Broker("mosquitto", tmp_path) as broker:
        yield broker


def assert_stopped(daemon: DaemonProcess, pids: list[int], limit_s: float, began: float) -> None:
    assert daemon.wait() == 0, daemon.text()
    assert time.monotonic() - began < limit_s
    assert not any(is_running(pid) for pid in pids)
    assert "Traceback" not in daemon.text()


@pytest.mark.fault("D1")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_c71_idle_it_stops_at_once_and_says_so(broker: Broker, tmp_path: Path, number: int) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        pids, began = daemon.worker_pids(), time.monotonic()
        daemon.signal(number)
        assert_stopped(daemon, pids, 2.0, began)
        peer.wait_for(lambda: peer.states()[-1] == "offline")
        last = parse_status(peer.messages[-1].payload)
        assert (last.reason, last.ready) == ("stopped", False)
        assert "draining" in peer.states()
    with Peer(broker.port) as late:  # the last status is retained, and no will follows it
        late.wait_for(lambda: late.states() == ["offline"])
        assert late.messages[0].retain


@pytest.mark.fault("D1")
def test_c71_while_it_answers_the_answer_ends_as_cancelled_with_its_text(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port, worker=SLOW) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        for name in ("r1", "r2", "r3", "waiting"):
            peer.ask(name, stream=True, max_tokens=200)
        peer.wait_for(lambda: len(peer.chunks("r1")) >= 2)
        pids, began = daemon.worker_pids(), time.monotonic()
        daemon.signal(signal.SIGTERM)
        peer.wait_for(lambda: "draining" in peer.states())
        assert peer.error("waiting").error.code == "shutting_down"
        peer.ask("late")
        assert peer.error("late").error.code == "shutting_down"
        assert_stopped(daemon, pids, 5.0, began)
        assert time.monotonic() - began > 0.9  # running requests had their `drain_s` of 1 s
        for name in ("r1", "r2"):
            final = peer.final(name)
            assert final.choices[0].finish_reason == "cancelled"
            assert final.choices[0].message.content.startswith("w0 w1 ")
        for name in ("r1", "r2", "r3", "waiting"):
            assert len(peer.terminals(name)) == 1


@pytest.mark.fault("D1")
def test_a_short_answer_is_finished_before_the_end(mosquitto: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", mosquitto.port, worker=SLOW) as daemon, Peer(mosquitto.port) as peer:
        daemon.wait_ready()
        peer.ask("r1", stream=True, max_tokens=8)
        peer.wait_for(lambda: peer.chunks("r1"))
        assert daemon.stop() == 0
        assert peer.final("r1").choices[0].finish_reason == "length"


@pytest.mark.fault("D1")
def test_c71_a_second_signal_skips_the_waiting(mosquitto: Broker, tmp_path: Path) -> None:
    config = {"daemon": {"drain_s": 60.0}}
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port, worker=SLOW, config=config) as daemon,
        Peer(mosquitto.port) as peer,
    ):
        daemon.wait_ready()
        peer.ask("r1", stream=True, max_tokens=200)
        peer.wait_for(lambda: peer.chunks("r1"))
        pids = daemon.worker_pids()
        daemon.signal(signal.SIGTERM)
        peer.wait_for(lambda: "draining" in peer.states())
        began = time.monotonic()
        daemon.signal(signal.SIGTERM)
        assert_stopped(daemon, pids, 2.0, began)
        assert peer.final("r1").choices[0].finish_reason == "cancelled"
        peer.wait_for(lambda: peer.states()[-1] == "offline")


def test_c71_while_the_model_loads_it_stops_too(mosquitto: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", mosquitto.port, worker={"load_s": 60}) as daemon, Peer(mosquitto.port) as peer:
        peer.wait_for(lambda: "starting" in peer.states())
        eventually(daemon.worker_pids)
        pids, began = daemon.worker_pids(), time.monotonic()
        daemon.signal(signal.SIGTERM)
        assert_stopped(daemon, pids, 3.0, began)


def test_c71_without_a_broker_it_stops_within_its_flush_time(tmp_path: Path) -> None:
    config = {"daemon": {"flush_s": 0.5}}
    with DaemonProcess(tmp_path / "d", free_port(), config=config) as daemon:
        daemon.wait_ready()
        pids, began = daemon.worker_pids(), time.monotonic()
        daemon.signal(signal.SIGTERM)
        assert_stopped(daemon, pids, 5.0, began)


def test_c71_a_hanging_worker_does_not_hold_the_end_up(tmp_path: Path) -> None:
    config = {"worker": {"heartbeat": {"hang_floor_s": 60.0}}}
    with (
        Broker("mosquitto", tmp_path) as broker,
        DaemonProcess(tmp_path / "d", broker.port, config=config) as daemon,
        Peer(broker.port) as peer,
    ):
        daemon.wait_ready()
        peer.ask("r1", "HANG AFTER text", stream=True)
        peer.wait_for(lambda: len(peer.chunks("r1")) == 3)
        pids, began = daemon.worker_pids(), time.monotonic()
        daemon.signal(signal.SIGTERM)
        assert_stopped(daemon, pids, 6.0, began)  # 1 s drain, 1 s cancel, 2 s stop
        assert peer.final("r1").choices[0].message.content.startswith("w0 ")


def test_c71_a_terminal_interrupt_reaches_the_supervisor_only(tmp_path: Path) -> None:
    with (
        Broker("mosquitto", tmp_path) as broker,
        DaemonProcess(tmp_path / "d", broker.port) as daemon,
        Peer(broker.port) as peer,
    ):
        daemon.wait_ready()
        (pid,) = daemon.worker_pids()
        assert daemon.process is not None
        assert os.getpgid(pid) != os.getpgid(daemon.process.pid)
        peer.ask("r1", max_tokens=2)
        peer.final("r1")
