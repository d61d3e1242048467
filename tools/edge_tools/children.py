"""Run a child process for as long as a block lasts, and be sure that it is gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running_child(command: Sequence[str], log: Path, *, grace_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Start `command` with its output in `log`; in the end SIGTERM, then SIGKILL after `grace_s` seconds.

    The child has a session of its own, so Ctrl-C reaches only this process, which stops its children in order. A second
    Ctrl-C skips the grace.
    """
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield child
    finally:
        _stop(child, grace_s)


def last_line(log: Path) -> str:
    """Return the last line that a child wrote, for an error message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), "it wrote nothing")


def _stop(child: subprocess.Popen[bytes], grace_s: float) -> None:
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)  # the child leads its group: its own children go with it
            child.wait()
