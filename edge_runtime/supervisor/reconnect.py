"""Decide how long to wait before the next connection, and whether another client uses our client id.

paho's own backoff starts anew at every accepted connection, so a broker that accepts and closes is asked once per
second for ever. No I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from random import Random

LONGEST_S = 60.0
SETTLED_S = 10.0  # a connection of this age was a good one: the next failure starts from the beginning
REFUSED = frozenset({0x86, 0x87})  # bad user name or password, not authorised: only a person can change that
SESSION_TAKEN_OVER = 0x8E
# What the end of a connection looks like after a packet that the broker does not take: it says so (0x95), or its
# acknowledgement is one that paho can't read (mosquitto 2.0.11 with message_size_limit; a local protocol error).
TOO_LARGE = frozenset({0x95, 0x82})
SHORT_LIMIT = 5
SHORT_WINDOW_S = 60.0


class ReconnectRule:
    """Exponential backoff with jitter: about 1, 2, 4 .. times `base_s`, at most 60 s; `refused_s` after a refusal."""

    def __init__(self, rng: Random, base_s: float = 1.0, refused_s: float = LONGEST_S) -> None:
        self._rng = rng
        self._base_s = base_s
        self._refused_s = refused_s
        self._failures = 0
        self._since: float | None = None
        self._short_ends: deque[float] = deque(maxlen=SHORT_LIMIT)
        self.too_large = 0  # connections in a row that ended as if a packet was too large

    def connected(self, now: float) -> None:
        """Note an accepted connection."""
        self._since = now

    def refused(self, code: int) -> float:
        """Return the wait in seconds after a CONNACK with this failure code."""
        self._short_ends.clear()
        return self._refused_s if code in REFUSED else self._next()

    def unreachable(self) -> float:
        """Return the wait in seconds after an attempt that found no broker."""
        self._short_ends.clear()
        return self._next()

    def ended(self, now: float, code: int | None) -> float:
        """Return the wait in seconds after a connection; `code` is the known reason, if any.

        One that was never accepted, for want of a client certificate for example, counts as a failed attempt.
        """
        if self._since is None:
            return self.unreachable()
        age, self._since = now - self._since, None
        if age >= SETTLED_S:
            self._failures = self.too_large = 0
        elif code is None:
            self._short_ends.append(now)
        else:
            self._short_ends.clear()
        self.too_large = self.too_large + 1 if code in TOO_LARGE else 0
        return self._next()

    def is_client_id_taken(self, now: float, code: int | None) -> bool:
        """Judge after `ended`: the broker said so, or connections keep being closed early without any reason."""
        many = len(self._short_ends) == SHORT_LIMIT and now - self._short_ends[0] <= SHORT_WINDOW_S
        return code == SESSION_TAKEN_OVER or many

    def _next(self) -> float:
        wait = min(LONGEST_S, self._base_s * 2.0**self._failures)
        self._failures = min(self._failures + 1, 16)
        return wait * self._rng.uniform(0.75, 1.25)
