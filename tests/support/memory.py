"""A connection in memory, behind the interface of the MQTT wrapper: for tests that need no broker."""

from __future__ import annotations

from edge_runtime.supervisor.transport import BrokerLimits, Listener, Outbound


class MemoryTransport:
    """Keeps what is published; the test plays the broker."""

    def __init__(self) -> None:
        self.is_connected = False
        self.limits = BrokerLimits()
        self.published: list[Outbound] = []
        self.listener: Listener | None = None

    def start(self, listener: Listener) -> None:
        self.listener = listener

    def connect(self, limits: BrokerLimits | None = None) -> None:
        self.limits = limits or BrokerLimits()
        self.is_connected = True

    def disconnect(self) -> None:
        self.is_connected = False

    def publish(self, message: Outbound) -> int | None:
        if not self.is_connected or message.wire_bytes > self.limits.packet_bytes:
            return None
        self.published.append(message)
        return len(self.published)

    def is_alive(self, now: float) -> bool:
        return True

    def has_thread(self) -> bool:
        return True

    def stop(self, timeout_s: float) -> None:
        self.is_connected = False
