"""Refuse a compilation that memory can't hold, before the first long step."""

from __future__ import annotations

from edge_runtime.errors import BuildError

# Peak of the compiler process with TensorRT-RTX 1.7: 0.31 to 0.41 GB for models of a megabyte, 1.40 GB for
# SmolLM2-135M in FP16 (0.27 GB of weights). Public reports about TensorRT on boards say three to four times the bytes
# of the parameters.
BASE_BYTES = 420_000_000
PER_WEIGHT_BYTE = 4.0
KEPT_BACK = 0.1  # of what is available


def needed_memory(weight_bytes: int) -> int:
    """Return an estimate of the bytes that compiling a graph with `weight_bytes` of weights takes at its peak."""
    return int(BASE_BYTES + PER_WEIGHT_BYTE * weight_bytes)


def check_memory(weight_bytes: int, available: int) -> None:
    """Raise BuildError with the numbers when `available` bytes (MemAvailable) less a tenth are not enough."""
    needed, usable = needed_memory(weight_bytes), int(available * (1 - KEPT_BACK))
    if needed > usable:
        raise BuildError(
            f"compiling {weight_bytes / 1e6:.0f} MB of weights takes about {needed / 1e6:.0f} MB of memory, "
            f"{available / 1e6:.0f} MB are available and a tenth of that is kept back",
            remedy="stop other programs, add memory, or build on a larger machine",
        )
