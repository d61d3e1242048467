"""Show how far a long command is: a bar per step on a terminal, one line per step elsewhere. Always on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class LineProgress:
    """One plain line per step, when it begins; nothing on `advance`."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = time.monotonic()

    def step(self, name: str, total: int | None) -> None:  # the seam has it, a line has no bar
        """Begin a step."""
        self._write(name)

    def advance(self, n: int) -> None:
        """Count on; a plain log shows no bars."""

    def note(self, text: str) -> None:
        """Say one thing worth knowing."""
        self._write(text)

    def _write(self, text: str) -> None:
        self._stream.write(f"[{time.monotonic() - self._begun:6.1f} s] {text}\n")
        self._stream.flush()


class BarProgress:
    """A bar per step; finished steps stay on the screen with their time."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    def step(self, name: str, total: int | None) -> None:
        """Begin a step of `total` units; None shows a spinner."""
        self.finish()
        self._task = self._bars.add_task(name, total=total)

    def advance(self, n: int) -> None:
        """Count `n` units on."""
        if self._task is not None:
            self._bars.advance(self._task, n)

    def note(self, text: str) -> None:
        """Say one thing worth knowing, above the bars."""
        self._bars.console.print(text, highlight=False, markup=False)

    def finish(self) -> None:
        """Fill the running bar."""
        if self._task is not None:
            total = self._bars.tasks[-1].total or 1
            self._bars.update(self._task, total=total, completed=total)


Shown = LineProgress | BarProgress


@contextmanager
def shown_progress(stream: TextIO | None = None) -> Iterator[Shown]:
    """Yield the progress that fits `stream` (stderr): bars on a terminal, plain lines otherwise."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield LineProgress(stream)
        return
    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream)) as bars:
        progress = BarProgress(bars)
        yield progress
        progress.finish()
