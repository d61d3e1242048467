"""Start a real MQTT broker for a test, on a free port and in its own folder; never the system's service."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

BROKERS = ("mosquitto", "iotcore")
HOST = "127.0.0.1"
START_S = 10.0


class Broker:
    """One broker process that can be killed and started again on the same port. A context manager."""

    def __init__(self, kind: str, folder: Path, *, extra: str = "", port: int | None = None) -> None:
        self.kind = kind
        self.port = port or free_port()
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._command = self._mosquitto(extra) if kind == "mosquitto" else self._iotcore()

    def start(self) -> None:
        with (self._folder / f"{self.kind}-{self.port}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while not is_open(self.port):
            assert self._process.poll() is None, f"{self.kind} ended at once; see {self._folder}"
            assert time.monotonic() < deadline, f"{self.kind} does not listen on {self.port}"
            time.sleep(0.01)  # nothing to await: the port is the only sign

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(10)
            self._process = None

    def pause(self) -> None:
        """Stop the process without closing its connections."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def reload(self) -> None:
        """Read users and access rules again, without dropping clients."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGKILL)

    def _mosquitto(self, extra: str) -> list[str]:
        path = self._folder / f"mosquitto-{self.port}.conf"
        lines = [
            f"listener {self.port} {HOST}",
            "persistence false",
            "set_tcp_nodelay true",
        ]
        if "allow_anonymous" not in extra:
            lines.append("allow_anonymous true")
        if "max_packet_size" not in extra:
            lines.append("max_packet_size 300000")
        if os.geteuid() == 0:
            lines.append("user root")
        path.write_text("\n".join([*lines, extra, ""]))
        return [mosquitto_path(), "-c", str(path)]

    def _iotcore(self) -> list[str]:
        path = self._folder / f"iotcore-{self.port}.toml"
        path.write_text(IOTCORE.format(port=self.port))
        return [sys.executable, "-m", "iotcore", "--config", str(path), "--log-level", "ERROR"]


IOTCORE = """
id = 0
[router]
id = 0
max_connections = 1000
max_outgoing_packet_count = 200
max_segment_size = 104857600
max_segment_count = 10
[v5.1]
name = "v5-1"
listen = "127.0.0.1:{port}"
next_connection_delay_ms = 1
[v5.1.connections]
connection_timeout_ms = 60000
max_payload_size = 300000
max_inflight_count = 100
dynamic_filters = true
"""


def mosquitto_path() -> str:
    """Find the mosquitto program; Debian keeps it outside an ordinary PATH."""
    found = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise AssertionError("mosquitto is missing, and these tests need a real broker: apt-get install mosquitto")
    return found


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        return port


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(0.2)
        return sock.connect_ex((HOST, port)) == 0
