"""Define what supervisor and worker say to each other, and carry it over a socket pair.

A frame is a 4-byte big-endian length, then msgpack of one tagged Struct (tag field `type`), at most 4 MiB. Requests are
keyed by an integer that the supervisor chooses, not by the client's id.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import Struct

from edge_runtime.messages import FinishReason

FRAME_PROTOCOL = 1
MAX_FRAME = 4 << 20
_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """The other side broke the frame protocol: the worker is restarted."""


# ---- to the worker


class Init(Struct, frozen=True, kw_only=True, tag_field="type", tag="init"):
    """First frame to a worker: what to load and how."""

    protocol: int = FRAME_PROTOCOL
    model: str
    engine: str  # folder
    threads: int = 0
    spinning: bool | None = None
    prefill_chunk: int = 64
    max_batch: int = 2
    heartbeat_s: float = 1.0


class Submit(Struct, frozen=True, kw_only=True, tag_field="type", tag="submit"):
    """One request to run."""

    key: int
    tenant: str
    service_class: str
    messages: list[dict[str, str]] | None = None
    prompt: str | None = None
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: list[str] = []
    chunk_tokens: int = 8
    chunk_ms: int = 50
    stream: bool = False
    deadline_s: float = 60.0  # seconds left when the frame was written


class Cancel(Struct, frozen=True, tag_field="type", tag="cancel"):
    """Stop one request; it answers with `finished` and this reason, or `failed` when its deadline passed in the queue.

    An unknown key is ignored: the answer and the cancel may cross.
    """

    key: int
    reason: Literal["cancelled", "deadline"] = "cancelled"


class Stop(Struct, frozen=True, tag_field="type", tag="stop"):
    """Finish what runs within `grace_s`, then exit 0; what is left ends as `cancelled`."""

    grace_s: float = 0.0


# ---- from the worker


class Hello(Struct, frozen=True, kw_only=True, tag_field="type", tag="hello"):
    """First frame of a worker."""

    protocol: int = FRAME_PROTOCOL
    pid: int
    version: str


class Progress(Struct, frozen=True, tag_field="type", tag="progress"):
    """Where loading stands; `percent` 0..100."""

    phase: str
    percent: float


class Ready(Struct, frozen=True, kw_only=True, tag_field="type", tag="ready"):
    """The engine is loaded and warm."""

    backend: dict[str, str]
    slots: int
    capacity: int
    max_prompt: int
    precision: str
    engine_sha256: str
    start_seconds: dict[str, float]  # read, load, warm-up


class Started(Struct, frozen=True, kw_only=True, tag_field="type", tag="started"):
    """A request left the queue and its prompt is known."""

    key: int
    prompt_tokens: int
    prepare_ms: float
    seed: int | None


class Tokens(Struct, frozen=True, kw_only=True, tag_field="type", tag="tokens"):
    """New text of a request: whole code points, `count` tokens since the frame before."""

    key: int
    text: str
    count: int


class Finished(Struct, frozen=True, kw_only=True, tag_field="type", tag="finished"):
    """A request ended with an answer; `text` is all of it."""

    key: int
    reason: FinishReason
    text: str
    prompt_tokens: int
    completion_tokens: int
    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    tpot_ms: float
    seed: int | None = None


class Failed(Struct, frozen=True, kw_only=True, tag_field="type", tag="failed"):
    """A request was refused by the worker or broke; `code` is a key of messages.ERROR_TABLE."""

    key: int
    code: str
    message: str
    param: str | None = None
    text: str = ""  # what had been generated
    completion_tokens: int = 0


class DeviceError(Struct, frozen=True, kw_only=True, tag_field="type", tag="cuda_error"):
    """The device reported an error; a sticky one means that its context is lost."""

    code: int
    where: str
    sticky: bool


class Heartbeat(Struct, frozen=True, kw_only=True, tag_field="type", tag="heartbeat"):
    """Sent every `heartbeat_s` from a thread of its own, so that it also tells of a step that hangs."""

    seq: int
    phase: str  # loading, warming, serving, stopping
    step_count: int
    step_age_s: float  # seconds since the running step began; 0 when idle
    rows_busy: int
    kv_tokens: int
    rss_bytes: int
    useful_tokens: int
    computed_tokens: int
    step_ms: list[float]  # times of the steps since the beat before
    nan_count: int


ToWorker = Init | Submit | Cancel | Stop
FromWorker = Hello | Progress | Ready | Started | Tokens | Finished | Failed | DeviceError | Heartbeat


def encode_frame(message: ToWorker | FromWorker) -> bytes:
    """Encode one frame, length included. Raises FrameError above MAX_FRAME."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME:
        raise FrameError(f"frame of {len(body)} bytes, at most {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cut a byte stream into frames of one direction (`ToWorker` or `FromWorker`)."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add bytes and yield the frames that are now complete. Raises FrameError for what is not a frame."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if not 0 < size <= MAX_FRAME:
                raise FrameError(f"frame length {size}, allowed 1..{MAX_FRAME}")
            if len(self._buffer) < _LENGTH.size + size:
                return
            body = bytes(self._buffer[_LENGTH.size : _LENGTH.size + size])
            del self._buffer[: _LENGTH.size + size]
            try:
                yield self._decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise FrameError(f"undecodable frame: {error}") from error
