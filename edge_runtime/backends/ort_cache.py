"""Keep the KV cache of an ONNX Runtime engine: updated in place by the graph, or by us from the rows it returns.

Both own the buffers, allocated once: [2 * L, B, K, C, D], key and value of each layer in turn. One slot alone is that
slot's rows of the same buffers, by pointer offset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from edge_runtime.backends import Int64, KvRows
from edge_runtime.manifest import Geometry, Manifest

Array = np.ndarray[Any, Any]
Bind = Callable[[str, Array, Sequence[int]], None]  # (tensor's name, array that begins with its elements, shape)


class OrtCache(Protocol):
    """What differs between the two."""

    buffers: Array  # [2 * L, B, K, C, D]
    reads_dead_rows: bool  # products with rows that hold nothing get weight 0, so these must be finite

    def bind(self, slots: Sequence[int], bind_input: Bind, bind_output: Bind) -> None:
        """Bind what is the same in every step of `slots`."""
        ...

    def bind_length(self, slots: Sequence[int], length: int, bind_output: Bind) -> None:
        """Bind what depends on the number of positions in a step; called before the first step of that many."""
        ...

    def keep(self, slots: Sequence[int], starts: Int64, length: int) -> None:
        """Take over the rows of the step that has run: `length` rows of each slot, from its start on."""
        ...


class CacheInPlace:
    """past and present of each layer are bound to one address: the graph writes the new rows. See OrtCache."""

    def __init__(self, manifest: Manifest) -> None:
        self.buffers = _allocate(manifest)
        self.reads_dead_rows = manifest.lowering != "ort"

    def bind(self, slots: Sequence[int], bind_input: Bind, bind_output: Bind) -> None:
        """See OrtCache.bind."""
        for name, rows in _named_rows(self.buffers, slots):
            bind_input(f"past_key_values.{name}", rows, rows.shape)
            bind_output(f"present.{name}", rows, rows.shape)

    def bind_length(self, slots: Sequence[int], length: int, bind_output: Bind) -> None:
        """See OrtCache.bind_length: nothing does."""

    def keep(self, slots: Sequence[int], starts: Int64, length: int) -> None:
        """See OrtCache.keep: the graph has."""


class CacheFromNewRows:
    """The graph reads past and returns the rows of the step, which are copied behind. See OrtCache."""

    reads_dead_rows = True

    def __init__(self, manifest: Manifest) -> None:
        g: Geometry = manifest.geometry
        self.buffers = _allocate(manifest)
        self._row_shape = (g.kv_heads, g.head_dim)
        most = max(g.capacity, g.max_batch) * g.kv_heads * g.head_dim  # one slot in full, or one row of each
        self._new = _zeroed((2 * g.layers, most), self.buffers.dtype)

    def bind(self, slots: Sequence[int], bind_input: Bind, bind_output: Bind) -> None:
        """See OrtCache.bind."""
        for name, rows in _named_rows(self.buffers, slots):
            bind_input(f"past_key_values.{name}", rows, rows.shape)

    def bind_length(self, slots: Sequence[int], length: int, bind_output: Bind) -> None:
        """See OrtCache.bind_length."""
        kv_heads, head_dim = self._row_shape
        for i, rows in enumerate(self._new):
            bind_output(f"new.{_name(i)}", rows, (len(slots), kv_heads, length, head_dim))

    def keep(self, slots: Sequence[int], starts: Int64, length: int) -> None:
        """See OrtCache.keep."""
        kv_heads, head_dim = self._row_shape
        size = len(slots) * kv_heads * length * head_dim
        new = self._new[:, :size].reshape(-1, len(slots), kv_heads, length, head_dim)
        for i, slot in enumerate(slots):
            self.buffers[:, slot, :, starts[i] : starts[i] + length] = new[:, i]


def open_cache(manifest: Manifest) -> OrtCache:
    """Allocate the cache of an engine, as its lowering wants it."""
    return CacheFromNewRows(manifest) if manifest.lowering == "portable" else CacheInPlace(manifest)


def read_rows(buffers: Array, slot: int, start: int, stop: int) -> KvRows:
    """Copy rows [start, stop) of a slot: key and value of each layer, [K, rows, D]."""
    return list(buffers[:, slot, :, start:stop].copy())


def write_rows(buffers: Array, slot: int, start: int, rows: KvRows) -> None:
    """Copy what `read_rows` returned into a slot at `start`."""
    for buffer, part in zip(buffers, rows, strict=True):
        buffer[slot, :, start : start + part.shape[1]] = part


def _allocate(manifest: Manifest) -> Array:
    g: Geometry = manifest.geometry
    return _zeroed((2 * g.layers, g.max_batch, g.kv_heads, g.capacity, g.head_dim), np.dtype(manifest.kv_dtype))


def _zeroed(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return zeros of which every page exists before the first request."""
    array = np.empty(shape, dtype)
    array.fill(0)
    return array


def _named_rows(buffers: Array, slots: Sequence[int]) -> list[tuple[str, Array]]:
    first, n = slots[0], len(slots)
    return [(_name(i), buffer[first : first + n]) for i, buffer in enumerate(buffers)]


def _name(i: int) -> str:
    layer, part = divmod(i, 2)
    return f"{layer}.{('key', 'value')[part]}"
