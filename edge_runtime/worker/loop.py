"""Serve requests step by step: read frames, compute one step, send what became certain, again.

One thread owns session, scheduler and jobs. Frames, cancels and deadlines are acted on between steps, never within.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from structlog.typing import FilteringBoundLogger

from edge_runtime.backends import Float32
from edge_runtime.errors import RequestError
from edge_runtime.messages import FinishReason
from edge_runtime.serving.chunks import ChunkBuffer
from edge_runtime.serving.scheduler import Prefill, Scheduler
from edge_runtime.serving.sequence import Sequence
from edge_runtime.session.session import Session
from edge_runtime.session.text import TextCodec
from edge_runtime.worker.frames import Cancel, Failed, FrameError, FromWorker, Stop, Submit, ToWorker
from edge_runtime.worker.heartbeat import Pulse
from edge_runtime.worker.job import Job
from edge_runtime.worker.link import Link, LinkClosedError
from edge_runtime.worker.prepare import prepare

_MAX_WAITING = 8  # a safety net: the supervisor keeps at most one more request here than there are slots
_FATAL = (MemoryError, LinkClosedError)  # no request's own fault: the process ends


class WorkerLoop:
    """The step loop of one engine. `chunk` is the most prompt tokens per prefill step."""

    def __init__(
        self,
        link: Link,
        session: Session,
        codec: TextCodec | None,
        pulse: Pulse,
        log: FilteringBoundLogger,
        *,
        slots: int,
        chunk: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._session = session
        self._codec = codec
        self._pulse = pulse
        self._clock = clock
        self._log = log
        self._scheduler = Scheduler(slots=slots, chunk=chunk, max_waiting=_MAX_WAITING)
        self._jobs: dict[int, Job] = {}
        self._stop_at: float | None = None

    def run(self) -> None:
        """Serve until a `stop` has been obeyed. Raises LinkClosedError, FrameError, MemoryError."""
        while self._stop_at is None or self._jobs:
            self.turn()

    def turn(self) -> None:
        """Do one round; without any request it waits for frames."""
        self._read_frames()
        self._end_overdue()
        self._step()
        self._send_chunks()
        self._note_load()

    # ---- what comes in

    def _read_frames(self) -> None:
        """Handle what has come in; wait for it only when there is nothing to compute."""
        for frame in self._link.receive(0 if self._jobs else None):
            self._handle(frame)

    def _handle(self, frame: ToWorker) -> None:
        match frame:
            case Submit():
                self._admit(frame)
            case Cancel(key, reason):
                if job := self._jobs.get(key):
                    self._end(job, reason)
            case Stop(grace_s):
                self._pulse.phase = "stopping"
                self._stop_at = self._clock() + grace_s
            case _:
                raise FrameError(f"unexpected frame {type(frame).__name__} to a serving worker")

    def _admit(self, submit: Submit) -> None:
        received = self._clock()
        if submit.key in self._jobs:
            raise FrameError(f"key {submit.key} belongs to a request that is still held")
        try:
            self._jobs[submit.key] = self._prepare(submit, received)
        except _FATAL:
            raise
        except Exception as error:
            refusal = self._as_request_error(error, submit.key)
            failed = Failed(key=submit.key, code=refusal.code, message=str(refusal), param=refusal.param)
            self._link.send(failed)

    def _prepare(self, submit: Submit, received: float) -> Job:
        if self._stop_at is not None:
            raise RequestError("shutting_down", "the worker is stopping and takes no new requests")
        seq = prepare(submit, self._codec, self._session.manifest)
        self._scheduler.submit(seq)
        return Job(
            seq=seq,
            chunks=ChunkBuffer(submit.chunk_tokens, submit.chunk_ms) if submit.stream else None,
            received=received,
            deadline=received + submit.deadline_s,
            prepare_ms=(self._clock() - received) * 1000,
        )

    def _end_overdue(self) -> None:
        now = self._clock()
        is_over = self._stop_at is not None and now >= self._stop_at
        for job in list(self._jobs.values()):
            if now >= job.deadline:
                self._end(job, "deadline")
            elif is_over:
                self._end(job, "cancelled")

    # ---- one step

    def _step(self) -> None:
        step = self._scheduler.next_step()
        if step is None:
            return
        if isinstance(step, Prefill):
            self._prefill(step)
        else:
            self._decode(step.seqs)

    def _prefill(self, step: Prefill) -> None:
        job = self._jobs[step.seq.key]
        with self._rim(job):
            slot = _slot_of(step.seq)
            if job.started is None:
                self._start(job, slot)
            with self._pulse.step(len(step.ids)):
                logits = self._session.prefill(slot, step.ids, step.start)  # [V]
            step.seq.advance(len(step.ids))
            self._check_finite(step.seq)
            if step.is_last:
                self._take(job, logits)

    def _start(self, job: Job, slot: int) -> None:
        self._session.reset(slot)
        job.started = self._clock()
        self._link.send(job.started_frame())

    def _decode(self, seqs: tuple[Sequence, ...]) -> None:
        try:
            logits = self._decode_logits(seqs)  # [n, V]
        except _FATAL:
            raise
        except Exception as error:
            if len(seqs) == 1:
                self._fail(self._jobs[seqs[0].key], error)
            else:  # alone, only the one that broke the step fails
                for seq in seqs:
                    self._decode((seq,))
            return
        for i, seq in enumerate(seqs):
            job = self._jobs[seq.key]
            with self._rim(job):
                seq.advance(1)
                self._check_finite(seq)
                self._take(job, logits[i])

    def _decode_logits(self, seqs: tuple[Sequence, ...]) -> Float32:
        slots = [_slot_of(seq) for seq in seqs]
        with self._pulse.step(len(seqs)):
            return self._session.decode(slots, [seq.output[-1] for seq in seqs], [seq.position for seq in seqs])

    def _check_finite(self, seq: Sequence) -> None:
        if seq.slot in self._session.bad_slots:
            self._pulse.nan_count += 1
            done = len(seq.output)
            raise RequestError(
                "numeric_error",
                f"the model's logits hold a NaN or an infinity at step {done + 1} of the answer, "
                f"after {done} good tokens",
            )

    def _take(self, job: Job, logits: Float32) -> None:
        """Sample the next token of a job from `logits` [V]."""
        text = job.seq.append(job.seq.sample(logits))
        job.note_token(text, self._clock())
        if job.seq.is_done:
            self._finish(job)

    def _note_load(self) -> None:
        running = self._scheduler.running
        self._pulse.rows_busy = len(running)
        self._pulse.kv_tokens = sum(seq.position for seq in running)

    # ---- what goes out

    def _send_chunks(self) -> None:
        now = self._clock()
        for job in self._jobs.values():
            if frame := job.tokens_frame(now):
                self._link.send(frame)

    def _end(self, job: Job, reason: FinishReason) -> None:
        """End a job before its time, with the text it has."""
        if reason == "deadline" and job.started is None:
            waited_ms = (self._clock() - job.received) * 1000
            message = f"the deadline passed after {waited_ms:.0f} ms in the worker's queue; nothing was computed"
            self._fail(job, RequestError("deadline_exceeded", message))
            return
        job.note_text(job.seq.finish(reason), self._clock())
        self._finish(job)

    def _finish(self, job: Job) -> None:
        now = self._clock()
        self._release(job, now, job.finished_frame(now))

    def _fail(self, job: Job, error: Exception) -> None:
        refusal = self._as_request_error(error, job.key)
        now = self._clock()
        if refusal is error:  # after a bug in the text parts they are not asked for their tail
            job.note_text(job.seq.finish(None), now)
        self._release(job, now, job.failed_frame(refusal.code, str(refusal), refusal.param))

    def _release(self, job: Job, now: float, last: FromWorker) -> None:
        """Free everything a job holds, then send what is left of its stream and its terminal frame."""
        self._scheduler.finish(job.seq)
        del self._jobs[job.key]
        if rest := job.tokens_frame(now, is_end=True):
            self._link.send(rest)
        self._link.send(last)

    @contextmanager
    def _rim(self, job: Job) -> Iterator[None]:
        """Let an exception end this job only."""
        try:
            yield
        except _FATAL:
            raise
        except Exception as error:
            self._fail(job, error)

    def _as_request_error(self, error: Exception, key: int) -> RequestError:
        """Turn what went wrong with one request into what its client is told; our own bugs go to the log."""
        if isinstance(error, RequestError):
            return error
        self._log.error("request_failed", key=key, exc_info=error)
        message = f"the worker failed on this request: {type(error).__name__}; its log has the details"
        return RequestError("internal_error", message)


def _slot_of(seq: Sequence) -> int:
    assert seq.slot is not None
    return seq.slot
