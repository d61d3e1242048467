"""Measure the cold start: from starting the daemon to "ready", split by the phases that the worker reports."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from edge_runtime.errors import BackendError
from edge_tools.bench.stats import Stats, summarise
from edge_tools.daemon import served

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class ColdResult:
    """`phases_ms` are medians of what the worker says of itself; the rest of `ready` is starting two processes."""

    rounds: int
    ready: Stats
    phases_ms: dict[str, float]


class _Line(msgspec.Struct):
    event: str
    start_seconds: dict[str, float] = {}


def measure_cold(engine: Path, port: int, folder: Path) -> ColdResult:
    """Start the daemon ROUNDS times at this broker, with a warm file cache, until it is ready."""
    ready_ms: list[float] = []
    phases: list[Mapping[str, float]] = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        with served(engine, port, folder) as device:
            ready_ms.append((time.perf_counter() - begun) * 1e3)
            phases.append(_phases(device.log))
    medians = {name: summarise([p[name] * 1e3 for p in phases]).p50_ms for name in phases[0]}
    return ColdResult(ROUNDS, summarise(ready_ms), medians)


def _phases(log: Path) -> Mapping[str, float]:
    """Read the seconds of each phase from the daemon's log."""
    for line in log.read_bytes().splitlines():
        entry = msgspec.json.decode(line, type=_Line)
        if entry.event == "worker_ready":
            return entry.start_seconds
    raise BackendError(f"{log}: the daemon was ready without saying how long its worker took")
