"""Set up the daemon's log: one event per line on stderr, JSON or text. Never prompt or answer text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from edge_runtime.config import LogConfig

REPEAT_S = 5.0  # a warning of one kind appears at most once per this time
PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}  # of syslog


def make_logger(
    config: LogConfig, *, environment: Mapping[str, str], stream: TextIO | None = None
) -> FilteringBoundLogger:
    """Return the logger; nothing global is touched. Under systemd each line carries its syslog priority."""
    stream = stream or sys.stderr
    is_json = config.format == "json" or (config.format == "auto" and not stream.isatty())
    stamper = structlog.processors.TimeStamper(fmt="iso" if is_json else "%H:%M:%S", utc=is_json, key="ts")
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        _Calm(time.monotonic),
        stamper,
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer() if is_json else render_text,
    ]
    if "JOURNAL_STREAM" in environment:
        processors = [*processors[:-1], _with_priority(processors[-1])]
    return cast(
        FilteringBoundLogger,
        structlog.wrap_logger(
            structlog.PrintLogger(stream),
            processors=processors,
            wrapper_class=structlog.make_filtering_bound_logger(config.level),
        ),
    )


def render_text(logger: WrappedLogger, method: str, event: EventDict) -> str:
    """Render one event for a person: "15:04:05 WARNING broker away: reason=...".

    What is the same in every line (boot id) and what is empty is left out; `hint`, and a value that is named like its
    event, stand without their name.
    """
    head, level, trace = event.pop("event"), event.pop("level", "info"), event.pop("exception", None)
    stamp = event.pop("ts", "")
    rank = "" if level in ("info", "debug") else f"{level.upper()} "
    facts = [
        _plain(value) if key in (head, "hint") else f"{key}={_plain(value)}"
        for key, value in event.items()
        if key != "boot_id" and value not in ("", None, {})
    ]
    line = f"{stamp} {rank}{head.replace('_', ' ')}{': ' if facts else ''}{' '.join(facts)}"
    return f"{line}\n{trace}" if trace else line


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items()) + "}"
    return str(value)


class _Calm:
    """Drops repeated warnings and says with the next one how many there were."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._shown: dict[str, float] = {}
        self._hidden: dict[str, int] = {}

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if method != "warning":
            return event
        kind, now = f"{event['event']} {event.get('reason', '')}", self._clock()
        if now - self._shown.get(kind, -REPEAT_S) < REPEAT_S:
            self._hidden[kind] = self._hidden.get(kind, 0) + 1
            raise structlog.DropEvent
        self._shown[kind] = now
        if hidden := self._hidden.pop(kind, 0):
            event["repeated"] = hidden
        return event


def _with_priority(renderer: Processor) -> Processor:
    def render(logger: WrappedLogger, method: str, event: EventDict) -> str:
        line = renderer(logger, method, event)
        return f"<{PRIORITIES.get(method, 6)}>{line!s}"

    return render
