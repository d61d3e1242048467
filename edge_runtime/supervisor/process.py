"""Run one worker process: spawn it, exchange frames, notice its end, end it. Decides nothing.

Only the main thread may spawn: the worker asks the kernel to be killed when the thread that spawned it ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from edge_runtime.worker.frames import FrameError, FrameReader, FromWorker, ToWorker, encode_frame

SECRETS = ("EDGE_MQTT", "NOTIFY_SOCKET", "WATCHDOG_", "CREDENTIALS_DIRECTORY")  # prefixes of variables kept from it
# malloc asks for transparent huge pages: 5 to 7 % faster decode of a 135M FP32 engine on two cores, +0.5 s to load it.
TUNABLES, HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"
LAST_WORDS_S = 0.5  # for frames that are still in the socket when the process has ended


class WorkerProcess:
    """One worker. Made by `spawn` inside a running event loop.

    `on_frame` gets each frame, `on_broken` one line when the worker breaks the protocol or closes its channel. `exited`
    resolves with the return code (negative: a signal) after the last frame.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        on_frame: Callable[[FromWorker], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._on_frame = on_frame
        self._on_broken = on_broken
        self._transport: asyncio.Transport | None = None
        self._channel_closed = self._loop.create_future()
        self._pidfd = os.pidfd_open(process.pid)
        self._loop.add_reader(self._pidfd, self._note_exit)
        self.exited: asyncio.Future[int] = self._loop.create_future()

    @classmethod
    async def spawn(
        cls,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        on_frame: Callable[[FromWorker], None],
        on_broken: Callable[[str], None],
    ) -> WorkerProcess:
        """Start `command` with the number of its end of the channel as last argument. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                env=worker_environment(environment),
                start_new_session=True,  # Ctrl-C is for the supervisor: it drains first
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        worker = cls(process, on_frame, on_broken)
        try:
            await worker._loop.create_connection(lambda: _Channel(worker), sock=ours)
        except asyncio.CancelledError:
            worker._signal(signal.SIGKILL)
            raise
        return worker

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Queue one frame; to a worker that has gone it is dropped."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))

    def silence(self) -> None:
        """Ignore what still comes from a worker that has been given up."""
        self._on_frame = self._on_broken = _ignore

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; False when it still lives."""
        await asyncio.wait({self.exited}, timeout=timeout_s)
        return self.exited.done()

    async def abort(self, grace_s: float) -> int:
        """End it with SIGABRT, for the stacks, then after `grace_s` with SIGKILL: a stopped process heeds only that."""
        self._signal(signal.SIGABRT)
        await self.wait(grace_s)
        return await self.kill()

    async def kill(self) -> int:
        """End it at once and return its return code. Idempotent."""
        self._signal(signal.SIGKILL)
        return await self.exited

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _note_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        status = self._process.wait()  # the pidfd says that it has ended: this reaps it and does not wait
        self._loop.create_task(self._resolve(status))

    async def _resolve(self, status: int) -> None:
        await asyncio.wait({self._channel_closed}, timeout=LAST_WORDS_S)
        if self._transport is not None:
            self._transport.abort()
        if not self.exited.done():
            self.exited.set_result(status)

    # ---- called by the channel

    def channel_opened(self, transport: asyncio.Transport) -> None:
        """Keep the channel."""
        self._transport = transport

    def frame_received(self, frame: FromWorker) -> None:
        """Pass one frame on."""
        self._on_frame(frame)

    def channel_broken(self, reason: str) -> None:
        """Pass the fault on; nothing more is read."""
        if self._transport is not None:
            self._transport.abort()
        self._on_broken(reason)

    def channel_closed(self) -> None:
        """Note the end of the frames; a process that goes on without a channel is of no use."""
        if not self._channel_closed.done():
            self._channel_closed.set_result(None)
        self._loop.call_later(LAST_WORDS_S, self._check_exit)

    def _check_exit(self) -> None:
        if self._process.returncode is None:
            self._on_broken("the worker closed its channel")


class _Channel(asyncio.Protocol):
    """Bytes of the channel to frames."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self._reader = FrameReader(FromWorker)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._worker.channel_opened(transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self._worker.frame_received(frame)
        except FrameError as error:
            self._worker.channel_broken(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.channel_closed()


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what a worker gets of these variables: no secrets, and huge pages for its large blocks.

    A choice of huge pages that is already in GLIBC_TUNABLES stays as it is.
    """
    kept = {name: value for name, value in environment.items() if not name.startswith(SECRETS)}
    tunables = kept.get(TUNABLES, "")
    if HUGE_PAGES not in tunables:
        kept[TUNABLES] = ":".join(filter(None, (tunables, f"{HUGE_PAGES}=1")))
    return kept


def _ignore(_: object) -> None:
    return
