"""Find stop strings in a stream of text. No tokens, no ids: a stop is text wherever the pieces were cut."""

from __future__ import annotations

from collections.abc import Sequence

from edge_runtime.errors import RequestError

MAX_STOPS = 4
MAX_STOP_CHARS = 64


def check_stops(value: object) -> tuple[str, ...]:
    """Return a request's stops as a tuple: None and [] mean none, a bare string is one stop.

    Raises:
        RequestError: `invalid_request` for an empty or too long stop, another type, or more than `MAX_STOPS`.
    """
    stops = [value] if isinstance(value, str) else value if value is not None else []
    if not isinstance(stops, (list, tuple)):
        raise _refusal(f"stop is of type {type(value).__name__}: send a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise _refusal(f"stop holds {len(stops)} strings: at most {MAX_STOPS} are allowed")
    for i, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise _refusal(f"stop[{i}] is of type {type(stop).__name__}: send strings")
        if not stop:
            raise _refusal(f"stop[{i}] is empty and would match everywhere: leave it out")
        if len(stop) > MAX_STOP_CHARS:
            raise _refusal(f"stop[{i}] has {len(stop)} characters: at most {MAX_STOP_CHARS} are allowed")
    return tuple(stops)


class StopFilter:
    """Pass text on until a stop string is complete; the stop and what follows it are never passed on.

    Held back is only the tail that could begin a stop. Of several stops the one complete first in the text wins, and
    of those that end together the longest, so the result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._is_matched = False

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that may go out now, and whether a stop was found (from then on nothing goes out)."""
        if self._is_matched:
            return "", True
        if not self._stops:
            return text, False
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held, self._is_matched = "", True
            return text[: min(matches)[1]], True
        safe = len(text) - self._tail_len(text)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """Return the text still held back: the end came before the stop was complete."""
        held, self._held = self._held, ""
        return held

    def _tail_len(self, text: str) -> int:
        """Return how many characters at the end of `text` could begin a stop."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


def _refusal(message: str) -> RequestError:
    return RequestError("invalid_request", message, param="$.stop")
