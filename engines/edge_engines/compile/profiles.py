"""Choose the ranges of the axes that vary, one optimisation profile for decode and one for prefill.

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


def profiles_for(capacity: int, max_batch: int) -> list[ProfileFacts]:
    """Return the profiles [decode, prefill] of an engine with `capacity` KV rows in each of `max_batch` slots."""
    positions = min(PREFILL_MOST, capacity)
    one = axis_range("B", 1, 1, 1)
    decode = {"B": axis_range("B", 1, 1, max_batch), "S": axis_range("S", 1, 1, 1), "R": axis_range("R", 1, 1, 1)}
    prefill = {
        "B": one,  # a prompt is prefilled alone
        "S": axis_range("S", 1, PREFILL_USUAL, positions),
        "R": axis_range("R", 1, 1, min(LOGIT_ROWS, positions)),
    }
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
