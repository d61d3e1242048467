"""Workers that die, hang, babble or never load: who is told what, and how serving goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from edge_runtime.messages import Event, Status, parse_status
from support.broker import Broker
from support.daemon import DaemonProcess, eventually, is_running
from support.peer import Peer

PATIENT = {"worker": {"restart": {"limit": 100}}}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker("mosquitto", tmp_path) as broker:
        yield broker


def status_of(peer: Peer) -> Status:
    return [parse_status(m.payload) for m in peer.messages if m.topic == peer.topics.status][-1]


def reasons(daemon: DaemonProcess) -> list[str]:
    return [event["reason"] for event in daemon.events("worker_down")]


def assert_serves(peer: Peer, request_id: str) -> None:
    peer.ask(request_id, max_tokens=2)
    assert peer.final(request_id).choices[0].message.content == "w0 w1 "


def assert_one_terminal_each(peer: Peer, *request_ids: str) -> None:
    for request_id in request_ids:
        assert len(peer.terminals(request_id)) == 1
        assert [frame.seq for frame in peer.frames(request_id)] == list(range(len(peer.frames(request_id))))


@pytest.mark.fault("W1")
def test_a_worker_death_ends_what_has_spoken_and_repeats_what_has_not(broker: Broker, tmp_path: Path) -> None:
    worker = {"step_ms": 20}
    with DaemonProcess(tmp_path / "d", broker.port, worker=worker, config=PATIENT) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        peer.ask("speaking", stream=True, max_tokens=100)
        peer.ask("silent", max_tokens=20)
        peer.ask("queued1", max_tokens=3)
        peer.ask("queued2", max_tokens=3)
        peer.wait_for(lambda: len(peer.chunks("speaking")) >= 3)
        (pid,) = daemon.worker_pids()
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        frame = peer.error("speaking")
        assert time.monotonic() - began < 1.0
        assert frame.error.code == "worker_restarted"
        assert frame.partial is not None
        sent = "".join(chunk.choices[0].delta.content for chunk in peer.chunks("speaking"))
        assert frame.partial.content == sent != ""
        again = peer.final("silent")
        assert again.attempt == 2
        assert again.choices[0].message.content == "".join(f"w{n} " for n in range(20))
        for name in ("queued1", "queued2"):
            assert peer.final(name).choices[0].message.content == "w0 w1 w2 "
        assert reasons(daemon) == ["signal9"]
        (event,) = [msgspec.json.decode(m.payload, type=Event) for m in peer.messages if m.topic == peer.topics.event]
        assert (event.event, event.reason) == ("worker_restarted", "signal9")
        assert not is_running(pid)
        assert status_of(peer).worker_restarts == 1
        assert_one_terminal_each(peer, "speaking", "silent", "queued1", "queued2")
        assert_serves(peer, "after")


@pytest.mark.fault("W2")
def test_a_stopped_worker_is_killed_and_replaced(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        (pid,) = daemon.worker_pids()
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        peer.ask("r1", max_tokens=2)  # to the stopped one
        assert peer.final("r1").attempt == 2
        assert time.monotonic() - began < 4.0  # three beats of 0.2 s, 0.5 s late, 0.2 s grace, a new process
        assert reasons(daemon) == ["heartbeat"]
        assert not is_running(pid)


@pytest.mark.fault("W3")
def test_c70_a_step_that_hangs_is_found_although_beats_go_on(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        peer.ask("stuck", "HANG AFTER a few words", stream=True)
        frame = peer.error("stuck")
        assert (frame.error.code, frame.error.retryable) == ("worker_restarted", True)
        assert reasons(daemon) == ["heartbeat"]
        assert_serves(peer, "after")


def test_c70_a_long_but_moving_answer_is_left_alone(broker: Broker, tmp_path: Path) -> None:
    config = {"worker": {"heartbeat": {"interval_s": 0.1}}}
    with (
        DaemonProcess(tmp_path / "d", broker.port, worker={"step_ms": 400}, config=config) as daemon,
        Peer(broker.port) as peer,
    ):
        daemon.wait_ready()
        peer.ask("slow", max_tokens=6)
        assert peer.final("slow").attempt == 1
        assert reasons(daemon) == []


def test_a_worker_whose_heartbeat_ends_is_replaced(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port, worker={"mute_after": 5}) as daemon:
        daemon.wait_ready()
        eventually(lambda: reasons(daemon) == ["heartbeat"], 10, daemon.text)


@pytest.mark.fault("W8")
def test_a_crash_loop_fails_clearly_and_is_given_up(broker: Broker, tmp_path: Path) -> None:
    config = {"worker": {"restart": {"limit": 2, "give_up_s": 1.0}}}
    worker = {"exit_at": "load", "code": 3}
    with DaemonProcess(tmp_path / "d", broker.port, worker=worker, config=config) as daemon, Peer(broker.port) as peer:
        peer.wait_for(lambda: "failed" in peer.states())
        peer.ask("r1")
        assert (peer.error("r1").error.code, peer.error("r1").error.retryable) == ("model_unavailable", True)
        assert daemon.wait() == 70
        assert set(reasons(daemon)) == {"exit3"}
        assert len(reasons(daemon)) <= 3 + 1.0 / 0.2 + 2  # each after its pause: no busy loop
        peer.wait_for(lambda: peer.states()[-1] == "offline")


@pytest.mark.fault("W9")
def test_c70_a_poison_request_is_refused_after_the_second_death_and_others_are_served(
    broker: Broker, tmp_path: Path
) -> None:
    with DaemonProcess(tmp_path / "d", broker.port, config=PATIENT) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        peer.ask("poison", "KILL me")
        peer.ask("neighbour", max_tokens=4)
        assert peer.error("poison").error.code == "request_quarantined"
        assert peer.final("neighbour").choices[0].finish_reason == "length"
        peer.ask("again", "KILL me")
        assert peer.error("again").error.code == "request_quarantined"
        assert reasons(daemon) == ["signal9", "signal9"]
        assert_serves(peer, "after")


@pytest.mark.fault("W12")
def test_a_worker_that_breaks_the_protocol_is_replaced(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        peer.ask("r1", "GARBAGE AFTER text", stream=True)
        assert peer.error("r1").error.code == "worker_restarted"
        assert reasons(daemon)[0].startswith("protocol: frame length")
        assert_serves(peer, "after")


@pytest.mark.fault("W13")
def test_c68_a_killed_supervisor_leaves_no_worker_and_the_will_speaks(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        peer.wait_for(lambda: peer.states()[-1:] == ["online"])
        before = status_of(peer)
        (pid,) = daemon.worker_pids()
        daemon.signal(signal.SIGKILL)
        daemon.wait()
        eventually(lambda: not is_running(pid), 1.0)
        peer.wait_for(lambda: peer.states()[-1] == "offline")
        assert (status_of(peer).reason, status_of(peer).boot_id) == ("lost", before.boot_id)
        daemon.start()
        peer.wait_for(lambda: peer.states()[-1] == "online")
        assert status_of(peer).boot_id != before.boot_id
        assert len(daemon.worker_pids()) == 1
        assert_serves(peer, "after")


@pytest.mark.fault("W14")
def test_a_load_that_takes_too_long_is_ended_and_tried_again(broker: Broker, tmp_path: Path) -> None:
    config = {"worker": {"load_s": 1.0}}
    with DaemonProcess(tmp_path / "d", broker.port, worker={"load_s": 60}, config=config) as daemon:
        eventually(lambda: len(daemon.events("worker_spawned")) == 2, 10, daemon.text)
        assert reasons(daemon) == ["load"]


@pytest.mark.fault("W14")
@pytest.mark.parametrize("code", [69, 78])
def test_a_worker_that_says_it_can_never_load_ends_the_daemon(broker: Broker, tmp_path: Path, code: int) -> None:
    worker = {"exit_at": "load", "code": code}
    with DaemonProcess(tmp_path / "d", broker.port, worker=worker) as daemon:
        assert daemon.wait() == code
        assert "fake worker refuses to load" in daemon.text()  # the worker names the cause itself
        assert len(daemon.events("worker_spawned")) == 1


@pytest.mark.fault("W14")
def test_a_wrong_engine_folder_ends_the_daemon_at_once_with_one_line(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", 1, config={"model": {"folder": str(tmp_path / "none")}}) as daemon:
        assert daemon.wait() == 78
        (event,) = daemon.events()
        assert "none" in event["error"]
        assert "edge-runtime build" in event["error"]
        assert "Traceback" not in daemon.text()


def test_c70_twenty_restarts_leave_nothing_behind(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port, config=PATIENT) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        assert daemon.process is not None
        supervisor = psutil.Process(daemon.process.pid)

        def restarted(number: int) -> None:
            for pid in daemon.worker_pids():
                os.kill(pid, signal.SIGKILL)
            eventually(lambda: len(daemon.events("worker_ready")) == number + 1, 10, daemon.text)

        for number in range(1, 6):
            restarted(number)
        base_rss, base_fds, base_threads = supervisor.memory_info().rss, supervisor.num_fds(), supervisor.num_threads()
        for number in range(6, 21):
            restarted(number)
        assert supervisor.memory_info().rss <= base_rss * 1.05
        assert supervisor.num_fds() == base_fds
        assert supervisor.num_threads() == base_threads
        assert len(supervisor.children()) == 1
        assert_serves(peer, "after")
