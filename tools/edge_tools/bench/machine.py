"""Say what machine a measurement ran on, how fast it reads memory, and whether it was busy with something else."""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

BUFFER_BYTES = 256 << 20  # well above any last-level cache of the boards and desktops we know
BUSY_SHARE = 0.10  # of all cores, used by other programs: above it times are not to be trusted
_PASSES = 20  # single passes were seen 20 % apart on a virtual machine


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that do not change while measuring. `bandwidth_gb_s` is 10^9 bytes per second, read only."""

    cpu: str
    cores: int  # logical, usable by this process
    memory_gib: float
    system: str
    python: str
    threads: int
    bandwidth_gb_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """What the machine did while we measured: load averages, and cores' share used by other programs."""

    start: float
    end: float
    others_share: float

    @property
    def busy(self) -> bool:
        """Whether other programs disturbed the measurement."""
        return self.others_share > BUSY_SHARE


def describe_machine(threads: int) -> Machine:
    """Collect the facts and measure the read bandwidth with `threads` threads."""
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        threads=threads,
        bandwidth_gb_s=round(measure_bandwidth(threads), 1),
    )


def measure_bandwidth(threads: int) -> float:
    """Return the best of several passes that read one large buffer, in 10^9 bytes per second.

    Each thread folds its own slice with OR, which costs less than reading it; numpy releases the interpreter lock.
    """
    parts = np.array_split(np.ones(BUFFER_BYTES // 8, np.uint64), threads)
    return max(BUFFER_BYTES / _seconds_to_read(parts) / 1e9 for _ in range(_PASSES))


class LoadWatch:
    """Tell own processor time from that of other programs, from construction to `stop`."""

    def __init__(self) -> None:
        self._start = os.getloadavg()[0]
        self._all = _busy_seconds()
        self._own = _own_seconds()
        self._wall = time.monotonic()

    def stop(self) -> Load:
        """Return the load since construction."""
        wall = max(time.monotonic() - self._wall, 1e-6)
        others = (_busy_seconds() - self._all) - (_own_seconds() - self._own)
        share = max(others, 0.0) / (wall * (psutil.cpu_count() or 1))
        return Load(round(self._start, 2), round(os.getloadavg()[0], 2), round(share, 3))


def _seconds_to_read(parts: Sequence[np.ndarray]) -> float:
    workers = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts]
    begun = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - begun


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _cpu_name(file: Path = Path("/proc/cpuinfo")) -> str:
    """Read the processor's name; Arm kernels give none, so the architecture has to do."""
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
