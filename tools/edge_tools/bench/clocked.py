"""Time the engine calls of a session from below, so that what Python adds on top can be told apart."""

from __future__ import annotations

import time
from collections.abc import Sequence

from edge_runtime.backends import Backend, Float32, Int64, KvRows
from edge_runtime.manifest import Manifest


class ClockedBackend:
    """A backend that notes how long each step of the real one took; `steps_ms` grows by one per step."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.manifest: Manifest = inner.manifest
        self.max_rows: int = inner.max_rows
        self.steps_ms: list[float] = []

    def step(self, slots: Sequence[int], ids: Int64, starts: Int64, rows: int) -> Float32:
        """Run one step and note its time."""
        begun = time.perf_counter()
        logits = self._inner.step(slots, ids, starts, rows)
        self.steps_ms.append((time.perf_counter() - begun) * 1e3)
        return logits

    def read_rows(self, slot: int, start: int, stop: int) -> KvRows:
        """Pass on."""
        return self._inner.read_rows(slot, start, stop)

    def write_rows(self, slot: int, start: int, rows: KvRows) -> None:
        """Pass on."""
        self._inner.write_rows(slot, start, rows)

    def facts(self) -> dict[str, str]:
        """Pass on."""
        return self._inner.facts()

    def close(self) -> None:
        """Pass on."""
        self._inner.close()
