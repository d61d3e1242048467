"""Decide when streamed text is sent on. No I/O; time comes in as `now`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ChunkBuffer:
    """Text of one answer that has not been sent yet.

    The first text goes out at once. After that a chunk is complete at the first of: `chunk_tokens` tokens, `chunk_ms`
    milliseconds since its first token, a newline in its text, the end of the answer. A chunk is never empty: tokens
    without text (inside a character, or held back as the beginning of a stop string) count with the next one.
    """

    chunk_tokens: int  # >= 1
    chunk_ms: float  # >= 0
    _text: str = ""
    _count: int = 0
    _since: float = 0.0  # `now` of the chunk's first token
    _is_first: bool = True

    def push(self, text: str, count: int, now: float) -> None:
        """Add the text of `count` more tokens; `now` in seconds on any monotonic clock."""
        if not self._count and not self._text:
            self._since = now
        self._text += text
        self._count += count

    def take(self, now: float, *, is_end: bool = False) -> tuple[str, int] | None:
        """Return the complete chunk as (text, number of tokens), or None while it has to wait."""
        if not self._text or not (is_end or self._is_due(now)):
            return None
        chunk = (self._text, self._count)
        self._text, self._count, self._is_first = "", 0, False
        return chunk

    def _is_due(self, now: float) -> bool:
        return (
            self._is_first
            or self._count >= self.chunk_tokens
            or "\n" in self._text
            or (now - self._since) * 1000 >= self.chunk_ms
        )
