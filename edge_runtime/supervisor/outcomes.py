"""Turn the end of a request into its terminal frame. Pure."""

from __future__ import annotations

import time
from typing import Literal

from edge_runtime.errors import RequestError
from edge_runtime.messages import (
    ERROR_TABLE,
    ErrorFrame,
    Final,
    FinalChoice,
    FinalMessage,
    FinishReason,
    Partial,
    Timings,
    Usage,
    error_body,
)
from edge_runtime.supervisor.requests import LiveRequest
from edge_runtime.worker.frames import Failed, Finished

RESTART_RETRY_MS = 1000


def finished(live: LiveRequest, frame: Finished, now: float, model: str) -> Final:
    """End with the worker's answer. The worker's times begin when it got the request, ours when we did."""
    waited_ms = ((live.submitted or now) - live.received) * 1000
    timings = Timings(
        queue_ms=waited_ms + frame.queue_ms,
        prefill_ms=frame.prefill_ms,
        ttft_ms=waited_ms + frame.ttft_ms if frame.completion_tokens else 0.0,
        tpot_ms=frame.tpot_ms,
        e2e_ms=(now - live.received) * 1000,
    )
    usage = Usage(frame.prompt_tokens, frame.completion_tokens, frame.prompt_tokens + frame.completion_tokens)
    return _final(live, frame.reason, frame.text, usage, timings, model, seed=frame.seed)


def cancelled(live: LiveRequest, now: float, reason: Literal["cancelled", "deadline"], model: str) -> Final:
    """End without the worker, with the text that it has sent so far."""
    usage = Usage(live.prompt_tokens, live.completion_tokens, live.prompt_tokens + live.completion_tokens)
    timings = Timings(
        queue_ms=((live.submitted or now) - live.received) * 1000,
        ttft_ms=((live.first_token or live.received) - live.received) * 1000,
        e2e_ms=(now - live.received) * 1000,
    )
    return _final(live, reason, "".join(live.text), usage, timings, model, seed=live.request.seed)


def failed(live: LiveRequest, error: RequestError) -> ErrorFrame:
    """End with an error, and with the text that has been sent so far."""
    partial = Partial("".join(live.text), live.completion_tokens) if live.text else None
    return _error(live, error, partial)


def failed_by_worker(live: LiveRequest, frame: Failed) -> ErrorFrame:
    """End with the worker's refusal or failure; a code that the wire does not know is an internal error."""
    code = frame.code if frame.code in ERROR_TABLE else "internal_error"
    partial = Partial(frame.text, frame.completion_tokens) if frame.text else None
    return _error(live, RequestError(code, frame.message, param=frame.param), partial)


def restart_error() -> RequestError:
    """Say that the worker died after text was sent: two generations are never joined."""
    return RequestError(
        "worker_restarted", "the worker died while it answered; send it again", retry_after_ms=RESTART_RETRY_MS
    )


def internal_error() -> RequestError:
    """Say that the fault is ours."""
    return RequestError("internal_error", "a fault of this device, see its log; the request itself may be right")


def quarantine_error() -> RequestError:
    """Say that a request was running at two worker deaths."""
    return RequestError("request_quarantined", "the worker died twice while it ran this request; it is refused now")


def _final(
    live: LiveRequest, reason: FinishReason, text: str, usage: Usage, timings: Timings, model: str, *, seed: int | None
) -> Final:
    return Final(
        id=live.request.id,
        seq=live.next_seq(),
        model=model,
        created=int(time.time()),
        choices=[FinalChoice(FinalMessage(text), reason)],
        usage=usage,
        timings=timings,
        chunks=live.chunks,
        attempt=live.attempt,
        seed=seed,
        metadata=live.request.metadata,
    )


def _error(live: LiveRequest, error: RequestError, partial: Partial | None) -> ErrorFrame:
    return ErrorFrame(
        id=live.request.id,
        seq=live.next_seq(),
        error=error_body(error),
        partial=partial,
        metadata=live.request.metadata,
    )
