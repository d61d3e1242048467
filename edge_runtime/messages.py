"""Define the wire messages of protocol version 1: parse and bound what comes in, encode what goes out.

The JSON Schemas published in `info.schema` are generated from these Structs. No topics (topics.py), no transport.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from edge_runtime.errors import RequestError

PROTOCOL = 1
SCHEMA_ID = "edge/v1"

# `\Z`, not `$`: msgspec's pattern search would accept a trailing newline with `$`.
TENANT = r"^[a-z0-9][a-z0-9_-]{0,31}\Z"
DEVICE = r"^[a-z0-9][a-z0-9_-]{0,63}\Z"
CLIENT = r"^[A-Za-z0-9_-]{1,64}\Z"
REQUEST_ID = r"^[A-Za-z0-9._:-]{1,64}\Z"

MAX_STOPS = 4
MAX_ERROR_TEXT = 500
RequestId = Annotated[str, Meta(pattern=REQUEST_ID)]
ServiceClass = Literal["realtime", "standard", "background"]
StopString = Annotated[str, Meta(min_length=1, max_length=64)]


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class TensorInput(Struct, frozen=True, forbid_unknown_fields=True):
    """One input of a plain (not generating) engine: flat row-major numbers, or base64 of little-endian bytes."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    shape: Annotated[list[Annotated[int, Meta(ge=0, le=2**31 - 1)]], Meta(max_length=8)]
    datatype: Annotated[str, Meta(max_length=16)]
    data: list[float] | str


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """When a chunk is sent: at the first of `chunk_tokens`, `chunk_ms`, a newline, the end. Null: as configured."""

    chunk_tokens: Annotated[int, Meta(ge=1, le=64)] | None = None
    chunk_ms: Annotated[int, Meta(ge=0, le=1000)] | None = None


class Request(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"service_class": "class"}):
    """One generation request. Exactly one of `messages`, `prompt`, `inputs` is given."""

    id: RequestId
    model: Annotated[str, Meta(min_length=1, max_length=128)]
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=256)] | None = None
    prompt: Annotated[str, Meta(min_length=1)] | None = None
    inputs: Annotated[list[TensorInput], Meta(min_length=1, max_length=16)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 128
    temperature: Annotated[float, Meta(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1000)] = 0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | StopString | None = None
    stream: bool = False
    ack: bool = False
    stream_options: StreamOptions = StreamOptions()
    timeout_ms: Annotated[int, Meta(ge=1, le=600_000)] | None = None
    service_class: ServiceClass = "standard"
    reply_to: Annotated[str, Meta(pattern=CLIENT)] | None = None
    metadata: Annotated[
        dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=256)]], Meta(max_length=16)
    ] = {}

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings: a bare string is one, null is none."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class OnlyId(Struct):
    """The one field that is wanted of a message which did not parse."""

    id: RequestId


class OnlyReplyTo(Struct):
    """Where the error of a message goes which did not parse."""

    reply_to: Annotated[str, Meta(pattern=CLIENT)]


class Cancel(Struct, frozen=True, forbid_unknown_fields=True):
    """Stop one request of the same tenant, by its id."""

    id: RequestId


