"""A bare MQTT client for tests: publishes anything, collects what comes, waits for it without sleeping."""

from __future__ import annotations

import secrets
import ssl
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from edge_runtime.messages import Accepted, Chunk, ErrorFrame, Final, Reply, parse_reply, parse_status
from edge_runtime.supervisor.mqtt import BrokerLimits, Inbound, MqttSettings, MqttTransport, Outbound, Subscription
from edge_runtime.topics import DeviceTopics

TOPICS = DeviceTopics("edge/v1", "local")
PeerT = TypeVar("PeerT", bound="Peer")
CLIENT = "cli1"


class Peer:
    """Connected on entry. Filters default to the tenant's results, and the device's status and events."""

    def __init__(
        self,
        port: int,
        *filters: str,
        tenant: str = "default",
        username: str = "",
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
        topics: DeviceTopics = TOPICS,
    ) -> None:
        self.topics = topics
        self.tenant = tenant
        self.result = topics.result(tenant, CLIENT)
        wanted = filters or (topics.result(tenant, "+"), topics.status, topics.event)
        self.transport = MqttTransport(
            MqttSettings(
                host="127.0.0.1",
                port=port,
                client_id=f"peer-{secrets.token_hex(4)}",
                subscriptions=tuple(Subscription(topic, retained=True, own=True) for topic in wanted),
                username=username,
                password=password,
                tls=tls,
                backoff_s=0.1,
            )
        )
        self._news = threading.Condition()
        self.messages: list[Inbound] = []
        self.acks: dict[int, int] = {}
        self.faults: list[str] = []

    def __enter__(self: PeerT) -> PeerT:
        self.transport.start(self)
        self.wait_connected()
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.stop(2.0)

    def wait_connected(self, timeout_s: float = 10.0) -> None:
        self.wait_for(lambda: self.transport.is_connected, timeout_s)

    def wait_for(self, condition: Callable[[], object], timeout_s: float = 10.0) -> Any:
        with self._news:
            found = self._news.wait_for(condition, timeout_s)
        assert found, f"nothing after {timeout_s} s; {self.faults}; {[m.payload[:200] for m in self.messages[-5:]]}"
        return found

    # ---- sending

    def publish(self, message: Outbound) -> int:
        """Publish and, at QoS 1, wait for the acknowledgement; return its reason code."""
        token = self.transport.publish(message)
        assert token is not None, "not connected, or too large"
        return int(self.wait_for(lambda: self.acks.get(token, -1) + 1) - 1)

    def send(self, payload: bytes | dict[str, Any], *, topic: str | None = None, **properties: Any) -> int:
        body = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
        properties.setdefault("response_topic", self.result)
        return self.publish(Outbound(topic or self.topics.request(self.tenant), body, qos=1, **properties))

    def ask(self, request_id: str = "r1", prompt: str = "hi", **fields: Any) -> int:
        return self.send({"id": request_id, "model": "tiny", "prompt": prompt, **fields})

    def cancel(self, request_id: str, tenant: str | None = None) -> int:
        topic = self.topics.cancel(tenant or self.tenant)
        return self.send({"id": request_id}, topic=topic, response_topic=None)

    # ---- what came

    def frames(self, request_id: str | None = "r1") -> list[Reply]:
        found = [parse_reply(message.payload) for message in list(self.messages) if "/res/" in message.topic]
        return [frame for frame in found if frame.id == request_id]

    def terminals(self, request_id: str | None = "r1") -> list[Final | ErrorFrame]:
        return [frame for frame in self.frames(request_id) if isinstance(frame, Final | ErrorFrame)]

    def terminal(self, request_id: str | None = "r1", timeout_s: float = 10.0) -> Final | ErrorFrame:
        self.wait_for(lambda: self.terminals(request_id), timeout_s)
        return self.terminals(request_id)[-1]

    def final(self, request_id: str = "r1", timeout_s: float = 10.0) -> Final:
        frame = self.terminal(request_id, timeout_s)
        assert isinstance(frame, Final), frame
        return frame

    def error(self, request_id: str | None = "r1", timeout_s: float = 10.0) -> ErrorFrame:
        frame = self.terminal(request_id, timeout_s)
        assert isinstance(frame, ErrorFrame), frame
        return frame

    def chunks(self, request_id: str = "r1") -> list[Chunk]:
        return [frame for frame in self.frames(request_id) if isinstance(frame, Chunk)]

    def accepted(self, request_id: str = "r1") -> list[Accepted]:
        return [frame for frame in self.frames(request_id) if isinstance(frame, Accepted)]

    def states(self) -> list[str]:
        return [parse_status(m.payload).state for m in list(self.messages) if m.topic == self.topics.status]

    # ---- events of the connection

    def on_connected(self, limits: BrokerLimits) -> None:
        self._notify()

    def on_disconnected(self, reason: str) -> None:
        self.faults.append(reason)
        self._notify()

    def on_message(self, message: Inbound) -> None:
        self.messages.append(message)
        self._notify()

    def on_published(self, token: int, code: int) -> None:
        self.acks[token] = code
        self._notify()  # its lock is never held while publishing

    def on_dropped(self, tokens: tuple[int, ...]) -> None:
        self.faults.append(f"dropped {tokens}")

    def on_warning(self, text: str) -> None:
        self.faults.append(text)

    def on_client_id_taken(self) -> None:
        self.faults.append("taken")
        self._notify()

    def _notify(self) -> None:
        with self._news:
            self._news.notify_all()
