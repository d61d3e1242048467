"""Turn token ids into logits: prefill, decode and verify over a backend's static KV slots.

Positions belong to the caller; rows at or beyond a slot's length are dead and never influence a result. No text, no
sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from edge_runtime.backends import Backend, BackendOptions, Float32, KvRows, open_backend
from edge_runtime.errors import RequestError, UsageError
from edge_runtime.manifest import Geometry, Manifest, read_manifest


class Session:
    """One loaded engine. Used from the thread that opened it; a context manager.

    Returned logits are a view that is valid until the next call. `bad_slots` names the slots whose logits of the last
    call hold a NaN or an infinity: such a row must not be sampled.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.manifest: Manifest = backend.manifest
        self.geometry: Geometry = backend.manifest.geometry
        self.bad_slots: tuple[int, ...] = ()
        self._ids = np.empty((self.geometry.max_batch, 1), np.int64)
        self._starts = np.empty(self.geometry.max_batch, np.int64)

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        threads: int = 0,
        spinning: bool | None = None,
        verify_rows: int = 16,
        check_digests: bool = True,
    ) -> Session:
        """Check the manifest, then load the engine. See `edge_runtime.open_session`."""
        path = Path(folder)
        manifest = read_manifest(path, check_digests=check_digests)
        return cls(open_backend(path, manifest, BackendOptions(threads, spinning, verify_rows)))

    def prefill(self, slot: int, ids: Sequence[int], start: int = 0) -> Float32:
        """Run `ids` [S] at positions start .. start + S - 1 of `slot`; return the logits [V] of the last one.

        May be called in chunks: `start` grows. Raises RequestError("context_length_exceeded") when the rows don't fit.
        """
        logits: Float32 = self._run_one(slot, ids, start, rows=1)[0]
        return logits

    def decode(self, slots: Sequence[int], ids: Sequence[int], positions: Sequence[int]) -> Float32:
        """Run one id on each of n slots at its position; return logits [n, V], row i for slots[i]."""
        n = len(slots)
        if n == 1 == len(ids) == len(positions):
            return self._run_one(slots[0], ids, positions[0], rows=1)
        if list(slots) != list(range(self.geometry.max_batch)) or len(ids) != n or len(positions) != n:
            raise UsageError(
                f"decode of slots {list(slots)} with {len(ids)} ids and {len(positions)} positions: "
                f"slots must be one slot or 0..{self.geometry.max_batch - 1} in order, with one id and position each"
            )
        for i, slot in enumerate(slots):
            self._check(slot, ids[i : i + 1], positions[i])
            self._ids[i, 0] = ids[i]
            self._starts[i] = positions[i]
        logits = self._backend.step(slots, self._ids, self._starts, 1)[:, 0]
        self._note_bad(slots, logits)
        return logits

    def verify(self, slot: int, ids: Sequence[int], start: int) -> Float32:
        """Run `ids` [S] like `prefill`, and return the logits [S, V] of every position (speculative decoding).

        S is at most the `verify_rows` that the session was opened with.
        """
        return self._run_one(slot, ids, start, rows=len(ids))

    def save_rows(self, slot: int, start: int, stop: int) -> KvRows:
        """Copy KV rows [start, stop) to host memory, for prefix reuse and preemption."""
        self._check_rows(slot, start, stop)
        return self._backend.read_rows(slot, start, stop)

    def load_rows(self, slot: int, start: int, rows: KvRows) -> None:
        """Write rows of `save_rows` back, into any slot, at `start`."""
        self._check_rows(slot, start, start + rows[0].shape[1])
        self._backend.write_rows(slot, start, rows)

    def copy_rows(self, source: int, target: int, stop: int) -> None:
        """Copy rows [0, stop) of one slot to another."""
        self.load_rows(target, 0, self.save_rows(source, 0, stop))

    def reset(self, slot: int) -> None:
        """Forget a slot. Its rows are dead as soon as the next prefill starts at 0, so nothing has to be cleared."""
        self._check_rows(slot, 0, 0)
        self.bad_slots = tuple(s for s in self.bad_slots if s != slot)

    def facts(self) -> dict[str, str]:
        """Name, versions, threads and device of the backend."""
        return self._backend.facts()

    def close(self) -> None:
        """Free the engine and its buffers. Idempotent."""
        self._backend.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_one(self, slot: int, ids: Sequence[int], start: int, rows: int) -> Float32:
        self._check(slot, ids, start)
        if rows > self._backend.max_rows:
            raise UsageError(
                f"logits of {rows} rows asked for, this session was opened for {self._backend.max_rows}",
                remedy="open it with a larger verify_rows",
            )
        self._starts[0] = start
        batch = np.asarray(ids, np.int64).reshape(1, -1)
        logits: Float32 = self._backend.step((slot,), batch, self._starts[:1], rows)[0]
        self._note_bad((slot,), logits[-1:])
        return logits

    def _note_bad(self, slots: Sequence[int], logits: Float32) -> None:
        # A sum is finite exactly when all its terms are (overflow of finite logits needs values near 1e38).
        sums = logits.sum(axis=1)
        self.bad_slots = (
            () if np.isfinite(sums).all() else tuple(s for s, x in zip(slots, sums, strict=True) if not np.isfinite(x))
        )

    def _check(self, slot: int, ids: Sequence[int], start: int) -> None:
        if not len(ids):
            raise UsageError("no token ids given: at least one is needed")
        self._check_rows(slot, start, start + len(ids))
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.geometry.vocab:
            raise RequestError(
                "invalid_request",
                f"token id {low if low < 0 else high} is outside the vocabulary 0..{self.geometry.vocab - 1}",
                param="$.prompt",
            )

    def _check_rows(self, slot: int, start: int, stop: int) -> None:
        if not 0 <= slot < self.geometry.max_batch:
            raise UsageError(f"slot {slot}: this engine has slots 0..{self.geometry.max_batch - 1}")
        if not 0 <= start <= stop:
            raise UsageError(f"rows {start}..{stop}: a start at or above 0 and a stop at or above it are needed")
        if stop > self.geometry.capacity:
            raise RequestError(
                "context_length_exceeded", f"{stop} tokens exceed the capacity of {self.geometry.capacity} per slot"
            )
