"""Hold what the supervisor knows of one admitted request until its terminal frame."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from edge_runtime.messages import Request
from edge_runtime.worker.frames import Submit

ANY_ID = "-"


@dataclass(frozen=True, slots=True)
class Route:
    """Where the frames of one request go, and what is echoed in each of them."""

    topic: str
    correlation: bytes | None = None
    traceparent: str | None = None


@dataclass(slots=True, kw_only=True)
class LiveRequest:
    """One admitted request. Times are boot-time seconds."""

    key: int  # its name between supervisor and worker
    tenant: str
    request: Request
    fingerprint: bytes
    route: Route
    received: float
    deadline: float
    attempt: int = 1
    seq: int = 0  # of the next frame
    submitted: float | None = None  # when the worker got it; None = in our queue
    has_started: bool = False  # the worker has begun to compute
    cancel: Literal["cancelled", "deadline"] | None = None  # why it is to be stopped
    is_cancel_sent: bool = False
    text: list[str] = field(default_factory=list)  # what the worker has generated in this attempt
    completion_tokens: int = 0
    prompt_tokens: int = 0
    chunks: int = 0
    first_token: float | None = None
    probed: float = 0.0  # when the last chunk at QoS 1 was sent
    unheard: int = 0  # chunks at QoS 1 in a row that no subscriber matched

    @property
    def name(self) -> tuple[str, str]:
        """What makes it the same request when it arrives again."""
        return self.tenant, self.request.id

    def next_seq(self) -> int:
        """Number one more frame."""
        self.seq += 1
        return self.seq - 1

    def restart(self) -> None:
        """Go back to the queue after a worker death: nothing of the attempt counts."""
        self.attempt += 1
        self.submitted = self.first_token = None
        self.has_started = self.is_cancel_sent = False
        self.text.clear()
        self.completion_tokens = self.prompt_tokens = 0


def fingerprint(request: Request) -> bytes:
    """Digest what is asked, apart from id, timeout and reply topic: equal exactly when the same answer is wanted."""
    plain = msgspec.structs.replace(request, id=ANY_ID, timeout_ms=None, reply_to=None)
    return hashlib.sha256(msgspec.json.encode(plain)).digest()


def to_submit(live: LiveRequest, now: float, *, chunk_tokens: int, chunk_ms: int) -> Submit:
    """Turn a request into the worker's frame; the chunk sizes apply where the client names none."""
    request, options = live.request, live.request.stream_options
    return Submit(
        key=live.key,
        tenant=live.tenant,
        service_class=request.service_class,
        messages=[{"role": m.role, "content": m.content} for m in request.messages] if request.messages else None,
        prompt=request.prompt,
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        stop=list(request.stops),
        chunk_tokens=chunk_tokens if options.chunk_tokens is None else options.chunk_tokens,
        chunk_ms=chunk_ms if options.chunk_ms is None else options.chunk_ms,
        stream=request.stream,
        deadline_s=max(0.0, live.deadline - now),
    )
