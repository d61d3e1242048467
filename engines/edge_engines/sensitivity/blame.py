"""Find the units that a failing gate is owed to: measure effects on the sequences that lose most.

The ranking text is short. A unit whose input is larger on some other text, say in a language that calibration has not
met, is clipped there and looks harmless on the ranking text. One unit left out of a broken set shows little, since the
other broken ones hide it: so each is measured alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from edge_engines.sensitivity.gate import Check
from edge_engines.sensitivity.journal import Journal
from edge_engines.sensitivity.measure import EffectMeter, LocalError, measure_local
from edge_engines.sensitivity.passes import Ids, Passes

UNEXPECTED = 2.0  # times the sum of effects: where the worst sequences lose so much, there is something to find
NUM_SEQUENCES = 2  # that lose most
NUM_LIKELY = 12  # units with the largest local error there


def find_blamed(
    check: Check,
    effects: Mapping[str, float],
    passes: Passes,
    scales: Mapping[str, float],
    ids: Ids,
    journal: Journal,
) -> dict[str, float]:
    """Return better effects of some units for a set that failed; empty where it loses about what was to be expected.

    `effects` holds the KL of each unit as known so far, `ids` is the gate's text. A new effect is the mean over that
    text: the old one for most of it, the one measured now for the sequences that lose most.
    """
    worst = _largest(check.excess, NUM_SEQUENCES)
    expected = math.fsum(effects[unit] for unit in check.int8)
    if not np.mean([check.excess[row] for row in worst]) > UNEXPECTED * expected:
        return {}
    share, rows = len(worst) / len(ids), ids[worst]
    journal = journal.within("sequences", *(str(row) for row in worst))
    local = journal.once("local", dict[str, LocalError], lambda: measure_local(passes, rows, scales, lambda _: None))
    likely = sorted(check.int8, key=lambda unit: (-local[unit].score, unit))[:NUM_LIKELY]
    meter = EffectMeter(passes, rows, scales, journal, keeps_baseline=False)
    return {unit: (1 - share) * effects[unit] + share * meter.of({unit}).kl for unit in likely}


def _largest(values: Sequence[float], count: int) -> list[int]:
    """Return where the largest stand, in order of place."""
    return sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:count])
