"""Say how a long step reports where it stands."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receiver of progress: a bar on a terminal, plain lines elsewhere, nothing in a library call."""

    def step(self, name: str, total: int | None) -> None:
        """Begin a step of `total` parts, or of unknown length."""
        ...

    def advance(self, n: int) -> None:
        """Finish n more parts of the current step."""
        ...

    def note(self, text: str) -> None:
        """Tell something worth keeping: a warning, a result."""
        ...


class NoProgress:
    """Progress for nobody."""

    def step(self, name: str, total: int | None) -> None:
        """See Progress.step."""

    def advance(self, n: int) -> None:
        """See Progress.advance."""

    def note(self, text: str) -> None:
        """See Progress.note."""
