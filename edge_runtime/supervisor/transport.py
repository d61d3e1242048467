"""Say what crosses the seam between our code and an MQTT connection: messages, events, and the connection itself.

`mqtt.py` implements `Transport` over paho; tests implement it in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Inbound:
    """A message of the broker. Absent MQTT 5 properties are None (or empty)."""

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = False
    response_topic: str | None = None
    correlation: bytes | None = None
    content_type: str | None = None
    expiry_s: int | None = None  # what the broker left of the message expiry interval
    user_properties: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Outbound:
    """A message to the broker; its content type is always JSON."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    response_topic: str | None = None
    correlation: bytes | None = None
    expiry_s: int | None = None
    user_properties: tuple[tuple[str, str], ...] = ()

    @property
    def wire_bytes(self) -> int:
        """Upper bound of the packet's size: payload, topic, properties and their headers."""
        named = sum(len(k.encode()) + len(v.encode()) + 5 for k, v in self.user_properties)
        routed = len((self.response_topic or "").encode()) + len(self.correlation or b"")
        return len(self.payload) + len(self.topic.encode()) + named + routed + PACKET_OVERHEAD


PACKET_OVERHEAD = 64  # fixed header, packet id, property lengths, content type, expiry, format indicator: 41 at most


@dataclass(frozen=True, slots=True)
class Subscription:
    """One topic filter. `retained` asks for the retained message at every subscribe; `own` for our own messages too."""

    topic: str
    retained: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker publishes, retained, when the connection is lost for `delay_s`."""

    topic: str
    payload: bytes
    delay_s: int


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """What the broker said in CONNACK: frames it takes unacknowledged, and its largest packet in bytes."""

    receive_maximum: int = 65_535
    packet_bytes: int = 1 << 28


class Listener(Protocol):
    """Events of a connection. All come on the network thread: no waiting, no publishing under an own lock."""

    def on_connected(self, limits: BrokerLimits) -> None:
        """Note that the broker accepted the connection; subscriptions have been sent."""
        ...

    def on_disconnected(self, reason: str) -> None:
        """Note that the connection ended, or an attempt failed. Frames at QoS 0 not yet written are lost."""
        ...

    def on_message(self, message: Inbound) -> None:
        """Take one message; it is acknowledged when this returns."""
        ...

    def on_published(self, token: int, code: int) -> None:
        """Note that a frame has left: written (QoS 0) or acknowledged (QoS 1) with this reason code."""
        ...

    def on_dropped(self, tokens: tuple[int, ...]) -> None:
        """Note that the connection gave these frames up, because the broker refuses packets of their size."""
        ...

    def on_warning(self, text: str) -> None:
        """Note what a person should know: one complete line."""
        ...

    def on_client_id_taken(self) -> None:
        """Note that another connection uses our client id; this connection gives up."""
        ...


class Transport(Protocol):
    """A connection that keeps itself alive."""

    @property
    def is_connected(self) -> bool:
        """Whether the broker has accepted the present connection."""
        ...

    @property
    def limits(self) -> BrokerLimits:
        """The limits of the latest connection."""
        ...

    def start(self, listener: Listener) -> None:
        """Begin to connect, in the background and for ever."""
        ...

    def publish(self, message: Outbound) -> int | None:
        """Hand over one message and return its token; None when it is gone (not connected, or too large)."""
        ...

    def is_alive(self, now: float) -> bool:
        """Whether the network thread works and hears the broker; `now` is monotonic seconds."""
        ...

    def has_thread(self) -> bool:
        """Whether the network thread has not ended by itself."""
        ...

    def stop(self, timeout_s: float) -> None:
        """Disconnect normally, so that the will is not published, and end the network thread."""
        ...
