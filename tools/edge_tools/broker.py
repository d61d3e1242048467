"""Run an MQTT broker of our own for the demo: mosquitto when the machine has it, else the pip-installable iotcore.

It listens on 127.0.0.1 on a free port, keeps nothing but its log, and never touches a system service.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from edge_runtime.errors import UsageError
from edge_tools.children import last_line, running_child

START_S = 10.0
STOP_S = 5.0
SYSTEM_FOLDERS = "/usr/sbin:/usr/local/sbin"  # Debian keeps mosquitto there, outside an ordinary user's PATH
MAX_PACKET = 300_000  # the largest request (256 KiB) with its topic and properties


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker that accepts connections on 127.0.0.1."""

    name: str
    port: int


@contextmanager
def running_broker(folder: Path, program: str | None = None) -> Iterator[Broker]:
    """Run a broker that keeps its files in `folder`, and stop it in the end.

    `program` is mosquitto's path; None looks for it, an empty one means iotcore. Raises UsageError when there is no
    broker, or when it does not start.
    """
    port = free_port()
    mosquitto = find_mosquitto() if program is None else program
    name = "mosquitto" if mosquitto else "iotcore"
    command = _mosquitto(mosquitto, folder, port) if mosquitto else _iotcore(folder, port)
    log = folder / f"{name}.log"
    with running_child(command, log, grace_s=STOP_S) as child:
        _wait_until_open(port, child, log)
        yield Broker(name, port)


def find_mosquitto() -> str:
    """Return mosquitto's path from PATH or the system folders, or an empty string."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path=SYSTEM_FOLDERS) or ""


def has_broker() -> bool:
    """Whether this machine has a broker that `running_broker` can run."""
    return bool(find_mosquitto()) or find_spec("iotcore") is not None


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _mosquitto(program: str, folder: Path, port: int) -> list[str]:
    config = folder / "mosquitto.conf"
    lines = [
        f"listener {port} 127.0.0.1",
        "allow_anonymous true",
        "persistence false",
        "set_tcp_nodelay true",
        f"max_packet_size {MAX_PACKET}",
        *(["user root"] if os.geteuid() == 0 else []),  # else it would become a user who can't read our files
    ]
    config.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [program, "-c", str(config)]


def _iotcore(folder: Path, port: int) -> list[str]:
    """Configure the one listener that speaks MQTT 5: the default one speaks 3.1.1, and on every interface."""
    if find_spec("iotcore") is None:
        raise UsageError(
            "no MQTT broker found",
            remedy="run: sudo apt-get install mosquitto, or: pip install iotcore (Python 3.12 or older)",
        )
    config = folder / "iotcore.toml"
    config.write_text(
        f"""\
id = 0

[router]
id = 0
max_connections = 64
max_outgoing_packet_count = 200
max_segment_size = 1048576
max_segment_count = 10

[v5.1]
name = "demo"
listen = "127.0.0.1:{port}"
next_connection_delay_ms = 1

[v5.1.connections]
connection_timeout_ms = 60000
max_payload_size = {MAX_PACKET}
max_inflight_count = 100
dynamic_filters = true
""",
        encoding="utf-8",
    )
    return [sys.executable, "-m", "iotcore", "--config", str(config), "--log-level", "WARNING"]


def _wait_until_open(port: int, child: subprocess.Popen[bytes], log: Path) -> None:
    """Return when something accepts connections. Nothing else can tell: a broker reports no readiness."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise UsageError(f"the broker exited with {child.returncode}: {last_line(log)}", remedy=f"see {log}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.02)
    raise UsageError(f"the broker did not open port {port} within {START_S:.0f} s", remedy=f"see {log}")
