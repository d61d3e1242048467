"""Remember requests by (tenant, id), so that one which arrives twice runs once. No clock, no lock.

Live requests are never forgotten; finished ones are kept for replay until they expire or room is needed; a cancel that
arrives before its request is kept for a while.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from edge_runtime.config import ReplayLimits
from edge_runtime.messages import ErrorFrame, Final
from edge_runtime.supervisor.requests import LiveRequest

EARLY_CANCELS_PER_TENANT = 256
Name = tuple[str, str]  # tenant, id


@dataclass(frozen=True, slots=True)
class Finished:
    """A terminal frame that can be replayed, `size` bytes on the wire, until `expires` (boot-time seconds)."""

    frame: Final | ErrorFrame
    fingerprint: bytes
    size: int
    expires: float


class Ledger:
    """Live, finished and already cancelled requests."""

    def __init__(self, limits: ReplayLimits) -> None:
        self._limits = limits
        self.live: dict[Name, LiveRequest] = {}
        self.by_key: dict[int, LiveRequest] = {}
        self._finished: OrderedDict[Name, Finished] = OrderedDict()  # oldest first
        self._finished_bytes = 0
        self._early: dict[str, OrderedDict[str, float]] = {}  # tenant -> id -> expires

    @property
    def is_full(self) -> bool:
        """Whether live requests take all entries."""
        return len(self.live) >= self._limits.entries

    def admit(self, live: LiveRequest) -> None:
        """Add a live request; the oldest finished ones make room."""
        self.live[live.name] = live
        self.by_key[live.key] = live
        self._trim()

    def finish(self, live: LiveRequest, frame: Final | ErrorFrame, size: int) -> None:
        """Turn a live request into a finished one."""
        del self.live[live.name]
        del self.by_key[live.key]
        expires = live.deadline + self._limits.grace_s
        self._finished[live.name] = Finished(frame, live.fingerprint, size, expires)
        self._finished_bytes += size
        self._trim()

    def find_finished(self, name: Name, now: float) -> Finished | None:
        """Return the terminal frame of a request that ended not long ago."""
        found = self._finished.get(name)
        return found if found and found.expires > now else None

    def note_cancel(self, name: Name, now: float) -> None:
        """Remember a cancel whose request has not arrived yet."""
        tenant, request_id = name
        early = self._early.setdefault(tenant, OrderedDict())
        early.pop(request_id, None)
        early[request_id] = now + self._limits.grace_s
        if len(early) > EARLY_CANCELS_PER_TENANT:
            early.popitem(last=False)

    def take_cancel(self, name: Name, now: float) -> bool:
        """Whether this request was cancelled before it arrived; the cancel is used up."""
        expires = self._early.get(name[0], OrderedDict()).pop(name[1], None)
        return expires is not None and expires > now

    def purge(self, now: float) -> None:
        """Forget what has expired."""
        for name in [n for n, finished in self._finished.items() if finished.expires <= now]:
            self._forget(name)
        for early in self._early.values():
            while early and next(iter(early.values())) <= now:
                early.popitem(last=False)

    def _trim(self) -> None:
        while self._finished and (
            len(self.live) + len(self._finished) > self._limits.entries or self._finished_bytes > self._limits.bytes
        ):
            self._forget(next(iter(self._finished)))

    def _forget(self, name: Name) -> None:
        self._finished_bytes -= self._finished.pop(name).size
