"""One worker process: frames, exits, signals, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge_runtime.supervisor.process import WorkerProcess, worker_environment
from edge_runtime.worker.frames import Finished, FromWorker, Hello, Init, Ready, Stop, Submit
from support.daemon import eventually, is_running

FAKE = Path(__file__).parents[1] / "support" / "fake_worker.py"
ROOT = Path(__file__).parents[2]
INIT = Init(model="tiny", engine="none", heartbeat_s=0.1)


class Peer:
    """Collects what a worker says."""

    def __init__(self) -> None:
        self.frames: list[FromWorker] = []
        self.broken: list[str] = []
        self.news = asyncio.Event()

    async def spawn(self, **options: Any) -> WorkerProcess:
        return await self.run([sys.executable, str(FAKE), json.dumps(options)])

    async def run(self, command: list[str]) -> WorkerProcess:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "EDGE_MQTT_PASSWORD": "s3cr3t", "NOTIFY_SOCKET": "/x"}
        return await WorkerProcess.spawn(
            command, environment=environment, on_frame=self._on_frame, on_broken=self._on_broken
        )

    async def first(self, kind: type[Any]) -> Any:
        await self.until(lambda: any(isinstance(frame, kind) for frame in self.frames))
        return next(frame for frame in self.frames if isinstance(frame, kind))

    async def until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        while not condition():
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), timeout_s)

    def _on_frame(self, frame: FromWorker) -> None:
        self.frames.append(frame)
        self.news.set()

    def _on_broken(self, reason: str) -> None:
        self.broken.append(reason)
        self.news.set()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    asyncio.run(coroutine)
    assert not psutil.Process().children()
    assert len(os.listdir("/proc/self/fd")) <= fds


def test_a_worker_says_hello_loads_answers_and_stops() -> None:
    async def scene() -> None:
        peer = Peer()
        worker = await peer.spawn()
        hello = await peer.first(Hello)
        assert hello.pid == worker.pid
        worker.send(INIT)
        await peer.first(Ready)
        worker.send(Submit(key=1, tenant="default", service_class="standard", prompt="hi", max_tokens=2))
        assert (await peer.first(Finished)).text == "w0 w1 "
        worker.send(Stop())
        assert await worker.exited == 0
        assert peer.broken == []

    run(scene())


def test_the_last_frames_arrive_before_the_exit() -> None:
    async def scene() -> None:
        peer = Peer()
        worker = await peer.spawn()
        worker.send(INIT)
        await peer.first(Ready)
        worker.send(Submit(key=1, tenant="default", service_class="standard", prompt="hi", max_tokens=1))
        worker.send(Stop())
        assert await worker.exited == 0

    run(scene())


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGKILL, -9), (signal.SIGSEGV, -11)])
def test_a_death_is_noticed_at_once(number: int, expected: int) -> None:
    async def scene() -> None:
        peer = Peer()
        worker = await peer.spawn()
        await peer.first(Hello)
        began = time.monotonic()
        os.kill(worker.pid, number)
        assert await worker.exited == expected
        assert time.monotonic() - began < 1.0

    run(scene())


def test_a_stopped_process_heeds_only_the_last_signal() -> None:
    async def scene() -> None:
        peer = Peer()
        worker = await peer.spawn()
        await peer.first(Hello)
        os.kill(worker.pid, signal.SIGSTOP)
        # On its way out the kernel may name the signal that was pending first.
        assert await worker.abort(0.1) in (-signal.SIGKILL, -signal.SIGABRT)
        assert not is_running(worker.pid)

    run(scene())


def test_abort_gives_a_running_process_the_chance_to_write_its_stacks() -> None:
    async def scene() -> None:
        peer = Peer()
        worker = await peer.spawn()
        await peer.first(Hello)
        assert await worker.abort(5.0) == -signal.SIGABRT

    run(scene())


@pytest.mark.fault("W12")
def test_bytes_that_are_no_frame_are_reported_once() -> None:
    async def scene() -> None:
        peer = Peer()
        code = (
            "import os,sys; os.write(int(sys.argv[1]), b'\\xff' * 100); sys.stdin.read(); import time; time.sleep(60)"
        )
        worker = await peer.run([sys.executable, "-c", code])
        await peer.until(lambda: peer.broken)
        worker.silence()
        await worker.kill()
        assert "frame length" in peer.broken[0]

    run(scene())


def test_a_process_that_goes_on_without_its_channel_is_reported() -> None:
    async def scene() -> None:
        peer = Peer()
        worker = await peer.run(
            [sys.executable, "-c", "import os,sys,time; os.close(int(sys.argv[1])); time.sleep(60)"]
        )
        await peer.until(lambda: peer.broken)
        assert peer.broken == ["the worker closed its channel"]
        await worker.kill()

    run(scene())


def test_a_program_that_does_not_exist_is_an_os_error_and_leaves_nothing() -> None:
    async def scene() -> None:
        with pytest.raises(FileNotFoundError):
            await Peer().run(["/no/such/program"])

    run(scene())


def test_secrets_are_kept_from_the_worker(tmp_path: Path) -> None:
    variables = {
        "EDGE_MQTT_PASSWORD": "x",
        "EDGE_MQTT__PASSWORD_FILE": "x",
        "NOTIFY_SOCKET": "x",
        "WATCHDOG_USEC": "1",
        "CREDENTIALS_DIRECTORY": "x",
        "PATH": "/bin",
        "EDGE_ENGINE__THREADS": "2",
    }
    assert set(worker_environment(variables)) == {"PATH", "EDGE_ENGINE__THREADS", "GLIBC_TUNABLES"}

    async def scene() -> None:
        peer = Peer()
        file = tmp_path / "environment"
        code = f"import os,sys; open({str(file)!r}, 'w').write(repr(dict(os.environ)))"
        worker = await peer.run([sys.executable, "-c", code])
        await worker.exited
        assert "s3cr3t" not in file.read_text()
        assert "PYTHONPATH" in file.read_text()

    run(scene())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, "glibc.malloc.hugetlb=1"),
        ("", "glibc.malloc.hugetlb=1"),
        ("glibc.malloc.arena_max=1", "glibc.malloc.arena_max=1:glibc.malloc.hugetlb=1"),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("glibc.malloc.hugetlb=2:glibc.malloc.arena_max=1", "glibc.malloc.hugetlb=2:glibc.malloc.arena_max=1"),
    ],
)
def test_the_worker_gets_huge_pages_unless_something_else_is_chosen(before: str | None, after: str) -> None:
    variables = {"PATH": "/bin"} if before is None else {"PATH": "/bin", "GLIBC_TUNABLES": before}
    assert worker_environment(variables) == {"PATH": "/bin", "GLIBC_TUNABLES": after}
    assert variables.get("GLIBC_TUNABLES") == before


@pytest.mark.fault("W13")
def test_the_worker_does_not_outlive_a_killed_supervisor() -> None:
    code = f"""
import asyncio, os, sys
from edge_runtime.supervisor.process import WorkerProcess
async def main():
    seen = asyncio.Event()
    worker = await WorkerProcess.spawn([sys.executable, {str(FAKE)!r}], environment=os.environ,
                                       on_frame=lambda frame: seen.set(), on_broken=print)
    await seen.wait()
    print(worker.pid, flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        assert is_running(pid)
        supervisor.kill()
    eventually(lambda: not is_running(pid), 1.0)