class Usage(Struct, frozen=True):
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class Timings(Struct, frozen=True):
    """Milliseconds of one request: in the queue, in prefill, to the first token, per later token, end to end."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    e2e_ms: float = 0.0


class Accepted(
    Struct, frozen=True, kw_only=True, tag_field="object", tag="accepted", rename={"service_class": "class"}
):
    """The request is queued; sent when `stream` or `ack` asks for it."""

    id: str
    seq: int
    device: str
    boot_id: str
    service_class: ServiceClass
    queue_pos: int
    deadline_ms: int
    duplicate: bool = False


class Delta(Struct, frozen=True):
    """New text since the chunk before."""

    content: str


class ChunkChoice(Struct, frozen=True):
    """The one choice of a chunk."""

    delta: Delta
    index: int = 0
    finish_reason: None = None


class Chunk(Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion.chunk"):
    """A piece of the answer: whole code points."""

    id: str
    seq: int
    model: str
    created: int
    choices: list[ChunkChoice]


FinishReason = Literal["stop", "length", "cancelled", "deadline"]


class FinalMessage(Struct, frozen=True):
    """The whole answer."""

    content: str
    role: Literal["assistant"] = "assistant"


class FinalChoice(Struct, frozen=True):
    """The one choice of a final frame."""

    message: FinalMessage
    finish_reason: FinishReason
    index: int = 0


class Final(Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion"):
    """The terminal frame of a request that produced an answer, whole or partial."""

    id: str
    seq: int
    model: str
    created: int
    choices: list[FinalChoice]
    usage: Usage
    timings: Timings
    last: Literal[True] = True
    chunks: int = 0
    attempt: int = 1
    preemptions: int = 0
    seed: int | None = None  # the seed really used
    cached: bool = False
    truncated: bool = False
    metadata: dict[str, str] = {}


class ErrorBody(Struct, frozen=True):
    """What went wrong; `code` is a key of ERROR_TABLE."""

    code: str
    type: str
    message: str
    status: int
    retryable: bool
    param: str | None = None
    retry_after_ms: int | None = None


class Partial(Struct, frozen=True):
    """What had been generated before a failure."""

    content: str
    completion_tokens: int


class ErrorFrame(Struct, frozen=True, kw_only=True, tag_field="object", tag="error", omit_defaults=False):
    """The terminal frame of a refused or failed request; `id` is null when it could not be read."""

    id: str | None
    seq: int
    error: ErrorBody
    last: Literal[True] = True
    partial: Partial | None = None
    cached: bool = False
    metadata: dict[str, str] = {}


DeviceState = Literal["starting", "online", "recovering", "failed", "draining", "offline"]


class Status(Struct, frozen=True, kw_only=True):
    """Presence of a device, retained. The will has only the first three fields."""

    state: DeviceState
    boot_id: str
    reason: str = ""
    seq: int = 0  # counts publications of one boot
    ready: bool = False
    since_s: float = 0.0  # in this state
    queue: int = 0
    running: int = 0
    kv_used: float = 0.0  # share of the KV rows, 0..1
    p50_ms: float = 0.0  # of the latest steps
    p99_ms: float = 0.0
    worker_restarts: int = 0
    alerts: list[str] = []


class Info(Struct, frozen=True, kw_only=True):
    """Facts about a device that change only with its restart or its engine, retained."""

    version: str
    boot_id: str
    device: str
    model: str
    backend: dict[str, str]
    engine: dict[str, str]
    limits: dict[str, int]
    features: list[str]
    schema: dict[str, Any] = {}


class Event(Struct, frozen=True, kw_only=True):
    """Something that happened on a device; not retained."""

    event: str
    boot_id: str
    reason: str = ""
    facts: dict[str, str] = {}


Reply = Accepted | Chunk | Final | ErrorFrame
TERMINAL_STATUS: dict[str, int] = {"stop": 200, "length": 200, "cancelled": 206, "deadline": 206}


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Fixed facts of one error code: its group, its HTTP-like status, whether trying again can help."""

    type: str
    status: int
    retryable: bool


_INVALID, _PERMISSION, _RATE, _TIMEOUT, _SERVER = (
    "invalid_request_error",
    "permission_error",
    "rate_limit_error",
    "timeout_error",
    "server_error",
)
ERROR_TABLE: dict[str, ErrorKind] = {
    "invalid_json": ErrorKind(_INVALID, 400, False),
    "invalid_request": ErrorKind(_INVALID, 400, False),
    "unsupported_media_type": ErrorKind(_INVALID, 415, False),
    "payload_too_large": ErrorKind(_INVALID, 413, False),
    "unknown_tenant": ErrorKind(_PERMISSION, 403, False),
    "class_not_allowed": ErrorKind(_PERMISSION, 403, False),
    "model_not_found": ErrorKind(_INVALID, 404, False),
    "model_unavailable": ErrorKind(_SERVER, 503, True),
    "quota_exceeded": ErrorKind(_RATE, 429, True),
    "context_length_exceeded": ErrorKind(_INVALID, 400, False),
    "queue_full": ErrorKind(_RATE, 429, True),
    "deadline_exceeded": ErrorKind(_TIMEOUT, 408, True),
    "id_conflict": ErrorKind(_INVALID, 409, False),
    "worker_restarted": ErrorKind(_SERVER, 503, True),
    "request_quarantined": ErrorKind(_INVALID, 422, False),
    "numeric_error": ErrorKind(_SERVER, 500, True),
    "internal_error": ErrorKind(_SERVER, 500, True),
    "shutting_down": ErrorKind(_SERVER, 503, True),
    "not_ready": ErrorKind(_SERVER, 503, True),
    "overloaded": ErrorKind(_SERVER, 503, True),
}

