"""Run steps with ONNX Runtime: buffers allocated once and bound once; ort_cache.py keeps the KV cache.

One slot alone runs as batch 1 on that slot's rows of the cache, by pointer offset; both slots run as one batch over all
of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.backends import BackendOptions, Float32, Int64, KvRows
from edge_runtime.backends.byte_products import refuse_saturating_cpu
from edge_runtime.backends.cores import are_shared, default_threads
from edge_runtime.backends.ort_cache import Array, OrtCache, open_cache, read_rows, write_rows
from edge_runtime.errors import BackendError
from edge_runtime.manifest import Geometry, Manifest

# How long an idle thread spins before it sleeps. Measured on two cores against sleeping at once: steps are 10 to 20 %
# faster when the cores are quiet (FP32 16.6 -> 14.1 ms, w8 7.3 -> 5.9 ms), and 20 % slower when one of them is busy.
SPIN_US = 200


class OrtBackend:
    """See Backend. Opened, used and closed by one thread."""

    def __init__(self, folder: Path, manifest: Manifest, options: BackendOptions) -> None:
        self.manifest = manifest
        self._owner = threading.get_ident()
        self._threads = options.threads or default_threads()
        self._spinning = not are_shared(self._threads) if options.spinning is None else options.spinning
        refuse_saturating_cpu(manifest)
        self._ort = _import_onnxruntime()
        self._session: Any = self._load(folder / manifest.graph)
        g = manifest.geometry
        self._cache: OrtCache = open_cache(manifest)
        self._spoiled: set[int] = set()  # slots whose rows may hold NaN or infinity
        self._ids = np.zeros((g.max_batch, g.capacity), np.int64)
        self._starts = np.zeros(g.max_batch, np.int64)
        self.max_rows = options.verify_rows
        self._rows = np.zeros((g.max_batch, self.max_rows), np.int64)
        self._logits = np.empty((max(g.max_batch, self.max_rows), g.vocab), np.float32)
        self._bindings = {slots: self._bind(slots) for slots in _slot_sets(g)}
        self._bound_shapes: dict[tuple[int, ...], tuple[int, int]] = {}

    def step(self, slots: Sequence[int], ids: Int64, starts: Int64, rows: int) -> Float32:
        """See Backend.step."""
        self._check_thread()
        n, length = ids.shape
        key = tuple(slots)
        if self._session is None:
            raise BackendError("this session is closed", remedy="open a new one")
        flat = self._ids.reshape(-1)[: n * length]
        flat[:] = ids.reshape(-1)
        self._starts[:n] = starts
        row_numbers = self._rows.reshape(-1)[: n * rows]
        row_numbers.reshape(n, rows)[:] = np.arange(length - rows, length)
        self._rebind_shapes(key, length, rows)
        self._clear_dead_rows(key, starts)
        try:
            self._session.run_with_iobinding(self._bindings[key])
        except Exception as error:  # the library raises its own, undocumented kinds
            raise BackendError(f"ONNX Runtime failed in a step of {n} x {length} tokens: {error}") from error
        self._cache.keep(key, self._starts, length)
        logits = self._logits[: n * rows].reshape(n, rows, -1)
        self._note_spoiled(key, logits)
        return logits

    def read_rows(self, slot: int, start: int, stop: int) -> KvRows:
        """See Backend.read_rows."""
        self._check_thread()
        return read_rows(self._cache.buffers, slot, start, stop)

    def write_rows(self, slot: int, start: int, rows: KvRows) -> None:
        """See Backend.write_rows."""
        self._check_thread()
        write_rows(self._cache.buffers, slot, start, rows)

    def facts(self) -> dict[str, str]:
        """See Backend.facts."""
        return {
            "backend": "onnxruntime",
            "version": str(self._ort.__version__),
            "providers": ",".join(self._session.get_providers()),
            "threads": str(self._threads),
            "spinning": str(self._spinning).lower(),
        }

    def close(self) -> None:
        """See Backend.close."""
        self._bindings.clear()
        self._session = None

    def _load(self, graph: Path) -> Any:
        ort = self._ort
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.graph_optimization_level = self._optimization_level()
        options.enable_mem_pattern = False  # shapes vary with the prompt; a pattern per shape would grow memory
        options.log_severity_level = 2
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if self._spinning else "0")
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_US))
        try:
            return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the library raises its own, undocumented kinds
            raise BackendError(
                f"{graph}: ONNX Runtime {ort.__version__} can't load this graph: {error}",
                remedy="build the engine again with this version installed",
            ) from error

    def _optimization_level(self) -> Any:
        """Return how much ONNX Runtime may rewrite the graph while loading.

        The `ort` lowering is written in its optimised form: nothing is left to do at start-up (a test compares).
        Folding helps where constants can be converted once instead of in every step: FP16 weights on a CPU without
        FP16 kernels, the tied head of the `native` lowering.
        """
        levels = self._ort.GraphOptimizationLevel
        is_final = self.manifest.lowering == "ort" and self.manifest.precision != "fp16"
        return levels.ORT_DISABLE_ALL if is_final else levels.ORT_ENABLE_ALL

    def _bind(self, slots: tuple[int, ...]) -> Any:
        """Bind everything whose shape never changes for this set of slots."""
        binding = self._session.io_binding()
        _bind_array(binding.bind_input, "starts", self._starts, (len(slots),))
        bind_input, bind_output = partial(_bind_array, binding.bind_input), partial(_bind_array, binding.bind_output)
        self._cache.bind(slots, bind_input, bind_output)
        return binding

    def _rebind_shapes(self, key: tuple[int, ...], length: int, rows: int) -> None:
        """Bind what depends on the shapes of this step, unless they are those of the last one."""
        if self._bound_shapes.get(key) == (length, rows):
            return
        binding, n = self._bindings[key], len(key)
        _bind_array(binding.bind_input, "input_ids", self._ids, (n, length))
        _bind_array(binding.bind_input, "logit_rows", self._rows, (n, rows))
        _bind_array(binding.bind_output, "logits", self._logits, (n, rows, self.manifest.geometry.vocab))
        self._cache.bind_length(key, length, partial(_bind_array, binding.bind_output))
        self._bound_shapes[key] = (length, rows)

    def _clear_dead_rows(self, slots: Sequence[int], starts: Int64) -> None:
        """Zero the rows behind a slot's start where an earlier step may have left NaN there: 0 x NaN is NaN."""
        for slot, start in zip(slots, starts, strict=True):
            if slot in self._spoiled:
                self._cache.buffers[:, slot, :, start:] = 0
                self._spoiled.discard(slot)

    def _note_spoiled(self, slots: Sequence[int], logits: Float32) -> None:
        """Remember slots that answered NaN or infinity, where the graph reads rows that hold nothing."""
        if self._cache.reads_dead_rows:
            sums = logits.sum(axis=(1, 2))  # finite exactly when all terms are
            self._spoiled.update(slot for slot, x in zip(slots, sums, strict=True) if not np.isfinite(x))

    def _check_thread(self) -> None:
        if threading.get_ident() != self._owner:
            raise BackendError("the engine was called from another thread than the one that opened it (case C37)")


def _bind_array(bind: Any, name: str, array: Array, shape: Sequence[int]) -> None:
    """Bind `shape` elements from the start of an array that stays alive as long as its binding."""
    assert array.flags.c_contiguous or array[0].flags.c_contiguous, name
    bind(name, "cpu", 0, array.dtype.type, list(shape), array.ctypes.data)


def _slot_sets(geometry: Geometry) -> list[tuple[int, ...]]:
    """Return each slot alone, and all slots together."""
    alone: list[tuple[int, ...]] = [(slot,) for slot in range(geometry.max_batch)]
    return alone if geometry.max_batch == 1 else [*alone, tuple(range(geometry.max_batch))]


def _import_onnxruntime() -> Any:
    # Since 1.32 it reports usage to its maker unless told otherwise before it is imported.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        import onnxruntime  # noqa: PLC0415  # only when an engine of this target is opened
    except ImportError as error:
        raise BackendError(
            f"ONNX Runtime is not installed: {error}", remedy="install it with: pip install 'edge-runtime[cpu]'"
        ) from error
    return onnxruntime
