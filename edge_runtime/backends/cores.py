"""Say how many cores this process may use, and whether it has them to itself."""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

ROOT = Path("/")


def default_threads(root: Path = ROOT) -> int:
    """Return the number of physical cores that this process may use: affinity and container quota considered."""
    logical = psutil.cpu_count(logical=True) or 1
    physical = psutil.cpu_count(logical=False) or logical
    quota = cpu_quota(root)
    allowed = min(len(os.sched_getaffinity(0)), physical)
    return max(1, allowed if quota is None else min(allowed, math.floor(quota)))


def are_shared(threads: int, root: Path = ROOT) -> bool:
    """Tell whether `threads` busy threads would be held up: more of them than cores, or a quota that they exceed.

    A thread that spins while it waits then steals the time of the one it waits for.
    """
    quota = cpu_quota(root)
    return threads > default_threads(root) or (quota is not None and quota < threads)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the container's CPU quota in cores (cgroup v2, then v1), None when there is none."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        v1 = root / "sys/fs/cgroup/cpu"
        try:
            quota, period = ((v1 / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        except OSError:
            return None
    return float(quota) / float(period) if quota not in ("max", "-1") else None
