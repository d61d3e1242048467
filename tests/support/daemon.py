"""Run the daemon as a process of its own, over a fake worker, with limits scaled down to tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from edge_runtime.manifest import BuildFacts, Geometry, Manifest, ModelFacts, write_manifest

HERE = Path(__file__).parent
MODEL = "tiny"
DEFAULTS: dict[str, Any] = {
    "log": {"format": "json", "level": "info"},
    "daemon": {"drain_s": 1.0, "flush_s": 2.0},
    "mqtt": {"session": {"will_delay_s": 1, "backoff_s": 0.2}},
    "worker": {
        "load_s": 10.0,
        "heartbeat": {"interval_s": 0.2, "hang_floor_s": 0.5, "abort_grace_s": 0.2},
        "restart": {"backoff_max_s": 0.2},
    },
}


class DaemonProcess:
    """One daemon process. A context manager; kills what is left."""

    def __init__(
        self, folder: Path, port: int, *, worker: dict[str, Any] | None = None, config: dict[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        engine = folder / "engine"
        engine.mkdir(exist_ok=True)
        write_manifest(engine, make_manifest())
        settings = merged(DEFAULTS, {"model": {"folder": str(engine)}, "mqtt": {"port": port}})
        self._config = folder / "edge.toml"
        self._config.write_text(to_toml(merged(settings, config or {})))
        self._worker = [sys.executable, str(HERE / "fake_worker.py"), json.dumps(worker or {})]
        self._log = folder / "daemon.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._config.with_name("ready").unlink(missing_ok=True)
        command = [sys.executable, str(HERE / "run_daemon.py"), str(self._config), json.dumps(self._worker)]
        paths = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log, env={**os.environ, "PYTHONPATH": paths})

    def wait_ready(self, timeout_s: float = 15.0) -> None:
        eventually(self._config.with_name("ready").exists, timeout_s, self.text)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 15.0) -> int:
        assert self.process is not None
        return self.process.wait(timeout_s)

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def text(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """The log's JSON lines, of one event or of all."""
        found = [json.loads(line) for line in self.text().splitlines() if line.startswith("{")]
        return [event for event in found if name is None or event["event"] == name]

    def worker_pids(self) -> list[int]:
        assert self.process is not None
        return [child.pid for child in psutil.Process(self.process.pid).children()]

    def __enter__(self) -> DaemonProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)


def eventually(condition: Callable[[], object], timeout_s: float = 10.0, detail: Callable[[], str] = str) -> None:
    """Wait for something that another process does and nobody announces."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"nothing after {timeout_s} s\n{detail()}"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process lives; one that only waits to be reaped by its parent does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def make_manifest() -> Manifest:
    """The smallest engine folder that the supervisor accepts: it reads no weights."""
    return Manifest(
        format=1,
        target="ort-cpu",
        lowering="ort",
        precision="fp32",
        kv_dtype="float32",
        geometry=Geometry(layers=1, kv_heads=1, head_dim=8, vocab=32, capacity=512, max_batch=2),
        model=ModelFacts(
            name=MODEL,
            family="llama",
            source="test",
            checkpoint_sha256="0" * 64,
            hidden=8,
            ffn=16,
            heads=1,
            parameters=1,
            rotary=[],
            window=None,
            known_ids=32,
            has_text=True,
        ),
        graph="model.onnx",
        inputs=[],
        outputs=[],
        units=[],
        weight_bytes=0,
        files=[],
        build=BuildFacts(
            tool_version="0",
            created="2024-01-01T00:00:00Z",
            seconds=0.0,
            peak_memory_bytes=0,
            options={},
            versions={},
        ),
    )


def merged(base: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in new.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result


def to_toml(table: dict[str, Any], path: str = "") -> str:
    plain = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    inner = [
        to_toml(value, f"{path}.{key}" if path else key) for key, value in table.items() if isinstance(value, dict)
    ]
    return "\n".join([*([f"[{path}]"] if path else []), *plain, *inner])
