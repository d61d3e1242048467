"""A small stand-in for the worker, speaking frames over an inherited socket: no engine, no tokenizer.

Called as `fake_worker.py [JSON] FD`. An answer is `max_tokens` words "w0 w1 ..". Options: `step_ms`, `load_s`,
`exit_at` ("load") with `code`, `mute_after` beats. A prompt that contains one of the words KILL, EXIT, HANG, GARBAGE,
NAN, REFUSE, SPLIT, BIG makes that happen; with AFTER the first four wait until text has been sent.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from edge_runtime.worker.frames import (
    Cancel,
    Failed,
    Finished,
    FrameReader,
    FromWorker,
    Heartbeat,
    Hello,
    Init,
    Progress,
    Ready,
    Started,
    Stop,
    Submit,
    Tokens,
    ToWorker,
    encode_frame,
)

PR_SET_PDEATHSIG = 1
WORDS_PER_CHUNK = 4


@dataclass
class Row:
    submit: Submit
    began: float
    seed: int
    words: list[str] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)

    @property
    def prompt(self) -> str:
        if self.submit.prompt is not None:
            return self.submit.prompt
        return (self.submit.messages or [{}])[-1].get("content", "")


class FakeWorker:
    def __init__(self, options: dict[str, object], fd: int) -> None:
        self.options = options
        self.socket = socket.socket(fileno=fd)
        self.lock = threading.Lock()
        self.step_s = float(str(options.get("step_ms", 5))) / 1000
        self.rows: list[Row] = []
        self.waiting: deque[Submit] = deque()
        self.phase = "loading"
        self.steps = 0
        self.step_began: float | None = None
        self.max_batch = 2

    def run(self) -> int:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        reader = FrameReader(ToWorker)
        self.send(Hello(pid=os.getpid(), version="fake"))
        init = self.receive_init(reader)
        self.max_batch = init.max_batch
        threading.Thread(target=self.beat, args=(init.heartbeat_s,), daemon=True).start()
        if self.options.get("exit_at") == "load":
            print("fake worker refuses to load", file=sys.stderr)
            return int(str(self.options.get("code", 70)))
        self.send(Progress("load", 50.0))
        time.sleep(float(str(self.options.get("load_s", 0))))
        self.phase = "serving"
        self.send(
            Ready(
                backend={"name": "fake"},
                slots=self.max_batch,
                capacity=512,
                max_prompt=400,
                precision="fp32",
                engine_sha256="0" * 64,
                start_seconds={"load": 0.0},
            )
        )
        return self.serve(reader)

    def receive_init(self, reader: FrameReader) -> Init:
        while True:
            for frame in reader.feed(self.read()):
                assert isinstance(frame, Init)
                return frame

    def read(self) -> bytes:
        data = self.socket.recv(1 << 16)
        if not data:
            os._exit(0)
        return data

    def serve(self, reader: FrameReader) -> int:
        while True:
            wait = self.step_s if self.rows or self.waiting else None
            readable, _, _ = select.select([self.socket], [], [], wait)
            if readable:
                for frame in reader.feed(self.read()):
                    if isinstance(frame, Submit):
                        self.waiting.append(frame)
                    elif isinstance(frame, Cancel):
                        self.cancel(frame)
                    elif isinstance(frame, Stop):
                        return 0
            self.step()

    def step(self) -> None:
        while self.waiting and len(self.rows) < self.max_batch:
            submit = self.waiting.popleft()
            row = Row(submit, time.monotonic(), 7 if submit.seed is None else submit.seed)
            self.send(Started(key=submit.key, prompt_tokens=3, prepare_ms=0.1, seed=row.seed))
            if "REFUSE" in row.prompt:
                self.send(Failed(key=submit.key, code="context_length_exceeded", message="too long", param="$.prompt"))
            else:
                self.rows.append(row)
        self.step_began = time.monotonic()
        for row in list(self.rows):
            self.misbehave(row)
            self.advance(row)
        self.step_began = None
        self.steps += 1

    def misbehave(self, row: Row) -> None:
        if "AFTER" in row.prompt and len(row.words) < 2 * WORDS_PER_CHUNK + 1:
            return  # only once text has been sent
        if "KILL" in row.prompt:
            os.kill(os.getpid(), signal.SIGKILL)
        if "EXIT" in row.prompt:
            os._exit(3)
        if "HANG" in row.prompt:
            time.sleep(3600)
        if "GARBAGE" in row.prompt:
            self.socket.sendall(struct.pack(">I", 0xFFFFFFFF) + b"nonsense")

    def advance(self, row: Row) -> None:
        if "NAN" in row.prompt:
            self.rows.remove(row)
            self.send(Failed(key=row.submit.key, code="numeric_error", message="logits are not finite"))
            return
        word = "é€😀" if "SPLIT" in row.prompt else "x" * 200 if "BIG" in row.prompt else f"w{len(row.words)}"
        row.words.append(word + " ")
        row.pending.append(word + " ")
        if len(row.words) == 1 or len(row.pending) >= WORDS_PER_CHUNK:
            self.flush(row)
        if time.monotonic() - row.began > row.submit.deadline_s:
            self.finish(row, "deadline")
        elif len(row.words) >= row.submit.max_tokens:
            self.finish(row, "length")

    def flush(self, row: Row) -> None:
        if row.submit.stream and row.pending:
            self.send(Tokens(key=row.submit.key, text="".join(row.pending), count=len(row.pending)))
        row.pending.clear()

    def finish(self, row: Row, reason: str) -> None:
        self.flush(row)
        self.rows.remove(row)
        self.send(
            Finished(
                key=row.submit.key,
                reason=reason,  # type: ignore[arg-type]
                text="".join(row.words),
                prompt_tokens=3,
                completion_tokens=len(row.words),
                queue_ms=0.1,
                prefill_ms=0.2,
                ttft_ms=0.5,
                tpot_ms=self.step_s * 1000,
                seed=row.seed,
            )
        )

    def cancel(self, frame: Cancel) -> None:
        for row in list(self.rows):
            if row.submit.key == frame.key:
                self.finish(row, frame.reason)
        for submit in list(self.waiting):
            if submit.key == frame.key:
                self.waiting.remove(submit)
                self.finish_waiting(submit, frame.reason)

    def finish_waiting(self, submit: Submit, reason: str) -> None:
        row = Row(submit, time.monotonic(), 7)
        self.rows.append(row)
        self.finish(row, reason)

    def beat(self, interval_s: float) -> None:
        seq = 0
        while "mute_after" not in self.options or seq < int(str(self.options["mute_after"])):
            began = self.step_began
            self.send(
                Heartbeat(
                    seq=seq,
                    phase=self.phase,
                    step_count=self.steps,
                    step_age_s=0.0 if began is None else time.monotonic() - began,
                    rows_busy=len(self.rows),
                    kv_tokens=sum(3 + len(row.words) for row in self.rows),
                    rss_bytes=1,
                    useful_tokens=self.steps,
                    computed_tokens=self.steps,
                    step_ms=[self.step_s * 1000],
                    nan_count=0,
                )
            )
            seq += 1
            time.sleep(interval_s)

    def send(self, frame: FromWorker) -> None:
        with self.lock:
            try:
                self.socket.sendall(encode_frame(frame))
            except OSError:
                os._exit(0)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    found = json.loads(arguments[0]) if len(arguments) > 1 else {}
    sys.exit(FakeWorker(found, int(arguments[-1])).run())
