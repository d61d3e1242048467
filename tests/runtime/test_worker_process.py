"""The worker as a process: start, heartbeat, faults, end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge_runtime.backends.scripted import scripted_manifest
from edge_runtime.manifest import digest_file, write_manifest
from edge_runtime.worker.frames import (
    FRAME_PROTOCOL,
    Cancel,
    Failed,
    Finished,
    FrameError,
    Heartbeat,
    Hello,
    Init,
    Progress,
    Ready,
    Stop,
    Tokens,
)
from edge_runtime.worker.heartbeat import HeartbeatThread, Pulse
from edge_runtime.worker.link import Link
from support.fault_hooks import SPLIT_TEXT
from support.scripted_engine import solo_answer
from support.tiny_engines import build_tiny
from support.worker_peer import FAULTY_WORKER, PATIENCE_S, Peer, WorkerProcess, worker_process

REAL = [sys.executable, "-m", "edge_runtime.worker.main"]
BEAT: dict[str, Any] = {"heartbeat_s": 0.05}
PROMPT = "abc"


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def has_key(key: int) -> Callable[[Any], bool]:
    return lambda frame: bool(frame.key == key)


def stderr_of(worker: WorkerProcess) -> str:
    """Wait for the end of the process and return what it wrote."""
    assert worker.process.stderr is not None
    text = worker.process.stderr.read()
    worker.process.wait(PATIENCE_S)
    return text


# ---- start


def test_a_worker_says_hello_loads_warms_up_and_is_ready() -> None:
    with worker_process() as worker:
        hello = worker.wait_for(Hello)
        assert (hello.pid, hello.protocol) == (worker.process.pid, FRAME_PROTOCOL)
        ready = worker.start(**BEAT)
        assert (ready.slots, ready.capacity, ready.max_prompt) == (2, 512, 511)
        assert ready.backend["name"] == "scripted"
        assert set(ready.start_seconds) == {"read", "load", "warm-up"}
        phases = [frame.phase for frame in worker.frames if isinstance(frame, Progress)]
        assert phases == ["load", "warm-up"]
        key = worker.submit(PROMPT, max_tokens=20)
        done = worker.wait_for(Finished)
        assert (done.key, done.text) == (key, solo_answer(PROMPT, 20))


def test_batch_1_is_honoured() -> None:
    with worker_process() as worker:
        assert worker.start(max_batch=1, **BEAT).slots == 1
        keys = worker.submit(PROMPT, max_tokens=20), worker.submit("other", max_tokens=20)
        ends = [worker.wait_for(Finished, has_key(key)) for key in keys]
        assert [end.text for end in ends] == [solo_answer(PROMPT, 20), solo_answer("other", 20)]
        beat = worker.wait_for(Heartbeat, lambda beat: beat.step_count >= 40)
        assert beat.rows_busy <= 1


def test_a_worker_protects_its_supervisor_from_memory_pressure_and_signals() -> None:
    with worker_process({"hook": "slow", "ms": 2}) as worker:
        worker.start(**BEAT)
        assert Path(f"/proc/{worker.process.pid}/oom_score_adj").read_text().strip() == "500"
        worker.submit(PROMPT, max_tokens=50)
        worker.process.send_signal(signal.SIGTERM)
        worker.process.send_signal(signal.SIGINT)
        assert worker.wait_for(Finished).text == solo_answer(PROMPT, 50)


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [(Stop(), "first frame must be init"), (Init(protocol=99, model="m", engine=""), "protocol 99")],
)
def test_a_wrong_first_frame_is_internal(frame: Any, complaint: str) -> None:
    with worker_process() as worker:
        worker.send(frame)
        assert complaint in stderr_of(worker)
        assert worker.exit_status() == 70


# ---- the real worker and engine folders that it refuses


@pytest.mark.parametrize("made", ["nothing", "no files", "no tokenizer"])
def test_a_refused_engine_ends_with_78_and_one_line(tmp_path: Path, made: str) -> None:
    folder = tmp_path / "engine"
    if made != "nothing":
        folder.mkdir()
    if made == "no tokenizer":
        (folder / "engine.json").write_text("{}")
    with worker_process(command=REAL) as worker:
        worker.send(Init(model="m", engine=str(folder), **BEAT))
        lines = stderr_of(worker).splitlines()
        assert worker.exit_status() == 78
    assert len(lines) == 1
    assert str(folder) in lines[0]
    assert not [frame for frame in worker.frames if isinstance(frame, Ready)]


def test_a_target_that_is_not_served_ends_with_78(tmp_path: Path) -> None:
    import msgspec

    write_manifest(tmp_path, msgspec.structs.replace(scripted_manifest(), target="tensorrt-rtx"))
    with worker_process(command=REAL) as worker:
        worker.send(Init(model="m", engine=str(tmp_path), **BEAT))
        assert "tensorrt-rtx" in stderr_of(worker)
        assert worker.exit_status() == 78


def test_a_built_engine_without_a_tokenizer_is_served_and_says_so(tmp_path: Path) -> None:
    folder = build_tiny("llama-tied", tmp_path / "engine", capacity=32)
    with worker_process(command=REAL) as worker:
        worker.send(Init(model="m", engine=str(folder), threads=1, **BEAT))
        ready = worker.wait_for(Ready)
        assert (ready.slots, ready.capacity, ready.engine_sha256) == (2, 32, digest_file(folder / "engine.json"))
        assert [frame.percent for frame in worker.frames if isinstance(frame, Progress)][-3:] == [100.0, 0.0, 0.0]
        worker.submit(PROMPT)
        assert worker.wait_for(Failed).code == "invalid_request"
        worker.send(Stop())
        assert worker.exit_status() == 0


# ---- end


@pytest.mark.parametrize("state", ["loading", "idle", "in decode"])
def test_c71_a_stop_ends_with_0_in_every_state(state: str) -> None:
    hooks = [{"hook": "slow", "ms": 300, "at": {"phase": "load"}}, {"hook": "slow", "ms": 10}]
    with worker_process(*hooks) as worker:
        worker.send(Init(model="m", engine="", **BEAT))
        if state != "loading":
            worker.wait_for(Ready)
        if state == "in decode":
            worker.submit(PROMPT, max_tokens=500, stream=True)
            worker.wait_for(Tokens)
        worker.send(Stop())
        assert worker.exit_status() == 0
        worker.read()
        if state == "in decode":
            done = worker.wait_for(Finished)
            assert done.reason == "cancelled"
            assert done.text == solo_answer(PROMPT, done.completion_tokens)
        assert stderr_of(worker) == ""


@pytest.mark.parametrize("state", ["before init", "idle", "in decode"])
def test_a_worker_ends_when_its_socket_does(state: str) -> None:
    with worker_process({"hook": "slow", "ms": 5}) as worker:
        worker.wait_for(Hello)
        if state != "before init":
            worker.start(**BEAT)
        if state == "in decode":
            worker.submit(PROMPT, max_tokens=500, stream=True)
            worker.wait_for(Tokens)
        worker.sock.close()
        assert worker.exit_status() == 0


@pytest.mark.fault("W13")
def test_a_worker_dies_with_its_supervisor_even_when_it_hangs() -> None:
    """The supervisor here is a small process that spawns a worker, hands out its pid and waits to be killed."""
    supervisor = f"""
