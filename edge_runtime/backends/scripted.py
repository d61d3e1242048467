"""Stand in for an engine: logits that are a known function of each slot's token history, for tests and dry runs.

The KV rows of a slot are the ids written to it, so a wrong slot, a wrong position or a row left over from another
request changes the answer. The contract of `Backend` is enforced to the letter; a breach is a BackendError.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from edge_runtime.backends import Float32, Int64, KvRows
from edge_runtime.errors import BackendError
from edge_runtime.manifest import FORMAT, BuildFacts, Geometry, Manifest, ModelFacts, VerifyFacts

PEAK = 8.0  # logit of the scripted id, the others are 0: above temperature 0 other ids are drawn now and then
_UNWRITTEN = -1

Script = Callable[[Int64], int]  # history [n] of one slot -> the id that comes next


def hash_script(choices: Sequence[int]) -> Script:
    """Return a script that picks one of `choices` by a hash of the whole history."""

    def choose(history: Int64) -> int:
        digest = hashlib.blake2b(history.tobytes(), digest_size=8).digest()
        return choices[int.from_bytes(digest, "big") % len(choices)]

    return choose


def answer_script(answers: Mapping[tuple[int, ...], Sequence[int]], otherwise: Script) -> Script:
    """Return a script that continues each prompt in `answers` with its ids; all else is left to `otherwise`."""

    def choose(history: Int64) -> int:
        ids = tuple(history.tolist())
        for prompt, answer in answers.items():
            done = len(ids) - len(prompt)
            if 0 <= done < len(answer) and ids == (*prompt, *answer[:done]):
                return answer[done]
        return otherwise(history)

    return choose


def scripted_manifest(
    *, name: str = "scripted", vocab: int = 258, capacity: int = 128, max_batch: int = 2, has_text: bool = True
) -> Manifest:
    """Return a manifest of `vocab` known ids, `max_batch` slots of `capacity` rows, and no files."""
    return Manifest(
        format=FORMAT,
        target="ort-cpu",
        lowering="ort",
        precision="fp32",
        kv_dtype="float32",
        geometry=Geometry(layers=1, kv_heads=1, head_dim=1, vocab=vocab, capacity=capacity, max_batch=max_batch),
        model=ModelFacts(
            name=name,
            family="scripted",
            source="none",
            checkpoint_sha256="",
            hidden=1,
            ffn=1,
            heads=1,
            parameters=1,
            rotary=[],
            window=None,
            known_ids=vocab,
            has_text=has_text,
        ),
        graph="",
        inputs=[],
        outputs=[],
        units=[],
        weight_bytes=0,
        files=[],
        verify=VerifyFacts(tokens=1, relative_error=0.0, limit=0.0, same_top1=True, chunked_error=0.0),
        build=BuildFacts(
            tool_version="0", created="1970-01-01T00:00:00Z", seconds=0.0, peak_memory_bytes=0, options={}, versions={}
        ),
    )


class ScriptedBackend:
    """A `Backend` without a model. `verify_rows` bounds the rows of logits per call."""

    def __init__(self, manifest: Manifest, script: Script, *, verify_rows: int = 16) -> None:
        g = manifest.geometry
        self.manifest = manifest
        self.max_rows = verify_rows
        self._script = script
        self._thread = threading.get_ident()
        self._is_open = True
        self._rows = np.full((g.max_batch, g.capacity), _UNWRITTEN, np.int64)  # [B, C]
        self._logits = np.zeros((g.max_batch, verify_rows, g.vocab), np.float32)  # [B, rows, V]

    def step(self, slots: Sequence[int], ids: Int64, starts: Int64, rows: int) -> Float32:
        """See `Backend.step`. Raises BackendError for a call that breaks the contract."""
        self._check_owner()
        self._check_step(slots, ids, starts, rows)
        n, S = ids.shape
        logits = self._logits[:n, :rows]
        logits.fill(0.0)
        for i, slot in enumerate(slots):
            start = int(starts[i])
            self._rows[slot, start : start + S] = ids[i]
            for row in range(rows):
                history = self._rows[slot, : start + S - rows + row + 1]
                logits[i, row, self._script(history)] = PEAK
        return logits

    def read_rows(self, slot: int, start: int, stop: int) -> KvRows:
        """See `Backend.read_rows`."""
        self._check_owner()
        rows = self._rows[slot, start:stop].reshape(1, -1, 1)
        return [rows.copy(), rows.copy()]

    def write_rows(self, slot: int, start: int, rows: KvRows) -> None:
        """See `Backend.write_rows`."""
        self._check_owner()
        self._rows[slot, start : start + rows[0].shape[1]] = rows[0][0, :, 0]

    def facts(self) -> dict[str, str]:
        """See `Backend.facts`."""
        return {"name": "scripted", "version": "1", "device": "none", "threads": "1"}

    def close(self) -> None:
        """See `Backend.close`."""
        self._is_open = False

    def _check_owner(self) -> None:
        if threading.get_ident() != self._thread:
            raise BackendError(
                f"the backend belongs to thread {self._thread} and was called from {threading.get_ident()}",
                remedy="queue the work for the thread that opened it",
            )
        if not self._is_open:
            raise BackendError("the backend is closed")

    def _check_step(self, slots: Sequence[int], ids: Int64, starts: Int64, rows: int) -> None:
        g = self.manifest.geometry
        n = len(slots)
        is_alone = n == 1 and 0 <= slots[0] < g.max_batch
        _require(is_alone or list(slots) == list(range(g.max_batch)), f"slots {list(slots)}")
        _require(ids.dtype == np.int64 and ids.ndim == 2 and ids.shape[0] == n, f"ids {ids.dtype} {ids.shape}")
        _require(ids.shape[1] == 1 or (is_alone and ids.shape[1] > 1), f"ids {ids.shape} for {n} slots")
        _require(starts.dtype == np.int64 and starts.shape == (n,), f"starts {starts.dtype} {starts.shape}")
        _require(1 <= rows <= min(ids.shape[1], self._logits.shape[1]), f"{rows} rows of logits")
        _require(int(ids.min()) >= 0 and int(ids.max()) < g.vocab, "an id outside the vocabulary")
        for slot, start in zip(slots, starts.tolist(), strict=True):
            _require(0 <= start <= g.capacity - ids.shape[1], f"rows {start}..{start + ids.shape[1]} of {g.capacity}")
            _require(bool((self._rows[slot, :start] != _UNWRITTEN).all()), f"slot {slot} below row {start} has holes")


def _require(is_kept: bool, breach: str) -> None:
    if not is_kept:
        raise BackendError(f"the call breaks the backend contract: {breach}")
