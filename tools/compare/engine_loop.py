"""Answer the comparison's requests in an engine's process: one JSON line in, one out.

Runs in the peer's environment too, so it imports the standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol, TextIO


class TimedEngine(Protocol):
    """What is timed, for both engines by the same code. B sequences run in step, each greedily."""

    def facts(self) -> dict[str, str]:
        """Return versions and settings."""
        ...

    def reset(self, batch: int) -> None:
        """Forget everything; B = `batch` from here. Not timed."""
        ...

    def prefill(self, prompts: list[list[int]]) -> None:
        """Run B prompts of one length and choose the first id after each."""
        ...

    def decode(self) -> None:
        """Run the last id of each sequence and choose the next."""
        ...

    def ids(self) -> list[list[int]]:
        """Return the ids chosen since the last prefill, [B][number]."""
        ...


def serve(open_engine: Callable[[], TimedEngine]) -> None:
    """Open the engine, say its facts, and answer until stdin ends."""
    out = _take_stdout()
    engine = open_engine()
    _say(out, engine.facts())
    for line in sys.stdin:
        _say(out, _answer(engine, json.loads(line)))


def _answer(engine: TimedEngine, request: dict[str, object]) -> object:
    """Return milliseconds of each prefill or decode step, or the chosen ids."""
    kind, value = request["do"], request["value"]
    if kind == "prefill":
        assert isinstance(value, list)
        engine.reset(len(value))
        return _time_ms(lambda: engine.prefill(value))
    if kind == "decode":
        assert isinstance(value, int)
        return [_time_ms(engine.decode) for _ in range(value)]
    assert kind == "ids", kind
    return engine.ids()


def _time_ms(call: Callable[[], None]) -> float:
    begun = time.perf_counter()
    call()
    return (time.perf_counter() - begun) * 1e3


def _take_stdout() -> TextIO:
    """Return the pipe to the parent; what libraries print on stdout goes to stderr."""
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return pipe


def _say(out: TextIO, value: object) -> None:
    out.write(json.dumps(value) + "\n")
    out.flush()