_T = TypeVar("_T")


def parse_request(payload: bytes) -> Request:
    """Decode and bound one request. Raises RequestError with the field at fault in `param`."""
    request = _decode(payload, Request)
    given = [n for n in ("messages", "prompt", "inputs") if getattr(request, n) is not None]
    if len(given) != 1:
        raise RequestError(
            "invalid_request",
            f"exactly one of messages, prompt, inputs is required; got {', '.join(given) or 'none'}",
            param="$.messages",
        )
    return request


def parse_cancel(payload: bytes) -> Cancel:
    """Decode one cancel message. Raises RequestError."""
    return _decode(payload, Cancel)


def parse_reply(payload: bytes) -> Reply:
    """Decode a frame of the device (client side). Unknown fields are ignored, so newer devices stay readable."""
    return _decode(payload, Reply)  # type: ignore[arg-type]  # a union of Structs is a valid msgspec type


def parse_status(payload: bytes) -> Status:
    """Decode a status message, or the will. Raises RequestError."""
    return _decode(payload, Status)


def parse_info(payload: bytes) -> Info:
    """Decode an info message (client side). Raises RequestError."""
    return _decode(payload, Info)


def encode(message: Struct) -> bytes:
    """Encode one outgoing frame as compact JSON. NaN or infinity in a number is a bug of ours and raises ValueError."""
    payload = msgspec.json.encode(message)
    if isinstance(message, Final) and not _is_finite(message.timings):
        raise ValueError(f"non-finite number in {message.timings}")
    return payload


def readable_id(payload: bytes) -> str | None:
    """Find the id of a request that did not parse, so that its error can be matched; None when there is none."""
    found = _read_leniently(payload, OnlyId)
    return found.id if found else None


def readable_reply_to(payload: bytes) -> str | None:
    """Find `reply_to` of a request that did not parse, so that its error can be sent there; None when there is none."""
    found = _read_leniently(payload, OnlyReplyTo)
    return found.reply_to if found else None


def error_body(error: RequestError) -> ErrorBody:
    """Turn a refusal into its wire form."""
    kind = ERROR_TABLE[error.code]
    return ErrorBody(
        code=error.code,
        type=kind.type,
        message=str(error)[:MAX_ERROR_TEXT],  # it may quote a field name of the request, which has any length
        status=kind.status,
        retryable=kind.retryable,
        param=error.param[:MAX_ERROR_TEXT] if error.param else None,
        retry_after_ms=error.retry_after_ms,
    )


def json_schemas() -> dict[str, Any]:
    """Return the JSON Schemas of all messages of this protocol version, keyed by their name."""
    types = (Request, Cancel, Accepted, Chunk, Final, ErrorFrame, Status, Info, Event)
    _, components = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    return {"$id": SCHEMA_ID, "$defs": components}


def _read_leniently(payload: bytes, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _decode(payload: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(payload, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        raise RequestError("invalid_request", text, param=_param_of(text)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError("invalid_json", f"payload is not valid JSON: {error}") from error
    except RecursionError as error:
        raise RequestError("invalid_json", "payload is nested too deeply") from error


def _param_of(text: str) -> str | None:
    """Read the path of the field at fault from msgspec's message ("... at `$.x`", "... in `$.x`", "... field `x`")."""
    if match := re.search(r"(?:at|in) `(\$[^`]*)`", text):
        path = match.group(1)
        if field := re.search(r"(?:unknown|required) field `([^`]*)`", text):
            return f"{path}.{field.group(1)}"
        return path
    if match := re.search(r"field `([^`]*)`", text):
        return f"$.{match.group(1)}"
    return None


def _is_finite(timings: Timings) -> bool:
    return all(abs(value) < float("inf") for value in msgspec.structs.astuple(timings))
