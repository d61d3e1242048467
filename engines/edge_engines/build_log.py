"""Keep a record of a build: each step with what it took, and everything that was noted on the way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from edge_engines.progress import Progress


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step that is over."""

    name: str
    seconds: float


class BuildLog:
    """A Progress that passes everything on and remembers it."""

    def __init__(self, shown: Progress) -> None:
        self._shown = shown
        self._begun = time.monotonic()
        self._step: tuple[str, float] | None = None  # name and start of the running one
        self._steps: list[StepTime] = []
        self._lines: list[str] = []

    def step(self, name: str, total: int | None) -> None:
        """See Progress.step."""
        self._finish_step()
        self._step = name, time.monotonic()
        self._write(name)
        self._shown.step(name, total)

    def advance(self, n: int) -> None:
        """See Progress.advance."""
        self._shown.advance(n)

    def note(self, text: str) -> None:
        """See Progress.note."""
        self._write(f"  {text}")
        self._shown.note(text)

    @property
    def steps(self) -> Sequence[StepTime]:
        """Return the steps so far, the running one with its time until now."""
        running = [StepTime(self._step[0], self._since(self._step[1]))] if self._step else []
        return [*self._steps, *running]

    @property
    def text(self) -> str:
        """Return everything that was said, a line each, with the seconds since the start."""
        return "".join(f"{line}\n" for line in self._lines)

    def _finish_step(self) -> None:
        if self._step:
            self._steps.append(StepTime(self._step[0], self._since(self._step[1])))

    def _write(self, text: str) -> None:
        self._lines.append(f"[{self._since(self._begun):7.1f} s] {text}")

    @staticmethod
    def _since(begun: float) -> float:
        return round(time.monotonic() - begun, 1)
