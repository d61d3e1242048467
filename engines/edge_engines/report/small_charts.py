"""Place the small charts: the gauge of the verdict, stacked bytes, bars of a table, histograms. Percent across."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_engines.report.data import GateResult, Histogram, Part
from edge_engines.report.scale import Scale

HISTOGRAM_HEIGHT = 72.0  # pixels
_SHOWN_ABOVE = 3.0  # times the allowed loss shown above the limit
_LABEL_ROOM = 40.0  # percent that two labels need on a phone
_ROOM = 0.12  # of the gauge's range, at both ends
_LEAST_RANGE = 0.01  # of the ratio, so that a gate of 1 has a scale


@dataclass(frozen=True, slots=True)
class Gauge:
    """Where the baseline, the interval and the limit lie on one line; None of the interval: not finite."""

    base: float
    limit: float
    low: float | None
    ratio: float | None
    upper: float | None
    is_crowded: bool  # baseline and limit are too near for a label each
    is_beyond: bool  # the ratio is too large for the scale


@dataclass(frozen=True, slots=True)
class Stripe:
    """A part of a whole, or a bar of a table or histogram."""

    x: float
    width: float
    key: str = ""
    says: str = ""
    y: float = 0.0
    height: float = 0.0


def gauge(gate: GateResult) -> Gauge:
    """Return the gauge; what is far above the limit stands at its right end."""
    span = max(gate.limit - 1, _LEAST_RANGE)
    seen = [v for v in (gate.low, gate.upper) if v is not None]
    low, high = min([1.0, *seen]), min(max([gate.limit, *seen]), gate.limit + _SHOWN_ABOVE * span)
    room = (high - low) * _ROOM
    scale = Scale(low - room, high + room)
    low_at, ratio_at, upper_at = (None if v is None else scale.percent(v) for v in (gate.low, gate.ratio, gate.upper))
    base, limit = scale.percent(1.0), scale.percent(gate.limit)
    is_beyond = gate.ratio is not None and gate.ratio > scale.high
    return Gauge(base, limit, low_at, ratio_at, upper_at, abs(limit - base) < _LABEL_ROOM, is_beyond)


def stacked(parts: Sequence[Part], is_real: bool) -> list[Stripe]:
    """Return the parts side by side; predicted and real ones share a scale."""
    whole = max(sum(p.real or 0 for p in parts), sum(p.predicted or 0 for p in parts)) or 1
    found, x = [], 0.0
    for part in parts:
        width = 100 * ((part.real if is_real else part.predicted) or 0) / whole
        if width:
            found.append(Stripe(round(x, 3), round(width, 3), part.key, part.name))
        x += width
    return found


def shares(values: Sequence[float]) -> list[float]:
    """Return each value in percent of the largest."""
    largest = max(values, default=0.0) or 1.0
    return [round(100 * value / largest, 2) for value in values]


def histogram_bars(histogram: Histogram) -> list[Stripe]:
    """Return one bar per bin, all of the same width; a count of one can be seen."""
    pitch, most = 100 / max(len(histogram.counts), 1), max(histogram.counts, default=0) or 1
    bars = []
    for i, count in enumerate(histogram.counts):
        height = max(HISTOGRAM_HEIGHT * count / most, 2.0) if count else 0.0
        says = f"{histogram.edges[i]:.3g} to {histogram.edges[i + 1]:.3g}: {count} tokens"
        bars.append(
            Stripe(round(i * pitch, 3), round(pitch * 0.9, 3), "", says, HISTOGRAM_HEIGHT - height, round(height, 2))
        )
    return bars
