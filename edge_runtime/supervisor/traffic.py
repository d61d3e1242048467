"""Read the MQTT library's log lines: when the broker was last heard, and what went wrong in a callback."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any


class Traffic(logging.Logger):
    """Takes paho's log lines: remembers when the broker was last heard, and reports exceptions in callbacks."""

    def __init__(self, clock: Callable[[], float], report: Callable[[str], None]) -> None:
        super().__init__("mqtt")
        self._clock = clock
        self._report = report
        self.heard_at = 0.0

    def log(
        self,
        level: int,
        msg: object,
        *args: object,
        exc_info: Any = None,
        stack_info: bool = False,
        stacklevel: int = 1,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        """Look at one line. Called for every packet, so nothing is formatted that is not reported."""
        text = str(msg)
        if text.startswith("Received"):
            self.heard_at = self._clock()
        elif text.startswith("Caught exception"):
            self._report(f"internal error: {text % args} ({sys.exc_info()[1]!r})")
