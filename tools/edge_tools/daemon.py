"""Run the daemon as a child process, for the demo and the bench, and know when it serves."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_runtime import EdgeError
from edge_runtime.client import Client
from edge_runtime.errors import BackendError
from edge_tools.children import last_line, running_child

DEVICE = "demo"
READY_S = 120.0
POLL_S = 0.02
STOP_S = 15.0  # nothing runs by then: the daemon only says goodbye to the broker


@dataclass(frozen=True, slots=True)
class Served:
    """A device that is ready. `log` is what the daemon wrote, one JSON object per line."""

    client: Client
    log: Path


@contextmanager
def served(engine: Path, port: int, folder: Path) -> Iterator[Served]:
    """Serve `engine` at the broker on this port of 127.0.0.1, and yield once it is ready; stop it in the end.

    The log lies in `folder`. Raises BackendError when the daemon ends early or does not become ready in time.
    """
    log = folder / "daemon.log"
    command = [sys.executable, "-m", "edge_tools", "serve", "--engine", str(engine)]
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", DEVICE]
    with (
        running_child([*command, *options], log, grace_s=STOP_S) as daemon,
        Client(port=port, device=DEVICE) as client,
    ):
        _wait_until_ready(client, daemon, log)
        yield Served(client, log)


def _wait_until_ready(client: Client, daemon: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if daemon.poll() is not None:
            raise BackendError(f"the daemon exited with {daemon.returncode}: {last_line(log)}", remedy=f"see {log}")
        try:
            if client.status().ready:  # waits up to 2 s for the first status
                return
        except EdgeError:
            continue  # nothing published yet
        time.sleep(POLL_S)
    raise BackendError(f"the daemon was not ready within {READY_S:.0f} s: {last_line(log)}", remedy=f"see {log}")
