"""Carry events of the MQTT network thread to the event loop. Requests are admitted on the way, without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from edge_runtime.supervisor.gateway import Gateway
from edge_runtime.supervisor.transport import BrokerLimits, Inbound


class ConnectionEvents(Protocol):
    """What the daemon is told, always on the event loop."""

    def turn(self) -> None:
        """Look at what has changed."""
        ...

    def on_connected(self, limits: BrokerLimits) -> None:
        """Note that the broker accepted the connection and the subscriptions."""
        ...

    def on_disconnected(self, reason: str) -> None:
        """Note the end of a connection or a failed attempt."""
        ...

    def on_published(self, token: int, code: int) -> None:
        """Note that a frame has left."""
        ...

    def on_dropped(self, tokens: tuple[int, ...]) -> None:
        """Note that the connection gave frames up."""
        ...

    def on_own_status(self, payload: bytes) -> None:
        """Look at a message on our own status topic."""
        ...

    def on_warning(self, text: str) -> None:
        """Log one line."""
        ...

    def on_client_id_taken(self) -> None:
        """End: another connection uses our client id."""
        ...


class Bridge:
    """A `Listener` whose events end on the event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        events: ConnectionEvents,
        gateway: Gateway,
        status_topic: str,
        clock: Callable[[], float],
    ) -> None:
        self._loop = loop
        self._events = events
        self._gateway = gateway
        self._status_topic = status_topic
        self._clock = clock

    def on_message(self, message: Inbound) -> None:
        """Admit, refuse or drop a request; the loop learns that there is something to do."""
        if message.topic == self._status_topic:
            self._loop.call_soon_threadsafe(self._events.on_own_status, message.payload)
            return
        self._gateway.receive(message, self._clock())
        self._loop.call_soon_threadsafe(self._events.turn)

    def on_connected(self, limits: BrokerLimits) -> None:
        """Pass on."""
        self._loop.call_soon_threadsafe(self._events.on_connected, limits)

    def on_disconnected(self, reason: str) -> None:
        """Pass on."""
        self._loop.call_soon_threadsafe(self._events.on_disconnected, reason)

    def on_published(self, token: int, code: int) -> None:
        """Pass on; paho holds its own lock here, so nothing else may be done."""
        self._loop.call_soon_threadsafe(self._events.on_published, token, code)

    def on_dropped(self, tokens: tuple[int, ...]) -> None:
        """Pass on."""
        self._loop.call_soon_threadsafe(self._events.on_dropped, tokens)

    def on_warning(self, text: str) -> None:
        """Pass on."""
        self._loop.call_soon_threadsafe(self._events.on_warning, text)

    def on_client_id_taken(self) -> None:
        """Pass on."""
        self._loop.call_soon_threadsafe(self._events.on_client_id_taken)
