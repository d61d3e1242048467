"""Turn what TensorRT says while it builds, by its logger and its progress monitor, into events for the parent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edge_engines.compile.frames import Advanced, Event, Noted, StepBegun

SHOWN_DEPTH = 3  # phases further inside come by the hundred
_LONGEST_MESSAGE = 400
# Reminders of INT64 inputs, which are ours on purpose (case C25), and one line per convolution in INT8.
_EXPECTED = ("Make sure input", "(foreignNode) Converting conv")


class Watch:
    """Sends events, knows which phase is shown, and keeps the last error for the message of a failure."""

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send
        self._shown = ""
        self._depth: dict[str, int] = {}
        self.last_error = ""

    def begin(self, name: str, total: int | None) -> None:
        """Begin a step."""
        self._shown = name
        self._send(StepBegun(f"TensorRT: {name[:1].lower()}{name[1:]}", total))

    def phase_begun(self, name: str, parent: str | None, total: int) -> None:
        """Show a phase of the builder, unless it is deep inside another."""
        self._depth[name] = self._depth.get(parent, -1) + 1 if parent else 0
        if self._depth[name] <= SHOWN_DEPTH:
            self.begin(name, total)

    def step_done(self, name: str) -> None:
        """Count a step of the phase that is shown; others have no bar."""
        if name == self._shown:
            self._send(Advanced(1))

    def logged(self, text: str, *, is_error: bool) -> None:
        """Keep an error, pass a warning on."""
        line = " ".join(text.split())[:_LONGEST_MESSAGE]
        if is_error:
            self.last_error = self.last_error or line  # the first is the cause, the rest are its consequences
        elif not any(known in line for known in _EXPECTED):
            self._send(Noted(f"TensorRT: {line}"))


def trt_logger(trt: Any, watch: Watch) -> Any:
    """Return an ILogger that reports errors and warnings to `watch`."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                watch.logged(text, is_error=True)
            elif severity == trt.ILogger.WARNING:
                watch.logged(text, is_error=False)

    return Logger()


def progress_monitor(trt: Any, watch: Watch) -> Any:
    """Return an IProgressMonitor that reports to `watch`."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the base is known at run time only
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)

        def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:
            watch.phase_begun(name, parent, num_steps)

        def step_complete(self, name: str, step: int) -> bool:
            watch.step_done(name)
            return True  # go on

        def phase_finish(self, name: str) -> None:
            """Nothing to show: the next phase begins by itself."""

    return Monitor()
