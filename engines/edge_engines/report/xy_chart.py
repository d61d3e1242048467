"""Place points over two axes: the gate's checks, the residual error by depth, the choices of budget mode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from edge_engines.report.data import GateCheck, GateResult, ParetoPoint, ReportData
from edge_engines.report.scale import Scale, Tick
from edge_engines.report.words import bytes_text, factor_text, percent_text

HEIGHT = 240.0  # pixels
_SHOWN_ABOVE = 4.0  # times the allowed loss shown above the limit; what is further up stands at the edge
_LABEL_LENGTH = 18  # characters of a choice's name that fit beside its point on a phone
_EDGE = 12.0  # pixels from the top of a mark that stands at the edge
_LEAST_SHARE = 0.9  # the axis begins here or further left
_LEAST_ALLOWED = 0.02  # of the ratio, so that a limit of 1 has a scale


@dataclass(frozen=True, slots=True)
class Mark:
    """One point: percent across, pixels down."""

    x: float
    y: float
    look: str  # pass, fail, chosen, rule or plain
    says: str
    label: str = ""
    top: float | None = None  # end of the whisker


@dataclass(frozen=True, slots=True)
class XyChart:
    """Points, the line through them, axes and at most one limit."""

    height: float
    marks: Sequence[Mark]
    lines: Sequence[tuple[float, float, float, float]]  # x1, y1, x2, y2
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    x_title: str
    y_title: str
    limit_y: float | None = None
    limit: float | None = None


def gate_chart(data: ReportData) -> XyChart | None:
    """Return ratio and upper bound of every finite check against the INT8 share, or None when there was none."""
    gate = data.gate
    if gate is None:
        return None
    looks = _checks_with_looks(data, gate)
    if not looks:
        return None
    limit = gate.limit
    edge = limit + _SHOWN_ABOVE * max(limit - 1, _LEAST_ALLOWED)
    ratios = [check.ratio for check, _, _ in looks if check.ratio is not None]
    uppers = [check.upper for check, look, _ in looks if check.upper is not None and look != "rule"]
    y = _padded(min([*ratios, 1.0]), min(max([*uppers, limit]), edge))
    x = _padded(min([*(check.int8_share for check, _, _ in looks), _LEAST_SHARE]), 1.0)
    marks = [_check_mark(check, look, label, x, y) for check, look, label in looks]
    ordered = sorted((mark for mark in marks if mark.look != "rule"), key=lambda mark: mark.x)
    return XyChart(
        height=HEIGHT,
        marks=sorted(marks, key=lambda mark: mark.look in ("chosen", "rule")),  # drawn last, so on top
        lines=[(a.x, a.y, b.x, b.y) for a, b in pairwise(ordered)],
        x_ticks=[Tick(x.percent(v), percent_text(v, 0)) for v, _ in x.round_numbers(5) if 0 <= v <= 1],
        y_ticks=[Tick(y.pixels(v, HEIGHT), label) for v, label in y.round_numbers(6)],
        x_title="share of the body's weights in INT8",
        y_title="perplexity × baseline",
        limit_y=y.pixels(limit, HEIGHT),
        limit=limit,
    )


def residual_chart(data: ReportData) -> XyChart | None:
    """Return the relative error of the residual stream behind each layer."""
    if len(data.residual) < 2:
        return None
    x, y = Scale(0, len(data.residual) - 1), _padded(0.0, max(data.residual) or 1.0)
    places = [(x.percent(i), y.pixels(value, HEIGHT)) for i, value in enumerate(data.residual)]
    return XyChart(
        height=HEIGHT,
        marks=[
            Mark(a, b, "plain", f"layer {i}: {value:.4f}")
            for i, ((a, b), value) in enumerate(zip(places, data.residual, strict=True))
        ],
        lines=[(*a, *b) for a, b in pairwise(places)],
        x_ticks=[Tick(x.percent(v), label) for v, label in x.round_numbers(6) if v == int(v)],
        y_ticks=[Tick(y.pixels(v, HEIGHT), label) for v, label in y.round_numbers(5) if v >= 0],
        x_title="layer",
        y_title="relative error of the residual stream",
    )


def pareto_chart(data: ReportData) -> XyChart | None:
    """Return the choices by engine bytes and ratio."""
    points = data.pareto
    if len(points) < 2:
        return None
    x = _padded(min(p.engine_bytes for p in points), max(p.engine_bytes for p in points))
    y = _padded(min(1.0, *(p.ratio for p in points)), max(p.ratio for p in points))
    return XyChart(
        height=HEIGHT,
        marks=[_pareto_mark(point, x, y) for point in points],
        lines=[],
        x_ticks=[Tick(x.percent(v), bytes_text(round(v))) for v, _ in x.round_numbers(4)],
        y_ticks=[Tick(y.pixels(v, HEIGHT), label) for v, label in y.round_numbers(5)],
        x_title="engine bytes",
        y_title="perplexity × baseline",
    )


def _checks_with_looks(data: ReportData, gate: GateResult) -> list[tuple[GateCheck, str, str]]:
    """Return every finite check with its look and label, the chosen one and the rule's among them."""
    found = {_place(check): (check, "pass" if _passes(check, gate.limit) else "fail", "") for check in data.checks}
    if data.rule_only is not None:
        found[_place(data.rule_only)] = (data.rule_only, "rule", "pooled rule alone")
    if data.chosen is not None:
        found[_place(data.chosen)] = (data.chosen, "chosen", "chosen")
    return [entry for entry in found.values() if entry[0].ratio is not None and entry[0].upper is not None]


def _place(check: GateCheck) -> tuple[float, float]:
    """Return what tells two checks apart; the chosen one is usually among the checks, from another sum."""
    return round(check.int8_share, 6), round(check.ratio or 0.0, 9)


def _passes(check: GateCheck, limit: float) -> bool:
    return check.upper is not None and check.upper <= limit


def _check_mark(check: GateCheck, look: str, label: str, x: Scale, y: Scale) -> Mark:
    assert check.ratio is not None
    assert check.upper is not None
    return Mark(
        x=x.percent(check.int8_share),
        y=max(y.pixels(check.ratio, HEIGHT), _EDGE),
        look=look,
        says=f"{percent_text(check.int8_share)} in INT8: {factor_text(check.ratio)}, "
        f"at most {factor_text(check.upper)}",
        label=f"{label}: {factor_text(check.ratio)} ↑" if check.ratio > y.high else label,
        top=y.pixels(check.upper, HEIGHT),
    )


def _pareto_mark(point: ParetoPoint, x: Scale, y: Scale) -> Mark:
    return Mark(
        x=x.percent(point.engine_bytes),
        y=y.pixels(point.ratio, HEIGHT),
        look="chosen" if point.chosen else "plain",
        says=f"{point.name}: {bytes_text(point.engine_bytes)}, {factor_text(point.ratio)}",
        label=point.name if len(point.name) <= _LABEL_LENGTH else f"{point.name[: _LABEL_LENGTH - 1]}…",
    )


def _padded(low: float, high: float) -> Scale:
    """Return a scale with some room at both ends."""
    room = (high - low or abs(high) or 1.0) * 0.08
    return Scale(low - room, high + room)
