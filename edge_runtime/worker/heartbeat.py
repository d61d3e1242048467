"""Tell the supervisor once per interval that this process lives and how far its steps have come."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import psutil

from edge_runtime.worker.frames import Heartbeat
from edge_runtime.worker.link import Link, LinkClosedError

_MAX_STEP_TIMES = 4096  # kept between two beats; more than a second of the fastest steps


class Pulse:
    """What the beats report. The loop's thread writes it, the beat's thread reads it: plain values, no lock needed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._step_began: float | None = None
        self._step_ms: deque[float] = deque(maxlen=_MAX_STEP_TIMES)
        self.phase = "loading"
        self.step_count = 0
        self.rows_busy = 0
        self.kv_tokens = 0
        self.useful_tokens = 0
        self.computed_tokens = 0
        self.nan_count = 0

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Surround one call of the engine that computes `tokens` positions, all slots together."""
        began = self._step_began = self._clock()
        try:
            yield
        finally:
            self._step_began = None
            self._step_ms.append((self._clock() - began) * 1000)
            self.step_count += 1
            self.useful_tokens += tokens
            self.computed_tokens += tokens

    def beat(self, seq: int, rss_bytes: int) -> Heartbeat:
        """Return the beat of this moment; the step times it holds are forgotten."""
        began = self._step_began
        return Heartbeat(
            seq=seq,
            phase=self.phase,
            step_count=self.step_count,
            step_age_s=0.0 if began is None else self._clock() - began,
            rows_busy=self.rows_busy,
            kv_tokens=self.kv_tokens,
            rss_bytes=rss_bytes,
            useful_tokens=self.useful_tokens,
            computed_tokens=self.computed_tokens,
            step_ms=[self._step_ms.popleft() for _ in range(len(self._step_ms))],
            nan_count=self.nan_count,
        )


class HeartbeatThread:
    """Sends a beat at once and then every `interval_s`, from a thread of its own; a context manager."""

    def __init__(self, link: Link, pulse: Pulse, interval_s: float) -> None:
        self._link = link
        self._pulse = pulse
        self._interval_s = interval_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        # It may wait in `send` for a supervisor that does not read; the process ends anyway.
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        process = psutil.Process()
        due = time.monotonic()
        seq = 0
        while not self._is_over.wait(max(0.0, due - time.monotonic())):
            try:
                self._link.send(self._pulse.beat(seq, process.memory_info().rss))
            except LinkClosedError:
                return  # the loop sees the same and ends the process
            seq += 1
            due = max(due + self._interval_s, time.monotonic())
