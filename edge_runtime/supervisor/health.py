"""Judge the worker: is it alive, is a step stuck, when may it be started again?

Pure: samples and `now` in, decision out. `now` is monotonic seconds, which stand still while the machine sleeps, so a
resume raises no alarm.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from random import Random

from edge_runtime.config import HeartbeatConfig, RestartConfig
from edge_runtime.worker.frames import Heartbeat

LATE_S = 0.5  # a beat this much after its due time is missed
STEP_SAMPLES = 1024
MIN_SAMPLES = 20  # before, the 99th percentile says nothing and the floor alone counts


class BeatWatch:
    """Counts missed heartbeats of a serving worker."""

    def __init__(self, config: HeartbeatConfig, now: float) -> None:
        self._config = config
        self._due = now + config.interval_s
        self._judged = now
        self._step_count = -1
        self._step_ms: deque[float] = deque(maxlen=STEP_SAMPLES)
        self.missed = 0  # in a row
        self.missed_total = 0
        self.last: Heartbeat | None = None

    @property
    def is_lost(self) -> bool:
        """Whether so many beats in a row were missed that the worker must be restarted."""
        return self.missed >= self._config.misses

    @property
    def hang_limit_s(self) -> float:
        """Age from which a step counts as stuck."""
        if len(self._step_ms) < MIN_SAMPLES:
            return self._config.hang_floor_s
        return max(self._config.hang_floor_s, self._config.hang_factor * self.step_percentile_ms(0.99) / 1000)

    def step_percentile_ms(self, share: float) -> float:
        """Percentile of the latest step times; 0 without any."""
        ordered = sorted(self._step_ms)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    def beat(self, beat: Heartbeat, now: float) -> None:
        """Take one beat. It counts as missed when a step is stuck behind it."""
        self._step_ms.extend(beat.step_ms)
        moved = beat.step_count != self._step_count
        self._step_count = beat.step_count
        self.last = beat
        self._due = now + self._config.interval_s
        if beat.rows_busy > 0 and not moved and beat.step_age_s > self.hang_limit_s:
            self._miss()
        else:
            self.missed = 0

    def judge(self, now: float) -> None:
        """Count the beats that are overdue. To be called often, after buffered frames have been read."""
        if now - self._judged > self._config.interval_s:  # we were late ourselves: what we did not hear proves nothing
            self._due = max(self._due, now)
        self._judged = now
        while now > self._due + LATE_S:
            self._miss()
            self._due += self._config.interval_s

    def _miss(self) -> None:
        self.missed += 1
        self.missed_total += 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What follows a worker's death."""

    delay_s: float  # before the next start
    has_failed: bool  # too many deaths: new requests are refused until a worker is ready again
    gives_up: bool = False  # it has failed for so long that the daemon ends


class RestartPolicy:
    """Backoff 1, 2, 4 .. seconds with jitter; above the limit of restarts within the window the worker has failed."""

    def __init__(self, config: RestartConfig, rng: Random) -> None:
        self._config = config
        self._rng = rng
        self._in_a_row = 0
        self._restarts: deque[float] = deque()
        self._ready_since: float | None = None
        self._failed_since: float | None = None
        self.num_restarts = 0

    def ready(self, now: float) -> None:
        """Note that the worker serves."""
        self._ready_since = now
        self._failed_since = None

    def died(self, now: float, *, is_hopeless: bool = False) -> Verdict:
        """Judge a death; `is_hopeless` when the worker itself said that starting it again won't help."""
        if self._ready_since is not None and now - self._ready_since >= self._config.healthy_s:
            self._in_a_row = 0
            self._restarts.clear()
        self._ready_since = None
        self.num_restarts += 1
        self._restarts.append(now)
        while self._restarts[0] <= now - self._config.window_s:
            self._restarts.popleft()
        if is_hopeless or len(self._restarts) > self._config.limit:
            self._failed_since = now if self._failed_since is None else self._failed_since
        if self._failed_since is not None:
            is_over = now - self._failed_since >= self._config.give_up_s
            return Verdict(self._config.backoff_max_s, has_failed=True, gives_up=is_over)
        return Verdict(self._backoff(), has_failed=False)

    def _backoff(self) -> float:
        wait = min(self._config.backoff_max_s, 2.0**self._in_a_row)
        self._in_a_row = min(self._in_a_row + 1, 16)
        return wait * self._rng.uniform(0.75, 1.0)
