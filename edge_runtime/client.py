"""Ask a device over MQTT, from Python.

    from edge_runtime.client import Client

    with Client(host="127.0.0.1", device="local") as client:
        print(client.ask("Name three uses of a heat sink.").text)
        for piece in client.stream([{"role": "user", "content": "Tell me more."}]):
            ...

One request has one id, however often it has to be sent; frames are put in order by their number; what was open is sent
again after a reconnect or a restart of the device. Thread safe: several requests may be open at once.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TypeVar

import msgspec

from edge_runtime.errors import EdgeError, RequestError
from edge_runtime.messages import (
    Accepted,
    Cancel,
    ChatMessage,
    Chunk,
    ErrorFrame,
    Final,
    FinishReason,
    Info,
    Reply,
    Request,
    ServiceClass,
    Status,
    Timings,
    Usage,
    parse_info,
    parse_reply,
    parse_status,
)
from edge_runtime.supervisor.mqtt import (
    BrokerLimits,
    Inbound,
    MqttSettings,
    MqttTransport,
    Outbound,
    Subscription,
    tls_context,
)
from edge_runtime.topics import DEFAULT_PREFIX, DeviceTopics

Prompt = str | Sequence[Mapping[str, str]]
DEFAULT_MAX_TOKENS = 128
PRESENCE_S = 2.0  # a device that exists has a retained status, which comes at once
GRACE_S = 5.0  # the device answers by the deadline; this much later the client stops waiting
# Refusals before anything ran: the same request may be sent again, under the same id.
TRY_AGAIN = frozenset({"queue_full", "quota_exceeded", "not_ready", "overloaded", "shutting_down", "model_unavailable"})
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `finish_reason` is stop, length, cancelled or deadline; the last two are partial."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    id: str
    device: str
    model: str
    seed: int | None
    attempt: int
    cached: bool
    truncated: bool
    metadata: dict[str, str]


class Client:
    """A connection to one device, for one tenant. A context manager.

    `model` None means the one that the device serves. Raises EdgeError when the broker can't be reached within
    `connect_timeout_s`, and ConfigError for certificates that can't be used.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 1883,
        device: str = "local",
        tenant: str = "default",
        *,
        model: str | None = None,
        username: str = "",
        password: str | None = None,
        tls: bool = False,
        ca_file: str = "",
        cert_file: str = "",
        key_file: str = "",
        prefix: str = DEFAULT_PREFIX,
        connect_timeout_s: float = 5.0,
    ) -> None:
        self._model = model
        self._connect_timeout_s = connect_timeout_s
        name = f"c-{secrets.token_hex(8)}"
        topics = DeviceTopics(prefix, device)
        settings = MqttSettings(
            host=host,
            port=port,
            client_id=f"edge-client-{name}",
            subscriptions=(
                Subscription(topics.result(tenant, name)),
                Subscription(topics.status, retained=True),
                Subscription(topics.info, retained=True),
            ),
            username=username,
            password=password,
            tls=tls_context(ca_file, cert_file, key_file) if tls else None,
            expiry_s=60,
        )
        self._link = _Link(settings, topics, tenant, name)

    def connect(self) -> None:
        """Connect to the broker. Raises EdgeError."""
        self._link.connect(self._connect_timeout_s)

    def close(self) -> None:
        """Disconnect. What is open stays open at the device."""
        self._link.close()

    def ask(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        timeout_s: float = 60.0,
        service_class: ServiceClass = "standard",
        metadata: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> Answer:
        """Return the whole answer to a prompt, or to a list of `{role, content}` messages.

        Raises RequestError when the device refuses or fails the request, EdgeError when the device is offline.
        """
        request = Request(
            id=request_id or secrets.token_hex(8),
            model=self._model or self.info().model,
            prompt=prompt if isinstance(prompt, str) else None,
            messages=_messages(prompt),
            max_tokens=max_tokens or self._default_max_tokens(),
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=list(stop),
            timeout_ms=round(timeout_s * 1000),
            service_class=service_class,
            metadata=dict(metadata or {}),
        )
        return AnswerStream(self._link, request, timeout_s).wait()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        timeout_s: float = 60.0,
        service_class: ServiceClass = "standard",
        metadata: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> AnswerStream:
        """Send a request and return the pieces of its answer as they come; arguments and errors as of `ask`."""
        request = Request(
            id=request_id or secrets.token_hex(8),
            model=self._model or self.info().model,
            prompt=prompt if isinstance(prompt, str) else None,
            messages=_messages(prompt),
            max_tokens=max_tokens or self._default_max_tokens(),
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            stop=list(stop),
            stream=True,
            timeout_ms=round(timeout_s * 1000),
            service_class=service_class,
            metadata=dict(metadata or {}),
        )
        return AnswerStream(self._link, request, timeout_s)

    def cancel(self, request_id: str) -> None:
        """Stop a request of this tenant; its answer ends as `cancelled`, with the text so far."""
        self._link.send_cancel(request_id)

    def status(self) -> Status:
        """Return the device's latest status. Raises EdgeError when there has never been one."""
        return self._link.require(lambda: self._link.status)

    def info(self) -> Info:
        """Return the facts about device, engine and limits. Raises EdgeError when there are none."""
        return self._link.require(lambda: self._link.info)

    def _default_max_tokens(self) -> int:
        info = self._link.info
        return (
            min(DEFAULT_MAX_TOKENS, info.limits.get("max_tokens", DEFAULT_MAX_TOKENS)) if info else DEFAULT_MAX_TOKENS
        )

    def __enter__(self) -> Client:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AnswerStream:
    """The pieces of one answer. Iterate once; afterwards `answer` is the whole.

    Leaving the iteration early cancels the request.
    """

    def __init__(self, link: _Link, request: Request, timeout_s: float) -> None:
        link.check_device()
        self._link = link
        self._request = request
        self._ends = time.monotonic() + timeout_s
        self._send_at: float | None = None
        self._waits = 0
        self._inbox: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._order = _Order()
        self._answer: Answer | None = None
        link.open(self.id, self._inbox)
        self._send()

    @property
    def id(self) -> str:
        """The id of the request."""
        return self._request.id

    @property
    def answer(self) -> Answer:
        """The whole answer, once the iteration has ended."""
        if self._answer is None:
            raise EdgeError(f"request {self.id} has not ended", remedy="iterate to the end first")
        return self._answer

    def cancel(self) -> None:
        """Ask the device to stop; the iteration then ends."""
        self._link.send_cancel(self.id)

    def wait(self) -> Answer:
        """Take all pieces and return the whole answer."""
        for _ in self:
            pass
        return self.answer

    def __iter__(self) -> Iterator[str]:
        has_ended = False
        try:
            while self._answer is None:
                event = self._next_event()
                has_ended = isinstance(event, ErrorFrame)
                if piece := self._take(event):
                    yield piece
                has_ended = self._answer is not None
        finally:
            self._link.close_request(self.id)
            if not has_ended and self._answer is None:
                self.cancel()

    def _next_event(self) -> _Event:
        """Wait for a frame or for the time to send again. Raises RequestError after the deadline."""
        now = time.monotonic()
        if self._send_at is not None and self._send_at <= now:
            self._send()
        until = self._ends + GRACE_S if self._send_at is None else min(self._send_at, self._ends + GRACE_S)
        if now >= self._ends + GRACE_S:
            raise RequestError("deadline_exceeded", f"no answer within the timeout{self._link.absence()}")
        try:
            return self._inbox.get(timeout=max(0.0, until - now))
        except queue.Empty:
            return None

    def _take(self, event: _Event) -> str:
        if isinstance(event, EdgeError):
            raise event
        if isinstance(event, _Resend):
            if event.is_new_boot:
                self._order.restart()
            self._send()
        elif isinstance(event, Accepted):
            return self._order.accept(event)
        elif isinstance(event, Chunk):
            return self._order.add(event.seq, event.choices[0].delta.content)
        elif isinstance(event, Final):
            self._answer = self._link.to_answer(event)
            return self._order.end(self._answer.text)
        elif isinstance(event, ErrorFrame):
            self._retry_or_raise(event)
        return ""

    def _retry_or_raise(self, frame: ErrorFrame) -> None:
        error, now = frame.error, time.monotonic()
        wait_s = (error.retry_after_ms or 250) / 1000 * 1.5 ** min(self._waits, 6)
        if error.code not in TRY_AGAIN or now + wait_s >= self._ends:
            raise RequestError(error.code, error.message, param=error.param, retry_after_ms=error.retry_after_ms)
        self._waits += 1
        self._send_at = now + wait_s

    def _send(self) -> None:
        """Send the request, or leave it to the next connection."""
        self._send_at = None
        rest_s = max(0.001, self._ends - time.monotonic())
        self._link.send_request(msgspec.structs.replace(self._request, timeout_ms=math.ceil(rest_s * 1000)))


@dataclass(slots=True)
class _Order:
    """Puts pieces in order of their number, and releases each character once."""

    next_seq: int = 0
    text: str = ""  # in order, of the present run
    released: str = ""
    held: dict[int, str] = field(default_factory=dict)
    boot_id: str | None = None

    def restart(self) -> None:
        """Expect the answer from its beginning: another run of the same request."""
        self.next_seq, self.text = 0, ""
        self.held.clear()

    def accept(self, frame: Accepted) -> str:
        """Take an accepted frame; one of another boot begins a new run."""
        if self.boot_id is not None and frame.boot_id != self.boot_id:
            self.restart()
        self.boot_id = frame.boot_id
        return self.add(frame.seq, "")

    def add(self, seq: int, text: str) -> str:
        """Take one numbered piece and return what can be released; repeated ones are ignored."""
        if seq >= self.next_seq:
            self.held.setdefault(seq, text)
        while self.next_seq in self.held:
            self.text += self.held.pop(self.next_seq)
            self.next_seq += 1
        return self._release()

    def end(self, text: str) -> str:
        """Take the whole text and return what has not been released: lost pieces are made up for."""
        self.text = text
        return self._release()

    def _release(self) -> str:
        if self.text.startswith(self.released):
            piece, self.released = self.text[len(self.released) :], self.text
            return piece
        if self.released.startswith(self.text):
            return ""
        raise RequestError("worker_restarted", "the device started again, and its new answer differs from the first")


@dataclass(frozen=True, slots=True)
class _Resend:
    """The connection is back, or the device has started anew: what is open is to be sent again."""

    is_new_boot: bool


_Event = Reply | _Resend | EdgeError | None


class _Link:
    """The connection, the device's presence and the open requests. Its events come on the network thread."""

    def __init__(self, settings: MqttSettings, topics: DeviceTopics, tenant: str, name: str) -> None:
        self._settings = settings
        self._topics = topics
        self._tenant = tenant
        self._result = topics.result(tenant, name)
        self._transport = MqttTransport(settings)
        self._news = threading.Condition()
        self._open: dict[str, queue.SimpleQueue[_Event]] = {}
        self._fault = "no answer"
        self.status: Status | None = None
        self.info: Info | None = None

    def connect(self, timeout_s: float) -> None:
        self._transport.start(self)
        with self._news:
            if not self._news.wait_for(lambda: self._transport.is_connected, timeout_s):
                fault = self._fault
            else:
                return
        self._transport.stop(0.0)
        raise EdgeError(
            f"no connection to the broker at {self._settings.host}:{self._settings.port}: {fault}",
            remedy="is a broker running there? start one, or give host and port",
        )

    def close(self) -> None:
        self._transport.stop(2.0)

    def require(self, read: Callable[[], _T | None]) -> _T:
        """Return a retained fact, waiting a moment for it. Raises EdgeError."""
        with self._news:
            found = self._news.wait_for(read, PRESENCE_S)
        if not found:
            raise EdgeError(
                f"device {self._topics.device!r} is not known at the broker "
                f"{self._settings.host}:{self._settings.port}",
                remedy="check its name, or start it with: edge-runtime serve",
            )
        return found

    def check_device(self) -> None:
        """Raise EdgeError when the device is offline or unknown."""
        status = self.require(lambda: self.status)
        if status.state == "offline":
            raise self._offline(status)

    def absence(self) -> str:
        """Say why there may be no answer."""
        if not self._transport.is_connected:
            return f"; the connection to the broker is gone: {self._fault}"
        return f"; the device is {self.status.state}" if self.status and self.status.state != "online" else ""

    def open(self, request_id: str, inbox: queue.SimpleQueue[_Event]) -> None:
        with self._news:
            if request_id in self._open:
                raise RequestError("id_conflict", f"id {request_id!r} is open in this client", param="$.id")
            self._open[request_id] = inbox

    def close_request(self, request_id: str) -> None:
        with self._news:
            self._open.pop(request_id, None)

    def send_request(self, request: Request) -> None:
        self._transport.publish(
            Outbound(
                self._topics.request(self._tenant),
                msgspec.json.encode(request),
                qos=1,
                response_topic=self._result,
                expiry_s=math.ceil((request.timeout_ms or 1000) / 1000),
            )
        )

    def send_cancel(self, request_id: str) -> None:
        payload = msgspec.json.encode(Cancel(request_id))
        self._transport.publish(Outbound(self._topics.cancel(self._tenant), payload, qos=1, expiry_s=60))

    def to_answer(self, frame: Final) -> Answer:
        return Answer(
            text=frame.choices[0].message.content,
            finish_reason=frame.choices[0].finish_reason,
            usage=frame.usage,
            timings=frame.timings,
            id=frame.id,
            device=self._topics.device,
            model=frame.model,
            seed=frame.seed,
            attempt=frame.attempt,
            cached=frame.cached,
            truncated=frame.truncated,
            metadata=frame.metadata,
        )

    def _offline(self, status: Status) -> EdgeError:
        return EdgeError(
            f"device {self._topics.device!r} is offline ({status.reason or 'unknown reason'})",
            remedy="start it with: edge-runtime serve",
        )

    def _tell_all(self, event: _Event) -> None:
        with self._news:
            inboxes = list(self._open.values())
        for inbox in inboxes:
            inbox.put(event)

    # ---- events of the connection

    def on_connected(self, limits: BrokerLimits) -> None:
        with self._news:
            self._news.notify_all()
        self._tell_all(_Resend(is_new_boot=False))

    def on_disconnected(self, reason: str) -> None:
        self._fault = reason

    def on_message(self, message: Inbound) -> None:
        try:
            if message.topic == self._topics.status:
                self._note_status(parse_status(message.payload))
            elif message.topic == self._topics.info:
                with self._news:
                    self.info = parse_info(message.payload)
                    self._news.notify_all()
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
            self._tell_all(_Resend(is_new_boot=True))

    def _note_reply(self, reply: Reply) -> None:
        with self._news:
            inbox = self._open.get(reply.id or "")
        if inbox is not None:
            inbox.put(reply)

    def on_published(self, token: int, code: int) -> None:
        """Nothing: an answer, not an acknowledgement, ends a request."""

    def on_dropped(self, tokens: tuple[int, ...]) -> None:
        """Nothing: the deadline ends a request that the broker can't take."""

    def on_warning(self, text: str) -> None:
        self._fault = text

    def on_client_id_taken(self) -> None:
        self._fault = "another connection uses our client id"


def _messages(prompt: Prompt) -> list[ChatMessage] | None:
    """Turn `{role, content}` mappings into messages. Raises RequestError naming the field at fault."""
    if isinstance(prompt, str):
        return None
    try:
        return msgspec.convert(list(prompt), list[ChatMessage])
    except msgspec.ValidationError as error:
        raise RequestError("invalid_request", f"messages: {error}", param="$.messages") from error