import socket, subprocess, sys, time
sys.path[:0] = {[str(FAULTY_WORKER.parent), str(FAULTY_WORKER.parents[1])]!r}
from support.worker_peer import worker_process
from edge_runtime.worker.frames import Init, Heartbeat
with worker_process({{"hook": "hang", "holds_gil": True}}) as worker:
    worker.start(heartbeat_s=0.05)
    worker.submit("abc")
    print(worker.process.pid, flush=True)
    time.sleep(1000)
"""
    with subprocess.Popen([sys.executable, "-c", supervisor], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        assert worker.is_running()
        process.kill()
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


# ---- heartbeat


def test_beats_tell_the_phase_while_the_engine_loads() -> None:
    with worker_process({"hook": "slow", "ms": 300, "at": {"phase": "load"}}) as worker:
        worker.start(**BEAT)
        beats = [frame for frame in worker.frames if isinstance(frame, Heartbeat)]
        assert len(beats) >= 3
        assert {beat.phase for beat in beats} <= {"loading", "warming"}
        assert [beat.seq for beat in beats] == list(range(len(beats)))
        assert all(beat.rss_bytes > 1e6 for beat in beats)
        worker.wait_for(Heartbeat, lambda beat: beat.phase == "serving")


def test_beats_go_on_while_nobody_asks_anything() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = Peer(ours)
        with HeartbeatThread(Link(theirs), Pulse(time.monotonic), 0.02):
            peer.wait_for(Heartbeat, lambda beat: beat.seq == 5)
        assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.fault("W3")
def test_a_hanging_step_shows_in_the_beats() -> None:
    with worker_process({"hook": "hang", "at": {"step": 4}}) as worker:
        worker.start(**BEAT)
        worker.submit(PROMPT, max_tokens=20)
        beat = worker.wait_for(Heartbeat, lambda beat: beat.step_age_s > 0.1)
        assert (beat.step_count, beat.rows_busy) == (3, 1)


# ---- fault hooks: each is proven to happen


@pytest.mark.parametrize(
    ("hook", "status"),
    [
        ({"hook": "exit", "code": 3}, 3),
        ({"hook": "exit", "code": 4, "at": {"phase": "load"}}, 4),
        ({"hook": "exit", "code": 5, "at": {"phase": "warm"}}, 5),
        ({"hook": "exit", "code": 6, "at": {"phase": "idle"}}, 6),
        ({"hook": "kill"}, -signal.SIGKILL),
        ({"hook": "kill", "signal": int(signal.SIGABRT)}, -signal.SIGABRT),
        ({"hook": "refuse_load"}, 78),
        ({"hook": "no_gpu"}, 69),
        ({"hook": "oom"}, 70),
    ],
)
def test_a_hook_ends_the_process_as_it_says(hook: dict[str, Any], status: int) -> None:
    with worker_process(hook) as worker:
        worker.send(Init(model="m", engine="", **BEAT))
        if hook.get("at", {}).get("phase", "step") == "step" and hook["hook"] not in ("refuse_load", "no_gpu"):
            worker.wait_for(Ready)
            worker.submit(PROMPT)
        assert worker.exit_status() == status


def test_a_poison_prompt_kills_only_when_it_runs() -> None:
    with worker_process({"hook": "kill", "at": {"request": "poison"}}) as worker:
        worker.start(**BEAT)
        worker.submit(PROMPT, max_tokens=5)
        worker.wait_for(Finished)
        worker.submit("some poison here", max_tokens=5)
        assert worker.exit_status() == -signal.SIGKILL


def test_a_hook_with_a_marker_acts_in_one_process_only(tmp_path: Path) -> None:
    hook = {"hook": "exit", "code": 3, "once": str(tmp_path / "marker")}
    with worker_process(hook) as worker:
        worker.start(**BEAT)
        worker.submit(PROMPT)
        assert worker.exit_status() == 3
    with worker_process(hook) as worker:
        worker.start(**BEAT)
        worker.submit(PROMPT, max_tokens=5)
        worker.wait_for(Finished)


@pytest.mark.fault("W10")
def test_nan_in_one_row_leaves_the_neighbour_as_it_is_alone() -> None:
    with worker_process({"hook": "nan", "row": 1, "at": {"step": 9}}, {"hook": "slow", "ms": 5}) as worker:
        worker.start(**BEAT)
        good, bad = worker.submit(PROMPT, max_tokens=30), worker.submit("other", max_tokens=30)
        assert worker.wait_for(Failed).code == "numeric_error"
        done = worker.wait_for(Finished)
        assert (done.key, done.text) == (good, solo_answer(PROMPT, 30))
        assert worker.terminal(bad) is not None
        worker.wait_for(Heartbeat, lambda beat: beat.nan_count == 1)


@pytest.mark.fault("W12")
@pytest.mark.parametrize("frame", ["bad_length", "unknown_type", "truncated"])
def test_garbage_is_a_protocol_error_for_the_reader(frame: str) -> None:
    with worker_process({"hook": "garbage", "frame": frame}) as worker:
        worker.start(**BEAT)
        worker.submit(PROMPT)
        with pytest.raises(FrameError):
            worker.wait_for(Finished)


@pytest.mark.fault("R8")
def test_split_code_points_come_out_whole() -> None:
    with worker_process({"hook": "split_utf8"}) as worker:
        worker.start(**BEAT)
        key = worker.submit(PROMPT, max_tokens=30, stream=True, chunk_tokens=1)
        done = worker.wait_for(Finished)
        assert worker.streamed(key) == done.text
        assert done.text == (SPLIT_TEXT * 4)[:30].decode(errors="replace")
        assert all("\ufffd" not in chunk.text for chunk in worker.chunks(key)[:-1])


@pytest.mark.fault("W4")
def test_muted_beats_are_missing_and_the_next_ones_come() -> None:
    with worker_process({"hook": "mute", "beats": 3, "at": {"phase": "idle"}}) as worker:
        worker.start(**BEAT)
        last = worker.wait_for(Heartbeat, lambda beat: beat.phase == "serving" and beat.seq > 8)
        seqs = [frame.seq for frame in worker.frames if isinstance(frame, Heartbeat) and frame.seq <= last.seq]
        assert last.seq + 1 - len(seqs) == 3


@pytest.mark.fault("W3")
def test_frozen_steps_stand_still_while_beats_go_on() -> None:
    with worker_process({"hook": "freeze_steps", "at": {"step": 3}}) as worker:
        worker.start(**BEAT)
        worker.submit(PROMPT, max_tokens=20)
        worker.wait_for(Finished)
        beat = worker.wait_for(Heartbeat, lambda beat: beat.step_age_s > 0.1)
        assert beat.rows_busy == 1
        later = worker.wait_for(Heartbeat, lambda other: other.seq > beat.seq)
        assert later.step_count == beat.step_count


def test_a_cancel_reaches_a_slow_worker_between_two_steps() -> None:
    with worker_process({"hook": "slow", "ms": 20}) as worker:
        worker.start(**BEAT)
        key = worker.submit(PROMPT, max_tokens=400, stream=True)
        worker.wait_for(Tokens)
        worker.send(Cancel(key))
        done = worker.wait_for(Finished)
        assert (done.reason, done.text) == ("cancelled", solo_answer(PROMPT, done.completion_tokens))


def test_nothing_of_a_worker_is_left_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with worker_process() as worker:
        worker.start(**BEAT)
        worker.send(Stop())
        assert worker.exit_status() == 0
    assert set(os.listdir("/proc/self/fd")) == before
