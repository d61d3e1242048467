"""Keep one worker running: start it, watch it, end it when it is stuck, start it again after a pause."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from random import Random
from typing import Any, Literal, Protocol

from edge_runtime.config import WorkerConfig
from edge_runtime.supervisor.health import BeatWatch, RestartPolicy, Verdict
from edge_runtime.supervisor.process import WorkerProcess
from edge_runtime.worker.frames import FromWorker, Heartbeat, Hello, Init, Progress, Ready, Stop, ToWorker

HELLO_S = 10.0
EX_UNAVAILABLE, EX_SOFTWARE, EX_CONFIG = 69, 70, 78
HOPELESS = frozenset({EX_UNAVAILABLE, EX_CONFIG})  # no device; engine or configuration refused
TICK_S = 0.1


class KeeperEvents(Protocol):
    """What the daemon is told, always on the event loop."""

    def on_worker_spawned(self, pid: int) -> None:
        """Note a new process; it loads now."""
        ...

    def on_worker_progress(self, progress: Progress) -> None:
        """Note how far loading is."""
        ...

    def on_worker_ready(self, ready: Ready) -> None:
        """Begin to send it requests."""
        ...

    def on_worker_frame(self, frame: FromWorker) -> None:
        """Take a frame about a request."""
        ...

    def on_worker_down(self, reason: str, verdict: Verdict) -> None:
        """Settle its requests at once: nothing more comes from it."""
        ...


class Keeper:
    """Owns the worker process. `run` is a task of the event loop in the main thread."""

    def __init__(
        self,
        config: WorkerConfig,
        command: Sequence[str],
        init: Init,
        events: KeeperEvents,
        rng: Random,
    ) -> None:
        self._config = config
        self._command = command
        self._init = init
        self._events = events
        self._policy = RestartPolicy(config.restart, rng)
        self._process: WorkerProcess | None = None
        self._phase: Literal["spawned", "loading", "serving"] = "spawned"
        self._phase_since = 0.0
        self._trouble: asyncio.Future[str] | None = None
        self._watch: BeatWatch | None = None
        self._has_served = False
        self._is_stopping = False

    @property
    def num_restarts(self) -> int:
        """Worker deaths so far."""
        return self._policy.num_restarts

    @property
    def watch(self) -> BeatWatch | None:
        """Heartbeats of the worker that serves; None while there is none."""
        return self._watch if self._phase == "serving" else None

    def send(self, message: ToWorker) -> None:
        """Send one frame to the worker."""
        if self._process is not None:
            self._process.send(message)

    async def run(self) -> int:
        """Keep a worker running; return an exit status only when that has become pointless."""
        while True:
            reason, status = await self._run_one()
            if self._is_stopping:
                return 0
            is_hopeless = status in HOPELESS
            if is_hopeless and not self._has_served and status is not None:
                return status
            verdict = self._policy.died(time.monotonic(), is_hopeless=is_hopeless)
            self._events.on_worker_down(reason, verdict)
            await self._reap()
            if verdict.gives_up:
                return EX_SOFTWARE
            await asyncio.sleep(verdict.delay_s)

    async def stop(self, grace_s: float) -> None:
        """Ask the worker to end, and end it after `grace_s`, or at once while it is loading and does not listen."""
        self._is_stopping = True
        if self._process is None:
            return
        if self._phase == "serving" and grace_s > 0:
            self._process.send(Stop(0.0))
            await self._process.wait(grace_s)
        await self._process.kill()

    async def _run_one(self) -> tuple[str, int | None]:
        """Run one worker until it ends or must be ended; return why, and its exit status if it ended by itself."""
        self._trouble = asyncio.get_running_loop().create_future()
        self._enter("spawned")
        try:
            self._process = await WorkerProcess.spawn(
                self._command, environment=os.environ, on_frame=self._take, on_broken=self._note_broken
            )
        except OSError as error:
            return f"spawn: {error}", None
        self._events.on_worker_spawned(self._process.pid)
        reason = await self._watch_one(self._process)
        if reason is not None:
            self._process.silence()
            return reason, None
        code = self._process.exited.result()
        return (f"exit{code}", code) if code >= 0 else (f"signal{-code}", None)

    async def _watch_one(self, process: WorkerProcess) -> str | None:
        """Wait until the worker has ended by itself (None) or has to be ended (why)."""
        assert self._trouble is not None
        tick_s = min(TICK_S, self._config.heartbeat.interval_s / 4)
        events: set[asyncio.Future[Any]] = {process.exited, self._trouble}
        while not process.exited.done():
            await asyncio.wait(events, timeout=tick_s, return_when=asyncio.FIRST_COMPLETED)
            if self._trouble.done():
                return self._trouble.result()
            if not process.exited.done() and (reason := self._judge(time.monotonic())) and not self._is_stopping:
                return reason
        return None

    async def _reap(self) -> None:
        if self._process is not None:
            if not self._process.exited.done():
                await self._process.abort(self._config.heartbeat.abort_grace_s)
            self._process = None

    def _judge(self, now: float) -> str | None:
        age = now - self._phase_since
        if self._phase == "spawned":
            return "hello" if age > min(HELLO_S, self._config.load_s) else None
        if self._phase == "loading":
            return "load" if age > self._config.load_s else None
        assert self._watch is not None
        self._watch.judge(now)
        return "heartbeat" if self._watch.is_lost else None

    def _take(self, frame: FromWorker) -> None:
        if isinstance(frame, Hello):
            self._greet(frame)
        elif isinstance(frame, Progress):
            self._events.on_worker_progress(frame)
        elif isinstance(frame, Ready):
            self._has_served = True
            self._watch = BeatWatch(self._config.heartbeat, time.monotonic())
            self._enter("serving")
            self._policy.ready(time.monotonic())
            self._events.on_worker_ready(frame)
        elif isinstance(frame, Heartbeat):
            if self._phase == "serving" and self._watch is not None:
                self._watch.beat(frame, time.monotonic())
        else:
            self._events.on_worker_frame(frame)

    def _greet(self, hello: Hello) -> None:
        if hello.protocol != self._init.protocol:
            self._note_broken(f"worker speaks protocol {hello.protocol}, supervisor {self._init.protocol}")
            return
        self._enter("loading")
        self.send(self._init)

    def _note_broken(self, reason: str) -> None:
        if self._trouble is not None and not self._trouble.done():
            self._trouble.set_result(f"protocol: {reason}")

    def _enter(self, phase: Literal["spawned", "loading", "serving"]) -> None:
        self._phase = phase
        self._phase_since = time.monotonic()
