"""Play the supervisor to a worker: send it frames, collect what it answers."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from edge_runtime.backends import Backend
from edge_runtime.backends.scripted import Script, ScriptedBackend
from edge_runtime.session.session import Session
from edge_runtime.worker.frames import (
    Failed,
    Finished,
    FrameReader,
    FromWorker,
    Init,
    Ready,
    Submit,
    Tokens,
    ToWorker,
    encode_frame,
)
from edge_runtime.worker.heartbeat import Pulse
from edge_runtime.worker.link import Link
from edge_runtime.worker.loop import WorkerLoop
from support.scripted_engine import BABBLE, byte_codec, byte_manifest

FAULTY_WORKER = Path(__file__).resolve().parents[1] / "faulty_worker.py"
PATIENCE_S = 20.0  # a started interpreter on a busy machine; only a failing test waits this long


class Peer:
    """The supervisor's end of a socket pair, and every frame that has come out of it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._has_mail = False
        self.frames: list[FromWorker] = []
        self._reader = FrameReader(FromWorker)
        self._next_key = 1

    def send(self, *messages: ToWorker) -> None:
        self.sock.sendall(b"".join(map(encode_frame, messages)))

    def submit(self, prompt: str | None = None, **options: Any) -> int:
        """Send a request and return its key."""
        key = self._next_key
        self._next_key += 1
        self.send(Submit(key=key, tenant="acme", service_class="standard", prompt=prompt, **options))
        return key

    def read(self, timeout_s: float = 0.0) -> bool:
        """Take in what has come; False at the end of the stream."""
        while select.select([self.sock], [], [], timeout_s)[0]:
            data = self.sock.recv(1 << 16)
            if not data:
                return False
            self.frames += self._reader.feed(data)
            timeout_s = 0.0
        return True

    def wait_for(self, kind: type, is_it: Callable[[Any], bool] = lambda frame: True) -> Any:
        """Return the first frame of this kind that fits, which may have come already."""
        end = time.monotonic() + PATIENCE_S
        seen = 0
        while time.monotonic() < end:
            is_open = self.read(0.2)
            for frame in self.frames[seen:]:
                if isinstance(frame, kind) and is_it(frame):
                    return frame
            seen = len(self.frames)
            assert is_open, f"the worker closed its end before a {kind.__name__}; it sent {self.frames}"
        raise AssertionError(f"no {kind.__name__} within {PATIENCE_S} s; got {self.frames}")

    def terminal(self, key: int) -> Finished | Failed | None:
        """Return the terminal frame of a request, if it has come; two of them are a failure."""
        found = [frame for frame in self.frames if isinstance(frame, (Finished, Failed)) and frame.key == key]
        assert len(found) <= 1, f"two terminal frames: {found}"
        return found[0] if found else None

    def chunks(self, key: int) -> list[Tokens]:
        return [frame for frame in self.frames if isinstance(frame, Tokens) and frame.key == key]

    def streamed(self, key: int) -> str:
        return "".join(chunk.text for chunk in self.chunks(key))


class Clock:
    """A clock that stands still unless it is told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Desk(Peer):
    """A peer and a worker loop in one thread: nothing happens but by `turn`, so every interleaving can be played."""

    def __init__(
        self,
        script: Script = BABBLE,
        *,
        backend: Backend | None = None,
        capacity: int = 512,
        chunk: int = 64,
        slots: int = 2,
        has_text: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(ours)
        manifest = byte_manifest(capacity=capacity, has_text=has_text)
        self.session = Session(backend or ScriptedBackend(manifest, script))
        self.pulse = Pulse(clock)
        self.link = Link(theirs)
        codec = byte_codec() if has_text else None
        self.log = structlog.testing.CapturingLogger()
        log = structlog.wrap_logger(self.log, processors=[])
        self.loop = WorkerLoop(self.link, self.session, codec, self.pulse, log, slots=slots, chunk=chunk, clock=clock)

    def send(self, *messages: ToWorker) -> None:
        super().send(*messages)
        self._has_mail = True

    def turn(self, times: int = 1) -> None:
        """Let the loop do rounds, as long as it has something to do: idle, it would wait for ever."""
        for _ in range(times):
            if self._has_mail or not all(map(self.terminal, range(1, self._next_key))):
                self._has_mail = False
                self.loop.turn()
                self.read()

    def finish(self, *keys: int, turns: int = 20_000) -> list[Any]:
        """Turn until these requests have ended and return their terminal frames."""
        for _ in range(turns):
            if all(self.terminal(key) for key in keys):
                return [self.terminal(key) for key in keys]
            self.turn()
        raise AssertionError(f"requests {keys} did not end within {turns} turns")

    def answer(self, prompt: str | None = None, **options: Any) -> Any:
        """Run one request to its end and return its terminal frame."""
        return self.finish(self.submit(prompt, **options))[0]

    def close(self) -> None:
        self.link.close()
        self.sock.close()


class WorkerProcess(Peer):
    """A peer and a worker in a process of its own."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[str]) -> None:
        super().__init__(sock)
        self.process = process

    def start(self, **init: Any) -> Ready:
        """Send `init` and wait until it is ready."""
        self.send(Init(model="scripted", engine="", **init))
        ready: Ready = self.wait_for(Ready)
        return ready

    def exit_status(self) -> int:
        """Wait for its end; a signal n gives -n."""
        return self.process.wait(PATIENCE_S)


@contextmanager
def worker_process(*hooks: dict[str, Any], command: Sequence[str] = ()) -> Iterator[WorkerProcess]:
    """Run a worker, by default the double with these hooks, and end it with the block."""
    command = command or [sys.executable, str(FAULTY_WORKER), json.dumps(hooks)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
        )
        theirs.close()
        try:
            yield WorkerProcess(ours, process)
        finally:
            process.kill()
            process.communicate()
