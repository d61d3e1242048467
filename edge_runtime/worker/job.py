"""Keep what the supervisor wants to know about one request besides its tokens: times, chunks, reply frames."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.serving.chunks import ChunkBuffer
from edge_runtime.serving.sequence import Sequence
from edge_runtime.worker.frames import Failed, Finished, Started, Tokens


@dataclass(slots=True, eq=False, kw_only=True)
class Job:
    """One request in the worker. Times are seconds of the loop's clock."""

    seq: Sequence
    chunks: ChunkBuffer | None  # None: the answer is not streamed
    received: float
    deadline: float
    prepare_ms: float
    started: float | None = None  # its first prefill step began
    first_token: float | None = None
    last_token: float | None = None
    num_streamed: int = 0  # tokens handed to `chunks`

    @property
    def key(self) -> int:
        """The supervisor's number for the request."""
        return self.seq.key

    def note_token(self, text: str, now: float) -> None:
        """Note that a token was sampled at `now` and made `text` certain."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
        self.note_text(text, now)

    def note_text(self, text: str, now: float) -> None:
        """Hand certain text, and the tokens since the last call, to the stream."""
        if self.chunks is not None:
            self.chunks.push(text, len(self.seq.output) - self.num_streamed, now)
            self.num_streamed = len(self.seq.output)

    def started_frame(self) -> Started:
        """Tell that the request left the queue."""
        seq = self.seq
        return Started(key=seq.key, prompt_tokens=len(seq.prompt), prepare_ms=self.prepare_ms, seed=seq.sampler.seed)

    def tokens_frame(self, now: float, *, is_end: bool = False) -> Tokens | None:
        """Return the chunk that is due, if any; at the end of the answer whatever is left is due."""
        chunk = self.chunks and self.chunks.take(now, is_end=is_end)
        return Tokens(key=self.key, text=chunk[0], count=chunk[1]) if chunk else None

    def finished_frame(self, now: float) -> Finished:
        """Tell the whole answer of a sequence that has a finish reason."""
        seq = self.seq
        assert seq.finish_reason is not None
        started = now if self.started is None else self.started
        first = started if self.first_token is None else self.first_token
        num_later = len(seq.output) - 1
        return Finished(
            key=seq.key,
            reason=seq.finish_reason,
            text=seq.text,
            prompt_tokens=len(seq.prompt),
            completion_tokens=len(seq.output),
            queue_ms=(started - self.received) * 1000,
            prefill_ms=(first - started) * 1000,
            ttft_ms=0.0 if self.first_token is None else (first - self.received) * 1000,
            tpot_ms=(self.last_token - first) * 1000 / num_later if self.last_token and num_later > 0 else 0.0,
            seed=seq.sampler.seed,
        )

    def failed_frame(self, code: str, message: str, param: str | None) -> Failed:
        """Tell why there is no whole answer, and what there is of it."""
        seq = self.seq
        return Failed(
            key=seq.key, code=code, message=message, param=param, text=seq.text, completion_tokens=len(seq.output)
        )
