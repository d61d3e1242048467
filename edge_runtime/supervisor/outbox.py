"""Hold what waits for the broker, within bounds, and decide what is dropped when there is too much.

Terminal frames of admitted requests are never dropped: their number is bounded by admission, which asks `is_full`.
Chunks wait in a ring per request and overall, the oldest goes first. Of a retained topic only the latest is kept. Any
thread may put; one thread takes. No connection, no clock.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edge_runtime.config import OutboxConfig
from edge_runtime.supervisor.transport import Outbound

Kind = Literal["terminal", "reply", "chunk", "latest"]
REPLIES_LIMIT = 256  # accepted frames, refusals, replays and events: all can be asked for again


@dataclass(frozen=True, slots=True)
class Item:
    """One waiting frame. `key` is the request of a chunk, else 0; `expires_at` its deadline, boot-time seconds."""

    message: Outbound
    kind: Kind
    key: int = 0
    expires_at: float | None = None


class Outbox:
    """First in, first out, bounded by kind."""

    def __init__(self, config: OutboxConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._items: dict[int, Item] = {}  # by running number, in order
        self._number = 0
        self._rings: dict[int, deque[int]] = {}  # running numbers of the chunks of each request
        self._num_chunks = 0
        self._latest: dict[str, int] = {}  # topic -> running number
        self._num_replies = 0
        self._num_terminals = 0
        self.dropped_chunks = 0
        self.dropped_replies = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_full(self) -> bool:
        """Whether so many terminal frames wait that no new request should be admitted."""
        return self._num_terminals >= self._config.terminals

    def put(self, item: Item) -> None:
        """Add one frame; what exceeds a bound is dropped and counted."""
        with self._lock:
            if item.kind == "reply" and self._num_replies >= REPLIES_LIMIT:
                self.dropped_replies += 1
                return
            if item.kind == "latest" and (old := self._latest.get(item.message.topic)) is not None:
                self._remove(old)
            self._number += 1
            self._insert(self._number, item)
            self._drop_excess_chunks(item.key)

    def take(self) -> Item | None:
        """Remove and return the oldest frame; None when there is none."""
        with self._lock:
            number = next(iter(self._items), None)
            return None if number is None else self._remove(number)

    def put_back(self, items: Sequence[Item]) -> None:
        """Put frames that could not leave before all others, in their order. Of one retained topic the newest wins."""
        with self._lock:
            every = [*items, *self._items.values()]
            newest = {item.message.topic: item for item in every if item.kind == "latest"}
            self._items.clear()
            self._rings.clear()
            self._latest.clear()
            self._num_replies = self._num_terminals = self._num_chunks = 0
            for item in every:
                if item.kind != "latest" or item is newest[item.message.topic]:
                    self._number += 1
                    self._insert(self._number, item)

    def _insert(self, number: int, item: Item) -> None:
        self._items[number] = item
        self._num_replies += item.kind == "reply"
        self._num_terminals += item.kind == "terminal"
        if item.kind == "latest":
            self._latest[item.message.topic] = number
        elif item.kind == "chunk":
            self._num_chunks += 1
            self._rings.setdefault(item.key, deque()).append(number)

    def _remove(self, number: int) -> Item:
        item = self._items.pop(number)
        self._num_replies -= item.kind == "reply"
        self._num_terminals -= item.kind == "terminal"
        if item.kind == "latest":
            del self._latest[item.message.topic]
        elif item.kind == "chunk":
            self._num_chunks -= 1
            ring = self._rings[item.key]
            ring.remove(number)  # at its head, or nearly
            if not ring:
                del self._rings[item.key]
        return item

    def _drop_excess_chunks(self, key: int) -> None:
        if len(self._rings.get(key, ())) > self._config.chunks_per_request:
            self._remove(self._rings[key][0])
            self.dropped_chunks += 1
        while self._num_chunks > self._config.chunks:
            self._remove(min(ring[0] for ring in self._rings.values()))
            self.dropped_chunks += 1
