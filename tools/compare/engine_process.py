"""Drive an engine in a child process, and tell when it is quiet."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from edge_runtime.errors import EdgeError

START_S = 300.0  # loading a model from a cold, slow card
STEP_S = 300.0
QUIET_WINDOW_S = 0.05  # several ticks of the kernel's accounting (10 ms): a spinning thread shows
QUIET_LIMIT_S = 10.0
_GRACE_S = 3.0


class EngineProcess:
    """An engine in its own process and session, so that Ctrl-C reaches the parent only; gone after the block."""

    def __init__(self, name: str, command: Sequence[str], imports: Sequence[Path]) -> None:
        """`imports` are the folders the child may import from, besides its own environment."""
        self.name = name
        self.facts: dict[str, str] = {}
        self._command = command
        self._imports = os.pathsep.join(map(str, imports))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed in __exit__
        self._child: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EngineProcess:
        env = {**os.environ, "PYTHONPATH": self._imports}
        self._child = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=env,
            start_new_session=True,
        )  # fmt: skip
        try:
            self.facts = self._receive(START_S)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        child = self._opened()
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.close()  # the child ends with its input
        try:
            child.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            child.stdout.close()
            self._errors.close()

    def prefill_ms(self, prompts: Sequence[Sequence[int]]) -> float:
        """Run B prompts of one length from an empty cache and return the time, first ids included."""
        return float(self._ask("prefill", [list(ids) for ids in prompts]))

    def decode_ms(self, steps: int) -> list[float]:
        """Decode on after the last prefill or decode and return the time of each step."""
        return [float(value) for value in self._ask("decode", steps)]

    def ids(self) -> list[list[int]]:
        """Return what was chosen since the last prefill, a list for each of the B sequences."""
        return [[int(i) for i in row] for row in self._ask("ids", None)]

    def wait_until_quiet(self) -> None:
        """Return when the process uses no processor time: threads may spin on for a while after a step."""
        process = psutil.Process(self._opened().pid)
        deadline = time.monotonic() + QUIET_LIMIT_S
        before = _used_s(process)
        while time.monotonic() < deadline:
            time.sleep(QUIET_WINDOW_S)
            now = _used_s(process)
            if now == before:
                return
            before = now
        raise EdgeError(
            f"{self.name} is still busy {QUIET_LIMIT_S:.0f} s after its last step: it would slow the other one"
        )

    def _ask(self, kind: str, value: object) -> Any:
        child = self._opened()
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps({"do": kind, "value": value}).encode() + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended") from None
        return self._receive(STEP_S)

    def _receive(self, limit_s: float) -> Any:
        """Return the next answer. The child writes one line per request, so nothing else waits in the pipe's buffer."""
        out = self._opened().stdout
        assert out is not None
        if not select.select([out], [], [], limit_s)[0]:
            raise self._failed(f"gave no answer in {limit_s:.0f} s")
        line = out.readline()
        if not line.endswith(b"\n"):
            raise self._failed("ended")
        return json.loads(line)

    def _failed(self, what: str) -> EdgeError:
        self._errors.seek(0)
        said = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        return EdgeError(f"{self.name} {what}: {(said or ['it printed nothing'])[-1]}")

    def _opened(self) -> subprocess.Popen[bytes]:
        assert self._child is not None, "used outside its block"
        return self._child


def _used_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
