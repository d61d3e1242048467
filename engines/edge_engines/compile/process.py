"""Run the compiler process: relay its progress, return its answer, leave nothing of it behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

import msgspec

from edge_engines.compile.frames import (
    Advanced,
    Compiled,
    Event,
    Failed,
    Noted,
    Probed,
    Request,
    StepBegun,
    as_error,
    decode_event,
    encode,
)
from edge_engines.progress import Progress
from edge_runtime.errors import BuildError

COMPILER = (sys.executable, "-m", "edge_engines.compile.child")
SILENCE_S = 30.0  # after which a line says that work goes on: a silent builder looks hung

Lines = queue.SimpleQueue[bytes]


def ask_compiler(
    request: Request, progress: Progress, *, command: Sequence[str] = COMPILER, silence_s: float = SILENCE_S
) -> Probed | Compiled:
    """Return the compiler's answer to `request`, its progress having gone to `progress`.

    Raises what the compiler failed with, and BuildError when it dies (case C27). Whatever interrupts the wait, Ctrl-C
    among it, kills the compiler.
    """
    with tempfile.TemporaryFile() as complaints, _running(command, complaints) as child:
        lines = _send_and_read(child, request)
        started = time.monotonic()
        while True:
            try:
                line = lines.get(timeout=silence_s)
            except queue.Empty:
                progress.note(f"still compiling, {time.monotonic() - started:.0f} s so far")
                continue
            event = _read(line, child, complaints)
            if isinstance(event, Failed):
                raise as_error(event)
            if isinstance(event, Probed | Compiled):
                return event
            _relay(event, progress)


@contextmanager
def _running(command: Sequence[str], complaints: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Run the compiler as leader of its own group, so that Ctrl-C reaches only us and we end it."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}  # an uninstalled checkout works too
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, env=env, start_new_session=True
    ) as child:
        try:
            yield child
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)


def _send_and_read(child: subprocess.Popen[bytes], request: Request) -> Lines:
    """Send the request and return its events as they come; an empty line marks the end.

    The pipe to the compiler stays open: it ends itself when the pipe closes.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(BrokenPipeError):  # it died at once: reading finds out how
        os.write(child.stdin.fileno(), encode(request))  # past the buffer, whose closing would fail again
    lines: Lines = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(child.stdout, lines), daemon=True).start()
    return lines


def _read_lines(stream: IO[bytes], lines: Lines) -> None:
    for line in stream:
        lines.put(line)
    lines.put(b"")


def _read(line: bytes, child: subprocess.Popen[bytes], complaints: IO[bytes]) -> Event:
    if not line:
        raise _death(child, complaints)
    try:
        return decode_event(line)
    except msgspec.MsgspecError as error:
        raise BuildError(
            f"the compiler process said something unexpected: {line[:100]!r}", remedy="nothing was written"
        ) from error


def _relay(event: StepBegun | Advanced | Noted, progress: Progress) -> None:
    if isinstance(event, StepBegun):
        progress.step(event.name, event.total)
    elif isinstance(event, Advanced):
        progress.advance(event.n)
    else:
        progress.note(event.text)


def _death(child: subprocess.Popen[bytes], complaints: IO[bytes]) -> BuildError:
    """Say how the compiler ended without an answer."""
    status = child.wait()
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").strip().splitlines()
    last = f": {lines[-1]}" if lines else ""
    if status == -signal.SIGKILL:
        return BuildError(
            f"the compiler process was killed, most likely for memory{last}",
            remedy="nothing was written; stop other programs or build on a machine with more memory",
        )
    how = f"signal {-status}" if status < 0 else f"exit {status}"
    return BuildError(f"the compiler process died ({how}){last}", remedy="nothing was written")
