"""Keep the connection of a client: the device's presence, the open requests, and what must be sent again."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from edge_runtime.errors import EdgeError, RequestError
from edge_runtime.messages import Cancel, Info, Reply, Request, Status, parse_info, parse_reply, parse_status
from edge_runtime.supervisor.mqtt import BrokerLimits, Inbound, MqttSettings, MqttTransport, Outbound
from edge_runtime.topics import DeviceTopics

PRESENCE_S = 2.0  # a device that exists has a retained status, which comes at once
NOT_AUTHORIZED = 0x87  # reason code of a PUBACK
CANCEL_EXPIRY_S = 60  # the device remembers an early cancel for as long
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Resend:
    """The connection is back, or the device has started anew: what is open is to be sent again."""

    is_new_boot: bool


LinkEvent = Reply | Resend | EdgeError | None


class Link:
    """The connection, the device's presence and the open requests. Its events come on the network thread."""

    def __init__(self, settings: MqttSettings, topics: DeviceTopics, tenant: str, name: str) -> None:
        self._settings = settings
        self._topics = topics
        self._tenant = tenant
        self._result = topics.result(tenant, name)
        self._transport = MqttTransport(settings)
        self._news = threading.Condition()
        self._open: dict[str, queue.SimpleQueue[LinkEvent]] = {}
        self._has_failed = False
        self._fault = f"the broker at {settings.host}:{settings.port} does not answer"
        self.status: Status | None = None
        self.info: Info | None = None

    @property
    def device(self) -> str:
        """Name of the device."""
        return self._topics.device

    def connect(self, timeout_s: float) -> None:
        """Connect to the broker. Raises EdgeError when the first attempt fails or takes longer than `timeout_s`."""
        self._transport.start(self)
        with self._news:
            self._news.wait_for(lambda: self._transport.is_connected or self._has_failed, timeout_s)
            is_connected, fault = self._transport.is_connected, self._fault
        if not is_connected:
            self._transport.stop(0.0)
            raise EdgeError(fault)

    def close(self) -> None:
        """Disconnect."""
        self._transport.stop(2.0)

    def require(self, read: Callable[[], _T | None]) -> _T:
        """Return a retained fact, waiting a moment for it. Raises EdgeError."""
        with self._news:
            found = self._news.wait_for(read, PRESENCE_S)
        if not found:
            raise EdgeError(
                f"device {self.device!r} is not known at the broker {self._settings.host}:{self._settings.port}",
                remedy=f"check its name, or start it with: edge-runtime serve --device {self.device}",
            )
        return found

    def check_device(self) -> None:
        """Raise EdgeError when the device is offline or unknown."""
        status = self.require(lambda: self.status)
        if status.state == "offline":
            raise self._offline(status)

    def why_no_answer(self) -> str:
        """Say why there may be no answer."""
        if not self._transport.is_connected:
            return f"the connection is gone: {self._fault}"
        if self.status is not None and self.status.state != "online":
            return f"the device is {self.status.state}"
        return f"does the device serve tenant {self._tenant!r}?"

    def open(self, request_id: str, inbox: queue.SimpleQueue[LinkEvent]) -> None:
        """Pass what comes for this id to `inbox`. Raises RequestError when it is open already."""
        with self._news:
            if request_id in self._open:
                raise RequestError("id_conflict", f"id {request_id!r} is open in this client", param="$.id")
            self._open[request_id] = inbox

    def close_request(self, request_id: str) -> None:
        """Ignore what still comes for this id."""
        with self._news:
            self._open.pop(request_id, None)

    def send_request(self, request: Request) -> None:
        """Send it if there is a connection. Raises RequestError when it is larger than the broker allows."""
        message = Outbound(
            self._topics.request(self._tenant),
            msgspec.json.encode(request),
            qos=1,
            response_topic=self._result,
            expiry_s=math.ceil((request.timeout_ms or 1000) / 1000),
        )
        most = self._transport.limits.packet_bytes
        if message.wire_bytes > most:
            raise RequestError("payload_too_large", f"request of {message.wire_bytes} bytes, the broker takes {most}")
        self._transport.publish(message)

    def send_cancel(self, request_id: str) -> None:
        """Ask the device to stop a request, if there is a connection."""
        payload = msgspec.json.encode(Cancel(request_id))
        self._transport.publish(Outbound(self._topics.cancel(self._tenant), payload, qos=1, expiry_s=CANCEL_EXPIRY_S))

    def _offline(self, status: Status) -> EdgeError:
        return EdgeError(
            f"device {self.device!r} is offline ({status.reason or 'unknown reason'})",
            remedy=f"start it with: edge-runtime serve --device {self.device}",
        )

    def _tell_all(self, event: LinkEvent) -> None:
        with self._news:
            inboxes = list(self._open.values())
        for inbox in inboxes:
            inbox.put(event)

    # ---- events of the connection

    def on_connected(self, limits: BrokerLimits) -> None:
        """Send again what is open."""
        with self._news:
            self._news.notify_all()
        self._tell_all(Resend(is_new_boot=False))

    def on_disconnected(self, reason: str) -> None:
        """Note why: the connection comes back by itself."""
        with self._news:
            self._fault, self._has_failed = reason, True
            self._news.notify_all()

    def on_message(self, message: Inbound) -> None:
        """Take a status, the device's facts, or a frame of an answer; what can't be read is noted."""
        try:
            if message.topic == self._topics.status:
                self._note_status(parse_status(message.payload))
            elif message.topic == self._topics.info:
                self._note_info(parse_info(message.payload))
            else:
                self._note_reply(parse_reply(message.payload))
        except RequestError as error:
            self._fault = f"{message.topic}: {error}"

    def _note_status(self, status: Status) -> None:
        with self._news:
            before, self.status = self.status, status
            self._news.notify_all()
        if status.state == "offline" and status.reason != "lost":  # a lost one may come back by itself
            self._tell_all(self._offline(status))
        elif status.state != "offline" and before is not None and before.boot_id != status.boot_id:
            self._tell_all(Resend(is_new_boot=True))

    def _note_info(self, info: Info) -> None:
        with self._news:
            self.info = info
            self._news.notify_all()

    def _note_reply(self, reply: Reply) -> None:
        with self._news:
            inbox = self._open.get(reply.id or "")
        if inbox is not None:
            inbox.put(reply)

    def on_published(self, token: int, code: int) -> None:
        """End what is open when the broker does not let us ask; otherwise an answer ends a request, not this."""
        if code == NOT_AUTHORIZED:
            user = f"user {self._settings.username!r}" if self._settings.username else "a client without user name"
            self._tell_all(
                EdgeError(
                    f"the broker does not let {user} ask for tenant {self._tenant!r}",
                    remedy="give the user name and tenant that belong together",
                )
            )

    def on_dropped(self, tokens: tuple[int, ...]) -> None:
        """Nothing: the deadline ends a request that the broker can't take."""

    def on_warning(self, text: str) -> None:
        """Note it, for an error that may follow."""
        self._fault = text

    def on_client_id_taken(self) -> None:
        """Note it: this connection gives up."""
        self._fault = "another connection uses our client id"
