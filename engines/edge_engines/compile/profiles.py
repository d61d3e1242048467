"""Choose the ranges of the axes that vary: one optimisation profile for decode and one for prefill, or one for both.

Axis letters as in the graph's inputs: B slots, S new positions, R positions that get logits. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_runtime.errors import BuildError
from edge_runtime.manifest import AxisRange, ProfileFacts

PREFILL_MOST = 256  # new positions per step; a longer prompt is prefilled in chunks
PREFILL_USUAL = 64  # the daemon's default chunk, serving.prefill_chunk
LOGIT_ROWS = 16  # positions that get logits when drafted tokens are verified (BackendOptions.verify_rows)

Shape = tuple[int, ...]


def profiles_for(capacity: int, max_batch: int, *, specialises: bool) -> list[ProfileFacts]:
    """Return the profiles of an engine with `capacity` KV rows in each of `max_batch` slots: [decode, prefill].

    One for both, made for decode, where the runtime `specialises` its kernels for the shapes that it meets, as
    TensorRT-RTX does: a second one would only store the fallback kernels again (SmolLM2-135M: 17 MB in FP16, 27 MB in
    INT8).
    """
    positions = min(PREFILL_MOST, capacity)
    slots, one = axis_range("B", 1, 1, max_batch), axis_range("B", 1, 1, 1)
    rows = axis_range("R", 1, 1, min(LOGIT_ROWS, positions))
    if specialises:
        return [ProfileFacts("any", {"B": slots, "S": axis_range("S", 1, 1, positions), "R": rows})]
    decode = {"B": slots, "S": axis_range("S", 1, 1, 1), "R": axis_range("R", 1, 1, 1)}
    prefill = {"B": one, "S": axis_range("S", 1, PREFILL_USUAL, positions), "R": rows}  # a prompt is prefilled alone
    return [ProfileFacts("decode", decode), ProfileFacts("prefill", prefill)]


def axis_range(axis: str, least: int, usual: int, most: int | None) -> AxisRange:
    """Return the range of an axis with 1 <= least <= usual <= most; `usual` gives way where it has to (case C24).

    Raises BuildError for bounds that can't be met.
    """
    if most is None or not 1 <= least <= most:
        raise BuildError(
            f"axis {axis}: {least} to {most} is no range of an optimisation profile", remedy="give 1 <= least <= most"
        )
    return AxisRange(least, min(max(usual, least), most), most)


def shapes_of(shape: Sequence[int | str], profile: ProfileFacts) -> tuple[Shape, Shape, Shape]:
    """Return the least, usual and most shape of an input whose varying axes are named in `shape`."""
    ranges = [profile.axes[n] if isinstance(n, str) else AxisRange(n, n, n) for n in shape]
    return tuple(r.least for r in ranges), tuple(r.usual for r in ranges), tuple(r.most for r in ranges)
