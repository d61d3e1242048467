"""Engines of the golden models whose KV cache is INT8, and what the simulator says that they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import Float32
from edge_engines.graph.builder import GraphOptions, write_graph
from edge_engines.graph.lowering import KvScales
from edge_engines.sensitivity.blocks import Keep, keep_exactly, multiply_exactly
from edge_engines.sensitivity.kv import RoundedKv, collect_kv_ranges, kv_scales, run_keeping
from edge_engines.sensitivity.passes import Passes
from edge_runtime.backends import BackendOptions, open_backend
from edge_runtime.manifest import Manifest, read_manifest
from edge_runtime.session.session import Session
from support.tiny_engines import GOLDEN, build_tiny

CAPACITY = 64


@dataclass(frozen=True)
class Int8KvEngine:
    """An engine folder, the manifest it is opened with, and its scales."""

    folder: Path
    manifest: Manifest
    scales: KvScales

    def open(self, verify_rows: int = 16) -> Session:
        """Open it as `open_session` does."""
        return Session(open_backend(self.folder, self.manifest, BackendOptions(1, verify_rows=verify_rows)))


def build_int8_kv(name: str, folder: Path, precision: str = "fp32") -> Int8KvEngine:
    """Build a golden model with a float cache, then write its graph again with an INT8 cache."""
    build_tiny(name, folder, lowering="portable", precision=precision, capacity=CAPACITY)
    manifest = msgspec.structs.replace(read_manifest(folder), kv_dtype="int8")
    with open_checkpoint(GOLDEN / name) as checkpoint:
        model = checkpoint.for_capacity(CAPACITY)
        scales = calibrated(Passes(model.spec, model))
        options = GraphOptions("portable", precision, CAPACITY, kv_scales=scales)  # type: ignore[arg-type]
        write_graph(folder, model.spec, model, options)
    return Int8KvEngine(folder, manifest, scales)


def calibrated(passes: Passes) -> KvScales:
    """Return scales from ids drawn over the whole vocabulary."""
    ids = np.random.default_rng(3).integers(0, passes.spec.vocab, (24, 40))
    return kv_scales(collect_kv_ranges(passes, ids, lambda _: None))


def simulated(name: str, ids: Sequence[int], scales: KvScales | None) -> Float32:
    """Return the logits [S, V] of every position in numpy, with a float cache where there are no scales."""
    keep: Keep = keep_exactly if scales is None else RoundedKv(scales)
    with open_checkpoint(GOLDEN / name) as checkpoint:
        model = checkpoint.for_capacity(CAPACITY)
        passes = Passes(model.spec, model)
        stream = run_keeping(passes, passes.embed(np.array([ids])), multiply_exactly, keep)
        return next(iter(passes.logits(stream)))


def relative(found: NDArray[np.floating], wanted: NDArray[np.floating]) -> float:
    """Return the L2 norm of the difference over that of `wanted`."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
