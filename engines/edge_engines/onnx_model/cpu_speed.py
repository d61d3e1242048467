"""Measure whether INT8 is faster than FP32 on this CPU."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from edge_engines.onnx_model.samples import Batch
from edge_engines.onnx_model.session import Session

_RUNS = 7  # of each graph, in turn; their median stands


def time_both(one: Path, other: Path, batch: Batch) -> tuple[float, float]:
    """Return the milliseconds of one core that two graphs take for a batch; other work on the machine doesn't count."""
    sessions = [Session(path, threads=1) for path in (one, other)]
    taken: list[list[float]] = [[], []]
    for session in sessions:
        session.run(batch.feeds)  # buffers are allocated in the first run
    for _ in range(_RUNS):
        for session, times in zip(sessions, taken, strict=True):
            started = time.thread_time()
            session.run(batch.feeds)
            times.append((time.thread_time() - started) * 1e3)
    return statistics.median(taken[0]), statistics.median(taken[1])
