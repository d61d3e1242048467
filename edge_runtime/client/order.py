"""Put the pieces of one answer in order and release each character once. No connection, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_runtime.errors import RequestError
from edge_runtime.messages import Accepted


@dataclass(slots=True)
class PieceOrder:
    """What has come of one answer, and what of it has been released."""

    next_seq: int = 0
    text: str = ""  # in order, of the present run
    released: str = ""
    held: dict[int, str] = field(default_factory=dict)
    boot_id: str | None = None

    def restart(self) -> None:
        """Expect the answer from its beginning: another run of the same request."""
        self.next_seq, self.text = 0, ""
        self.held.clear()

    def accept(self, frame: Accepted) -> str:
        """Take an accepted frame; one of another boot begins a new run."""
        if self.boot_id is not None and frame.boot_id != self.boot_id:
            self.restart()
        self.boot_id = frame.boot_id
        return self.add(frame.seq, "")

    def add(self, seq: int, text: str) -> str:
        """Take one numbered piece and return what can be released; repeated ones are ignored."""
        if seq >= self.next_seq:
            self.held.setdefault(seq, text)
        while self.next_seq in self.held:
            self.text += self.held.pop(self.next_seq)
            self.next_seq += 1
        return self._release()

    def end(self, text: str) -> str:
        """Take the whole text and return what has not been released: lost pieces are made up for."""
        self.text = text
        return self._release()

    def _release(self) -> str:
        if self.text.startswith(self.released):
            piece, self.released = self.text[len(self.released) :], self.text
            return piece
        if self.released.startswith(self.text):
            return ""
        raise RequestError("worker_restarted", "the device started again, and its new answer differs from the first")
