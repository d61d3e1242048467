"""Move frames from the outbox into the connection, a bounded number at a time. Used from the main thread only."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable

from edge_runtime.supervisor.outbox import Item, Outbox
from edge_runtime.supervisor.transport import Transport

MAX_INSIDE = 32  # frames inside the MQTT library at once: its own queues have no bound


class Publisher:
    """Publishes while connected; remembers what is on its way.

    `on_acknowledged(item, code)` is called for each frame at QoS 1 with the reason code of its PUBACK.
    """

    def __init__(self, outbox: Outbox, transport: Transport, on_acknowledged: Callable[[Item, int], None]) -> None:
        self._outbox = outbox
        self._transport = transport
        self._on_acknowledged = on_acknowledged
        self._inside: dict[int, Item] = {}
        self.negative_codes: Counter[int] = Counter()
        self.lost_chunks = 0
        self.too_large = 0

    @property
    def is_idle(self) -> bool:
        """Whether every frame has left."""
        return not self._inside and not len(self._outbox)

    def pump(self, now: float) -> None:
        """Publish what may be published now; `now` is boot-time seconds."""
        limits = self._transport.limits
        most = min(MAX_INSIDE, limits.receive_maximum)
        while self._transport.is_connected and len(self._inside) < most and (item := self._outbox.take()):
            message = dataclasses.replace(item.message, expiry_s=_rest(item.expires_at, now))
            token = self._transport.publish(message)
            if token is not None:
                self._inside[token] = item
            elif message.wire_bytes > limits.packet_bytes:
                self.too_large += 1
            elif message.qos == 0:
                self.lost_chunks += 1
            else:
                self._outbox.put_back([item])
                return

    def published(self, token: int, code: int) -> None:
        """Note that a frame has left, with the reason code of its PUBACK."""
        item = self._inside.pop(token, None)
        if code:
            self.negative_codes[code] += 1
        if item is not None and item.message.qos:
            self._on_acknowledged(item, code)

    def disconnected(self) -> None:
        """Forget the frames at QoS 0 that were not written; the library sends the others again."""
        lost = [token for token, item in self._inside.items() if item.message.qos == 0]
        for token in lost:
            del self._inside[token]
        self.lost_chunks += len(lost)

    def dropped(self, tokens: tuple[int, ...]) -> None:
        """Put frames that the connection gave up back, without the largest: the broker can't take that one."""
        items = [item for token in tokens if (item := self._inside.pop(token, None))]
        if items:
            items.remove(max(items, key=lambda item: item.message.wire_bytes))
            self.too_large += 1
            self._outbox.put_back(items)


def _rest(expires_at: float | None, now: float) -> int | None:
    """Whole seconds that a frame may still wait at the broker, at least one."""
    return None if expires_at is None else max(1, math.ceil(expires_at - now))
