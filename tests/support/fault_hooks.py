"""Break a worker on purpose: hooks that act on its engine, its link and its process at a named moment."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from edge_runtime.backends import Backend, Float32, Int64, KvRows
from edge_runtime.errors import EngineRefusedError, NoDeviceError
from edge_runtime.worker.frames import FromWorker, Heartbeat, Progress, Ready, ToWorker
from edge_runtime.worker.link import Link

Phase = Literal["load", "warm", "step", "idle"]
SPLIT_TEXT = "é€😀".encode()  # 2, 3 and 4 bytes, all different
GARBAGE = {
    "bad_length": b"\xff\xff\xff\xff",
    "unknown_type": b"\x00\x00\x00\x0b" + msgspec.msgpack.encode({"type": "bogo"}),
    "truncated": b"\x00\x00\x00\x02" + b"\x82\xa4",
}


class At(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a hook acts. `step` counts engine steps from 1, warm-up not included; `request` is a part of a prompt."""

    phase: Phase | None = None
    step: int | None = None
    request: str | None = None


class Hook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One fault. `slow` and `nan` act at every matching step, all others once per process."""

    hook: Literal[
        "slow", "hang", "freeze_steps", "mute", "exit", "kill", "nan", "oom", "garbage", "refuse_load", "no_gpu",
        "split_utf8",
    ]  # fmt: skip
    at: At = At()
    once: str = ""  # path of a marker: with it the hook acts in one process only, not again after a restart
    ms: float = 0.0
    holds_gil: bool = False
    beats: int = 1
    code: int = 1
    signal: int = signal.SIGKILL
    row: int = 0  # slot
    where: Literal["host"] = "host"
    frame: Literal["bad_length", "unknown_type", "truncated"] = "bad_length"
    reason: str = "refused by a fault hook"

    @property
    def phase(self) -> Phase:
        """The phase in which it acts."""
        return self.at.phase or ("load" if self.hook in ("refuse_load", "no_gpu") else "step")


class Faults:
    """What has happened in this process so far, and the hooks that wait for it."""

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self._waiting = [hook for hook in hooks if hook.hook != "split_utf8"]
        self.splits_utf8 = any(hook.hook == "split_utf8" for hook in hooks)
        self.stage: Phase = "load"
        self.steps = 0
        self.mute_beats = 0
        self.frozen: tuple[int, float] | None = None  # step count and time
        self.garbage = b""
        self.bad_rows: set[int] = set()

    def reach(self, phase: Phase, texts: Sequence[str] = ()) -> None:
        """Run every hook whose moment this is; `texts` are the prompts in the step."""
        self.bad_rows.clear()
        for hook in list(self._waiting):
            if hook.phase == phase and self._is_due(hook, texts) and self._is_first_process(hook):
                if hook.hook not in ("slow", "nan"):
                    self._waiting.remove(hook)
                self._act(hook)

    def _is_due(self, hook: Hook, texts: Sequence[str]) -> bool:
        at = hook.at
        return at.step in (None, self.steps) and (at.request is None or any(at.request in text for text in texts))

    @staticmethod
    def _is_first_process(hook: Hook) -> bool:
        if not hook.once:
            return True
        try:
            Path(hook.once).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _act(self, hook: Hook) -> None:
        match hook.hook:
            case "slow":
                time.sleep(hook.ms / 1000)
            case "hang":
                hang(holds_gil=hook.holds_gil)
            case "exit":
                os._exit(hook.code)
            case "kill":
                os.kill(os.getpid(), hook.signal)
            case "oom":
                raise MemoryError("host memory, by a fault hook")
            case "refuse_load":
                raise EngineRefusedError(hook.reason)
            case "no_gpu":
                raise NoDeviceError("/dev/nvhost-gpu: no such device", remedy="load the driver")
            case "mute":
                self.mute_beats += hook.beats
            case "freeze_steps":
                self.frozen = (self.steps, time.monotonic())
            case "garbage":
                self.garbage = GARBAGE[hook.frame]
            case "nan":
                self.bad_rows.add(hook.row)


class FaultyLink(Link):
    """The real link, seen and spoilt by the hooks."""

    def __init__(self, sock: socket.socket, faults: Faults) -> None:
        super().__init__(sock)
        self._faults = faults

    def send(self, message: FromWorker) -> None:
        faults = self._faults
        if isinstance(message, Progress) and message.phase == "warm-up":
            faults.stage = "warm"
        if isinstance(message, Ready):
            faults.stage = "step"
        if isinstance(message, Heartbeat):
            if faults.mute_beats:
                faults.mute_beats -= 1
                return
            message = freeze(message, faults.frozen)
        if faults.garbage:
            data, faults.garbage = faults.garbage, b""
            self.send_bytes(data)
        super().send(message)

    def receive(self, timeout_s: float | None) -> list[ToWorker]:
        if timeout_s is None and self._faults.stage == "step":
            self._faults.reach("idle")
        return super().receive(timeout_s)


class FaultyBackend:
    """A backend whose steps are seen and spoilt by the hooks."""

    def __init__(self, backend: Backend, faults: Faults) -> None:
        self.manifest = backend.manifest
        self.max_rows = backend.max_rows
        self._backend = backend
        self._faults = faults

    def step(self, slots: Sequence[int], ids: Int64, starts: Int64, rows: int) -> Float32:
        if self._faults.stage == "step":
            self._faults.steps += 1
        self._faults.reach(self._faults.stage, [self._text(*row) for row in zip(slots, ids, starts, strict=True)])
        logits = self._backend.step(slots, ids, starts, rows)
        for i, slot in enumerate(slots):
            if slot in self._faults.bad_rows:
                logits[i] = np.nan
        return logits

    def _text(self, slot: int, ids: Int64, start: int) -> str:
        before = self._backend.read_rows(slot, 0, start)[0][0, :, 0]
        return bytes(token for token in (*before.tolist(), *ids.tolist()) if token < 256).decode(errors="replace")

    def read_rows(self, slot: int, start: int, stop: int) -> KvRows:
        return self._backend.read_rows(slot, start, stop)

    def write_rows(self, slot: int, start: int, rows: KvRows) -> None:
        self._backend.write_rows(slot, start, rows)

    def facts(self) -> dict[str, str]:
        return self._backend.facts()

    def close(self) -> None:
        self._backend.close()


def hang(*, holds_gil: bool) -> None:
    """Never return; with `holds_gil` no other thread of this process runs either."""
    if not holds_gil:
        threading.Event().wait()
    libc = ctypes.PyDLL(None)  # unlike CDLL it keeps the lock during the call
    while True:
        libc.pause()


def freeze(beat: Heartbeat, frozen: tuple[int, float] | None) -> Heartbeat:
    """Return the beat of a worker whose step has stood still since `frozen`."""
    if frozen is None:
        return beat
    steps, since = frozen
    age_s = time.monotonic() - since
    return msgspec.structs.replace(beat, step_count=steps, step_age_s=age_s, rows_busy=max(1, beat.rows_busy))


def split_utf8(history: Int64) -> int:
    """A script whose answer is `SPLIT_TEXT` over and over, so that most tokens end inside a code point."""
    last = int(history[-1])
    return SPLIT_TEXT[(SPLIT_TEXT.index(last) + 1) % len(SPLIT_TEXT)] if last in SPLIT_TEXT else SPLIT_TEXT[0]
