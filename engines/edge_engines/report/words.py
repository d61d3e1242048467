"""Put values and decisions into words: one spelling of every quantity for the whole page."""

from __future__ import annotations

from collections.abc import Sequence

from edge_engines.report.data import UnitResult

_PRECISIONS = {"int8": "INT8", "fp16": "FP16", "fp32": "FP32"}
_PLAIN_REASONS = {
    "gate": "taken out for its effect per byte",
    "cheapest": "no form of it is cheaper",
    "given back": "taken out at first, but the gate holds with it",
    "by hand": "set by hand in the plan",
    "group": "decided together with its group",
}
_STATES = {"int8": "passes"}


def bytes_text(count: int) -> str:
    """Return a size in decimal units, three digits: "143 MB"."""
    value, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    digits = 0 if value >= 99.95 or units[0] == "B" else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f}\N{NO-BREAK SPACE}{units[0]}"


def count_text(count: int) -> str:
    """Return a whole number with its thousands apart: "884 736"."""
    return f"{count:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def seconds_text(seconds: float) -> str:
    """Return a duration: "0.42 s", "37.5 s", "6 min 15 s"."""
    if seconds < 60:
        return f"{seconds:.{2 if seconds < 10 else 1}f}\N{NO-BREAK SPACE}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}\N{NO-BREAK SPACE}min\N{NO-BREAK SPACE}{rest:02d}\N{NO-BREAK SPACE}s"


def percent_text(share: float, digits: int = 1) -> str:
    """Return a share of 1 in percent."""
    return f"{100 * share:.{digits}f}\N{NO-BREAK SPACE}%"


def factor_text(ratio: float | None) -> str:
    """Return a perplexity ratio: "× 1.0223"."""
    return "not finite" if ratio is None else f"×\N{NO-BREAK SPACE}{ratio:.4f}"


def precision_text(precision: str) -> str:
    """Return the usual spelling of a precision."""
    return _PRECISIONS.get(precision, precision)


def state_text(unit: UnitResult) -> str:
    """Return what decided a unit, in a word or two."""
    return _STATES.get(unit.reason, unit.reason)


def reason_text(unit: UnitResult, threshold: float | None) -> str:
    """Return why a unit has its precision, in one line with the values that decided."""
    measures = unit.measures
    if measures is None or threshold is None:
        return _PLAIN_REASONS.get(unit.reason, unit.reason)
    if unit.reason == "int8":
        return f"own error {measures.score:.3f}"
    if unit.reason == "hard rule":
        which = "over all tokens" if measures.pooled >= measures.per_token else "per token"
        return f"own error {which} {measures.score:.3f}, above {threshold:g}"
    return _PLAIN_REASONS.get(unit.reason, unit.reason)


def split_at_difference(texts: Sequence[str]) -> tuple[str, list[str]]:
    """Return the beginning that all texts share, cut at a word, and the rest of each."""
    if len(set(texts)) == 1:
        return texts[0], ["" for _ in texts]
    length = next((i for i, chars in enumerate(zip(*texts, strict=False)) if len(set(chars)) > 1), min(map(len, texts)))
    same = texts[0][:length]
    same = same[: max(same.rfind(" "), same.rfind("\n")) + 1]
    return same, [text[len(same) :] for text in texts]
