"""Give the pieces of one answer as they come, whatever happens to connection and device meanwhile."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Iterator

import msgspec

from edge_runtime.client.answer import Answer, answer_of
from edge_runtime.client.link import Link, LinkEvent, Resend
from edge_runtime.client.order import PieceOrder
from edge_runtime.errors import EdgeError, PartialAnswer, RequestError
from edge_runtime.messages import Accepted, Chunk, ErrorFrame, Final, Request

GRACE_S = 5.0  # the device answers by the deadline; this much later the client stops waiting
# Refusals before anything ran: the same request may be sent again, under the same id.
TRY_AGAIN = frozenset({"queue_full", "quota_exceeded", "not_ready", "overloaded", "shutting_down", "model_unavailable"})
RETRY_MS = 250  # where the device names no time


class AnswerStream:
    """The pieces of one answer. Iterate once; afterwards `answer` is the whole.

    A request that fails after text was generated gives that text first, then raises RequestError with `partial`.
    Leaving the iteration early cancels the request.
    """

    def __init__(self, link: Link, request: Request, timeout_s: float) -> None:
        link.check_device()
        self._link = link
        self._request = request
        self._timeout_s = timeout_s
        self._ends = time.monotonic() + timeout_s
        self._send_at: float | None = None
        self._num_retries = 0
        self._inbox: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        self._order = PieceOrder()
        self._answer: Answer | None = None
        self._failure: RequestError | None = None
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
        try:
            while not self._has_ended:
                if piece := self._take(self._next_event()):
                    yield piece
            if self._failure is not None:
                raise self._failure
        finally:
            self._link.close_request(self.id)
            if not self._has_ended:
                self.cancel()

    @property
    def _has_ended(self) -> bool:
        return self._answer is not None or self._failure is not None

    def _next_event(self) -> LinkEvent:
        """Wait for a frame or for the time to send again. Raises RequestError after the deadline."""
        now = time.monotonic()
        if self._send_at is not None and self._send_at <= now:
            self._send()
        last = self._ends + GRACE_S
        if now >= last:
            raise RequestError(
                "deadline_exceeded", f"no answer within {self._timeout_s:g} s; {self._link.why_no_answer()}"
            )
        until = last if self._send_at is None else min(self._send_at, last)
        try:
            return self._inbox.get(timeout=max(0.0, until - now))
        except queue.Empty:
            return None

    def _take(self, event: LinkEvent) -> str:
        """Take one event and return the text that it releases."""
        if isinstance(event, EdgeError):
            raise event
        if isinstance(event, Resend):
            if event.is_new_boot:
                self._order.restart()
            self._send()
        elif isinstance(event, Accepted):
            return self._order.accept(event)
        elif isinstance(event, Chunk):
            return self._order.add(event.seq, event.choices[0].delta.content)
        elif isinstance(event, Final):
            self._answer = answer_of(event, self._link.device)
            return self._order.end(self._answer.text)
        elif isinstance(event, ErrorFrame):
            return self._retry_or_fail(event)
        return ""

    def _retry_or_fail(self, frame: ErrorFrame) -> str:
        """Plan to send a refused request again, or note the failure and return the text that came with it."""
        error, now = frame.error, time.monotonic()
        wait_s = (error.retry_after_ms or RETRY_MS) / 1000 * 1.5 ** min(self._num_retries, 6)
        if error.code in TRY_AGAIN and now + wait_s < self._ends:
            self._num_retries += 1
            self._send_at = now + wait_s
            return ""
        partial = PartialAnswer(frame.partial.content, frame.partial.completion_tokens) if frame.partial else None
        self._failure = RequestError(
            error.code, error.message, param=error.param, retry_after_ms=error.retry_after_ms, partial=partial
        )
        return self._order.end(partial.text) if partial else ""

    def _send(self) -> None:
        """Send the request, or leave it to the next connection."""
        self._send_at = None
        rest_s = max(0.001, self._ends - time.monotonic())
        self._link.send_request(msgspec.structs.replace(self._request, timeout_ms=math.ceil(rest_s * 1000)))
