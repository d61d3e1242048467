"""Place the bars of the per-unit chart: graph order from left to right, one panel per measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edge_engines.report.data import ReportData, UnitMeasures, UnitResult
from edge_engines.report.scale import Scale, Tick

HEIGHT = 220.0  # pixels of a panel
GAP = 0.18  # share of a bar's place that stays empty
MAX_LAYER_LABELS = 7  # fit on 320 pixels
KNOWN_KINDS = ("embed", "qkv", "o", "gate_up", "down", "head")
_LEAST = 1.0  # pixels of a bar that is not zero


@dataclass(frozen=True, slots=True)
class Measure:
    """One of the measures to switch between."""

    key: str
    label: str
    says: str
    value: Callable[[UnitMeasures], float]
    is_ruled: bool = False  # whether the threshold is drawn


MEASURES = (
    Measure("score", "larger of both", "The larger of the pooled and the per-token error: what the threshold is held "
            "against.", lambda m: m.score, is_ruled=True),
    Measure("pooled", "pooled", "Relative error of the unit's output over all tokens at once. One token with very "
            "large activations can hide the others.", lambda m: m.pooled, is_ruled=True),
    Measure("token", "per token", "Mean over tokens of the relative error. It misses a single spike.",
            lambda m: m.per_token, is_ruled=True),
    Measure("worst", "worst token", "Relative error of the one token that suffers most.", lambda m: m.worst_token),
    Measure("kl", "effect (KL)", "What this unit alone does to the answer: KL divergence at the logits, in nats per "
            "token.", lambda m: m.kl),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bar:
    """One unit in one panel: percent across, pixels down."""

    x: float
    width: float
    y: float
    height: float
    kind: str


@dataclass(frozen=True, slots=True)
class Panel:
    """The chart of one measure."""

    measure: Measure
    bars: Sequence[Bar]
    ticks: Sequence[Tick]
    threshold_y: float | None


@dataclass(frozen=True, slots=True)
class Cell:
    """The precision of one unit, in the strip below the bars."""

    x: float
    width: float
    precision: str


@dataclass(frozen=True, slots=True)
class UnitChart:
    """All panels and what they share."""

    height: float
    panels: Sequence[Panel]
    cells: Sequence[Cell]
    layers: Sequence[Tick]
    kinds: Sequence[str]
    precisions: Sequence[str]
    num_units: int
    start: int  # the unit to show first: the one with the largest error


def unit_chart(data: ReportData) -> UnitChart | None:
    """Return the chart of the units that were measured, or None when none was."""
    units = measured_units(data)
    if not units:
        return None
    pitch = 100 / len(units)
    errors = [unit.measures.score for unit in units if unit.measures]
    return UnitChart(
        height=HEIGHT,
        panels=[_panel(measure, units, data.threshold) for measure in MEASURES],
        cells=[Cell(round(i * pitch, 3), round(pitch, 3), unit.precision) for i, unit in enumerate(units)],
        layers=_layer_ticks([unit.unit for unit in units]),
        kinds=list(dict.fromkeys(colour_of(unit.kind) for unit in units)),
        precisions=list(dict.fromkeys(unit.precision for unit in units)),
        num_units=len(units),
        start=errors.index(max(errors)),
    )


def measured_units(data: ReportData) -> list[UnitResult]:
    """Return the units that have a bar, in graph order."""
    return [unit for unit in data.units if unit.measures is not None]


def colour_of(kind: str) -> str:
    """Return the class that colours a kind; kinds of other models share one."""
    return kind if kind in KNOWN_KINDS else "other"


def _panel(measure: Measure, units: Sequence[UnitResult], threshold: float | None) -> Panel:
    values = [measure.value(unit.measures) for unit in units if unit.measures]
    ruled = threshold if measure.is_ruled else None
    scale = Scale(0.0, max([*values, (ruled or 0.0) * 1.15]) * 1.04 or 1.0)
    pitch = 100 / len(units)
    bars = []
    for i, (unit, value) in enumerate(zip(units, values, strict=True)):
        y = min(scale.pixels(value, HEIGHT), HEIGHT - _LEAST if value > 0 else HEIGHT)
        x, width = (i + GAP / 2) * pitch, (1 - GAP) * pitch
        bars.append(Bar(round(x, 3), round(width, 3), y, round(HEIGHT - y, 2), colour_of(unit.kind)))
    return Panel(
        measure=measure,
        bars=bars,
        ticks=[Tick(scale.pixels(value, HEIGHT), label) for value, label in scale.round_numbers(5)],
        threshold_y=scale.pixels(ruled, HEIGHT) if ruled is not None else None,
    )


def _layer_ticks(names: Sequence[str]) -> list[Tick]:
    """Return the first unit of each layer that is labelled."""
    starts: dict[int, int] = {}
    for i, name in enumerate(names):
        parts = name.split(".")
        if len(parts) > 1 and parts[1].isdecimal():
            starts.setdefault(int(parts[1]), i)
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if len(starts) <= s * MAX_LAYER_LABELS or s == 1000)
    return [Tick(round(100 * i / len(names), 3), str(layer)) for layer, i in starts.items() if layer % step == 0]
