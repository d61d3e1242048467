"""Build the frames that go back to a client: bodies, properties, QoS and lifetime. Decides nothing about requests."""

from __future__ import annotations

import time

import msgspec

from edge_runtime.errors import RequestError
from edge_runtime.messages import (
    TERMINAL_STATUS,
    Accepted,
    Chunk,
    ChunkChoice,
    Delta,
    ErrorFrame,
    Final,
    FinalChoice,
    FinalMessage,
    Partial,
    encode,
    error_body,
)
from edge_runtime.supervisor.outbox import Item, Kind
from edge_runtime.supervisor.requests import LiveRequest, Route
from edge_runtime.supervisor.transport import BrokerLimits, Outbound

TERMINAL_GRACE_S = 60.0  # a terminal frame outlives the deadline, so that a client that was away still gets it
PROBE_S = 2.0  # one chunk per this time goes out at QoS 1: its PUBACK tells whether anybody listens


class Replies:
    """Frames of one device; none has a payload above `response_bytes`."""

    def __init__(self, device: str, boot_id: str, model: str, response_bytes: int) -> None:
        self._device = device
        self._boot_id = boot_id
        self._model = model
        self._response_bytes = response_bytes
        self._packet_bytes = BrokerLimits().packet_bytes

    def limit_packet(self, packet_bytes: int) -> None:
        """Follow the broker's largest packet, topic and properties included."""
        self._packet_bytes = packet_bytes

    def accepted(self, live: LiveRequest, *, queue_pos: int, now: float, duplicate: bool = False) -> Item:
        """Tell that a request is queued, or known already."""
        frame = Accepted(
            id=live.request.id,
            seq=live.next_seq(),
            device=self._device,
            boot_id=self._boot_id,
            service_class=live.request.service_class,
            queue_pos=queue_pos,
            deadline_ms=max(0, round((live.deadline - now) * 1000)),
            duplicate=duplicate,
        )
        return self._item("reply", live.route, encode(frame), live.deadline, frame.id, frame.seq, qos=1)

    def chunk(self, live: LiveRequest, text: str, now: float) -> Item:
        """Carry new text. The first chunk and one every two seconds ask for an acknowledgement."""
        is_probe = live.chunks == 0 or now - live.probed >= PROBE_S
        if is_probe:
            live.probed = now
        live.chunks += 1
        frame = Chunk(
            id=live.request.id,
            seq=live.next_seq(),
            model=self._model,
            created=int(time.time()),
            choices=[ChunkChoice(Delta(text))],
        )
        return self._item(
            "chunk", live.route, encode(frame), live.deadline, frame.id, frame.seq, qos=int(is_probe), key=live.key
        )

    def terminal(self, frame: Final | ErrorFrame, route: Route, expires_at: float, kind: Kind) -> Item:
        """Carry a terminal frame as it is; it must fit."""
        status = frame.error.status if isinstance(frame, ErrorFrame) else _status_of(frame)
        return self._item(
            kind, route, encode(frame), expires_at + TERMINAL_GRACE_S, frame.id, frame.seq, qos=1, status=status
        )

    def refusal(self, request_id: str | None, route: Route, error: RequestError, now: float) -> Item:
        """Answer a request that was never admitted."""
        return self.terminal(ErrorFrame(id=request_id, seq=0, error=error_body(error)), route, now, "reply")

    def fit(self, frame: Final | ErrorFrame, route: Route) -> Final | ErrorFrame:
        """Cut the text of a frame at a code point so that it fits; drop the metadata when that is not enough."""
        whole = self.terminal(frame, route, 0.0, "reply").message
        room = min(self._response_bytes, self._packet_bytes - (whole.wire_bytes - len(whole.payload)))
        if len(whole.payload) <= room:
            return frame
        if frame.metadata and len(encode(_with_text(frame, ""))) > room:
            return self.fit(msgspec.structs.replace(frame, metadata={}), route)
        text = _text_of(frame)
        low, high = 0, len(text)  # the longest prefix that fits lies in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if len(encode(_with_text(frame, text[:middle]))) <= room else (low, middle)
        return _with_text(frame, text[:low])

    def _item(
        self,
        kind: Kind,
        route: Route,
        payload: bytes,
        expires_at: float,
        request_id: str | None,
        seq: int,
        *,
        qos: int,
        key: int = 0,
        status: int | None = None,
    ) -> Item:
        properties = [("e-seq", str(seq)), ("e-dev", self._device)]
        if request_id is not None:
            properties.insert(0, ("e-id", request_id))
        if status is not None:
            properties += [("e-last", "1"), ("e-status", str(status))]
        if route.traceparent is not None:
            properties.append(("traceparent", route.traceparent))
        message = Outbound(route.topic, payload, qos, correlation=route.correlation, user_properties=tuple(properties))
        return Item(message, kind, key, expires_at)


def _status_of(frame: Final) -> int:
    return TERMINAL_STATUS[frame.choices[0].finish_reason]


def _text_of(frame: Final | ErrorFrame) -> str:
    """Return the generated text of a terminal frame."""
    if isinstance(frame, Final):
        return frame.choices[0].message.content
    return frame.partial.content if frame.partial else ""


def _with_text(frame: Final | ErrorFrame, text: str) -> Final | ErrorFrame:
    """Put a shorter text into a terminal frame."""
    if isinstance(frame, Final):
        choice = FinalChoice(FinalMessage(text), frame.choices[0].finish_reason)
        return msgspec.structs.replace(frame, choices=[choice], truncated=True)
    if frame.partial is None:
        return frame
    return msgspec.structs.replace(frame, partial=Partial(text, frame.partial.completion_tokens))
