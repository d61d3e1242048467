"""Estimate the memory that a compilation takes."""

from __future__ import annotations

# Peak of the compiler process with TensorRT-RTX 1.7: 0.31 to 0.41 GB for models of a megabyte, 1.40 GB for
# SmolLM2-135M in FP16 (0.27 GB of weights). Public reports about TensorRT on boards say three to four times the bytes
# of the parameters.
BASE_BYTES = 420_000_000
PER_WEIGHT_BYTE = 4.0


def needed_memory(weight_bytes: int) -> int:
    """Return an estimate of the bytes that compiling a graph with `weight_bytes` of weights takes at its peak."""
    return int(BASE_BYTES + PER_WEIGHT_BYTE * weight_bytes)
