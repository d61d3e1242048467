"""Predict the size of the files that an engine consists of, beside its manifest and texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edge_engines.graph.writer import INLINE_BYTES, PAGE
from edge_engines.planning.weights import Stored

SMALL_ALIGNMENT = 64  # of arrays below a page
# Nodes and names of model.onnx without constants: 2.5 to 5 kB per layer in engines of all families and precisions.
GRAPH_BYTES_PER_LAYER = 4000
# Plan by weights: 287 to 293 MB for 269 MB, SmolLM2-135M in FP16 compiled with TensorRT-RTX 1.7 for x86-64 GPUs. Not
# measured for INT8, for TensorRT, or on a board.
PLAN_PER_WEIGHT_BYTE = 1.09


def onnx_bytes(stored: Sequence[Stored], num_layers: int) -> int:
    """Return the bytes of model.onnx and model.onnx.data together."""
    arrays = [size for item in stored for size in item.arrays]
    inline = sum(size for size in arrays if size <= INLINE_BYTES)
    return data_file_bytes(arrays) + inline + GRAPH_BYTES_PER_LAYER * num_layers


def plan_bytes(stored: Iterable[Stored]) -> int:
    """Return the bytes of a compiled plan: the weights, and what the compiler keeps with them."""
    return int(PLAN_PER_WEIGHT_BYTE * sum(item.num_bytes for item in stored))


def data_file_bytes(arrays: Iterable[int]) -> int:
    """Return the bytes of model.onnx.data, given those of all arrays in the order they are written (graph/writer)."""
    end = 0
    for size in arrays:
        if size > INLINE_BYTES:
            alignment = PAGE if size >= PAGE else SMALL_ALIGNMENT
            end += -end % alignment + size
    return end
