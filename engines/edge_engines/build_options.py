"""Refuse options of a build that don't fit each other, before any work is done."""

from __future__ import annotations

from edge_engines.compile.tensorrt import TARGETS
from edge_engines.graph.builder import LOWERINGS
from edge_engines.verify import LIMITS
from edge_runtime.errors import BuildError, UsageError

MIN_CAPACITY, DEFAULT_CAPACITY = 8, 512
KV_CACHES = ("float", "int8")


def check_options(target: str, precision: str, lowering: str | None, kv: str, max_batch: int) -> None:
    """Raise UsageError naming the option; a `lowering` of None is chosen later."""
    _check_choice("target", target, ("ort-cpu", *TARGETS))
    _check_choice("precision", precision, tuple(LIMITS))
    _check_choice("KV cache", kv, KV_CACHES)
    if lowering is not None:
        _check_choice("lowering", lowering, tuple(LOWERINGS))
    if target in TARGETS and lowering == "ort":
        raise UsageError(f"lowering ort can't be built for target {target}", remedy="use --lowering native or portable")
    if kv == "int8" and lowering not in (None, "portable"):
        raise UsageError(f"lowering {lowering} has no INT8 KV cache", remedy="use --lowering portable")
    if max_batch not in (1, 2):
        raise UsageError(f"max_batch {max_batch}: an engine has 1 or 2 slots")


def check_capacity(capacity: int | None, max_positions: int) -> int:
    """Return the capacity to build for."""
    if capacity is None:
        return min(DEFAULT_CAPACITY, max_positions)
    if not MIN_CAPACITY <= capacity <= max_positions:
        raise BuildError(
            f"capacity {capacity} is outside {MIN_CAPACITY} to {max_positions}, the positions this model knows",
            remedy=f"build with --capacity {min(DEFAULT_CAPACITY, max_positions)}",
        )
    return capacity


def _check_choice(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{option} {value!r} is not supported", remedy=f"choose from: {', '.join(known)}")
