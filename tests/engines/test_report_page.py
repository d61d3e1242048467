"""The page of a report: what is on it, what is left out, how values are worded and placed. No browser."""

from __future__ import annotations

import re
from importlib import resources

import msgspec
import pytest

from edge_engines.report.data import GateCheck, Histogram, Part, ReportData, UnitMeasures, UnitResult
from edge_engines.report.page import content_policy, present_sections, render_page
from edge_engines.report.scale import Scale
from edge_engines.report.small_charts import gauge, histogram_bars, shares, stacked
from edge_engines.report.unit_chart import unit_chart
from edge_engines.report.words import (
    bytes_text,
    count_text,
    factor_text,
    percent_text,
    reason_text,
    seconds_text,
    split_at_difference,
    state_text,
)
from edge_engines.report.xy_chart import gate_chart, residual_chart
from engines.test_report_data import hostile_report, refused_report, sample_report, without_int8

ROUNDING = 0.01  # pixels and percent are rounded to 2 and 3 digits


@pytest.fixture(scope="module")
def report() -> ReportData:
    return sample_report()


@pytest.fixture(scope="module")
def page(report: ReportData) -> str:
    return render_page(report)


def test_whole_report_has_every_section(page: str) -> None:
    assert headings(page) == ["units", "gate", "bytes", "speed", "samples", "depth", "histograms", "choices", "cost",
                              "facts", "plan"]  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "fp16", "w8"])
def test_without_int8_sections_are_left_out_not_empty(precision: str) -> None:
    page = render_page(without_int8(precision))
    assert headings(page) == ["precisions", "speed", "cost", "facts"]
    assert "None" not in page
    assert "No INT8 was chosen" in page


def test_contents_lead_to_every_section_that_is_there(page: str) -> None:
    assert re.findall(r'<a href="#([a-z]+)">', page) == headings(page)


def test_verdict_names_ratio_bound_and_limit(page: str) -> None:
    words = text_of(page)
    assert "Passed" in words
    assert "Perplexity is × 1.0284 of the baseline’s and, with 95 % confidence, at most × 1.0361." in words
    assert "Up to × 1.05 is allowed." in words
    assert "1.0208 to 1.0361" in words
    assert "measured on the engine 8 128 tokens" in words


def test_refused_build_says_why_and_keeps_its_plan() -> None:
    page = render_page(refused_report())
    assert "No choice of INT8 layers passes the gate: with none, the upper bound is 1.0003" in text_of(page)
    assert '<p class="word">Refused</p>' in page
    assert headings(page) == ["units", "gate", "facts", "plan"]


def test_every_unit_has_its_decision_and_reason(page: str, report: ReportData) -> None:
    rows = re.findall(r'<tr id="unit-\d+".*?</tr>', page, re.S)
    assert len(rows) == len(report.units) == 122
    for row, unit in zip(rows, report.units, strict=True):
        words = text_of(row)
        assert unit.unit in words
        assert unit.precision.upper() in words
        assert f"{state_text(unit)}: {reason_text(unit, report.threshold)}" in words


def test_hostile_texts_are_escaped_everywhere() -> None:
    page = render_page(hostile_report())
    assert page.count("<script") == 1
    assert "<img" not in page
    assert "</pre></textarea>" not in page
    assert "&lt;script&gt;" in page


def test_page_names_nothing_outside_itself(page: str) -> None:
    assert not re.findall(r"https?://|url\(|@import|\ssrc=|<link", page)


def test_content_policy_is_that_of_the_style_and_script_on_the_page(page: str) -> None:
    style = re.search(r"<style>(.*?)</style>", page, re.S)
    script = re.search(r"<script>(.*?)</script>", page, re.S)
    assert style
    assert script
    assert content_policy(style[1], script[1]).replace("'", "&#39;") in page


def test_no_two_elements_share_an_id(page: str) -> None:
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_page_of_the_same_report_is_the_same(page: str) -> None:
    assert render_page(sample_report()) == page


def test_bars_are_as_high_as_their_values(report: ReportData) -> None:
    chart = unit_chart(report)
    assert chart is not None
    panel = chart.panels[0]
    scores = [unit.measures.score for unit in report.units if unit.measures]
    largest = max(range(len(scores)), key=scores.__getitem__)
    for score, bar in zip(scores, panel.bars, strict=True):
        wanted = panel.bars[largest].height * score / scores[largest]
        assert bar.height == pytest.approx(max(wanted, 1.0), abs=2 * ROUNDING)
        assert bar.y + bar.height == pytest.approx(chart.height, abs=ROUNDING)
    assert panel.threshold_y == pytest.approx(
        chart.height - panel.bars[largest].height * 0.1 / scores[largest], abs=0.02
    )
    assert chart.start == largest


def test_threshold_is_drawn_even_when_every_unit_is_far_below(report: ReportData) -> None:
    small = UnitMeasures(0.001, 0.001, 0.002, 1e-5, 1.0)
    units = [msgspec.structs.replace(unit, measures=small) for unit in report.units]
    chart = unit_chart(msgspec.structs.replace(report, units=units))
    assert chart is not None
    assert chart.panels[0].threshold_y is not None
    assert chart.panels[0].threshold_y > 0
    assert chart.panels[3].threshold_y is None  # the rule says nothing of the worst token


def test_units_without_any_error_still_have_a_chart(report: ReportData) -> None:
    units = [msgspec.structs.replace(unit, measures=UnitMeasures(0, 0, 0, 0, 1)) for unit in report.units]
    assert render_page(msgspec.structs.replace(report, units=units, threshold=0.0))


def test_units_of_another_kind_of_model_share_a_colour() -> None:
    measures = UnitMeasures(0.01, 0.02, 0.03, 0.0, 1.0)
    units = [UnitResult(name, "conv", "int8", "int8", measures=measures) for name in ("stem.conv", "body.0.conv")]
    page = render_page(msgspec.structs.replace(without_int8(), units=units, threshold=0.1))
    assert page.count('class="k-other"') == 2 * 5


def test_gate_chart_marks_the_chosen_set_the_rule_and_what_fails(report: ReportData) -> None:
    chart = gate_chart(report)
    assert chart is not None
    looks = [mark.look for mark in chart.marks]
    assert looks.count("chosen") == looks.count("rule") == 1
    assert looks.count("fail") == 4
    assert len(looks) == len(report.checks) + 1  # the rule's is no check; the chosen one is
    assert chart.limit_y is not None
    for mark in chart.marks:
        if mark.look == "pass":
            assert mark.top is not None
            assert mark.top >= chart.limit_y
    assert (
        next(mark for mark in chart.marks if mark.look == "rule").label == f"pooled rule alone: {factor_text(1.21)} ↑"
    )


def test_checks_that_are_not_finite_have_no_point(report: ReportData) -> None:
    broken = msgspec.structs.replace(report, checks=[*report.checks, GateCheck(121, 1.0, None, None)])
    chart, before = gate_chart(broken), gate_chart(report)
    assert chart is not None
    assert before is not None
    assert len(chart.marks) == len(before.marks)
    assert "not finite" in render_page(broken)


def test_residual_of_one_layer_is_no_curve(report: ReportData) -> None:
    assert residual_chart(msgspec.structs.replace(report, residual=[0.1])) is None
    assert "depth" not in dict(present_sections(msgspec.structs.replace(report, residual=[])))


def test_gauge_keeps_a_broken_ratio_at_its_end(report: ReportData) -> None:
    assert report.gate is not None
    found = gauge(msgspec.structs.replace(report.gate, ratio=60.0, low=50.0, upper=70.0))
    assert found.is_beyond
    assert found.ratio == 100.0
    unknown = gauge(msgspec.structs.replace(report.gate, ratio=None, low=None, high=None, upper=None))
    assert unknown.ratio is None
    assert 0 < unknown.base < unknown.limit < 100


def test_stacked_parts_fill_the_width_of_the_larger_sum() -> None:
    parts = [Part("head", "head", 60, 50), Part("rest", "rest", None, 50)]
    real, predicted = stacked(parts, True), stacked(parts, False)
    assert sum(stripe.width for stripe in real) == pytest.approx(100, abs=ROUNDING)
    assert [stripe.width for stripe in predicted] == [60.0]


def test_histogram_shows_a_single_token() -> None:
    bars = histogram_bars(Histogram("layers.0.down", [0, 0.1, 0.2, 0.3], [1000, 0, 1]))
    assert [bar.height for bar in bars] == [72.0, 0.0, 2.0]


def test_shares_of_nothing_are_nothing() -> None:
    assert shares([]) == []
    assert shares([0.0, 0.0]) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.0, 0.33, ["0.0", "0.1", "0.2", "0.3"]),
        (0.99, 1.07, ["1.00", "1.02", "1.04", "1.06"]),
        (0.0, 1.0, ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        (0.0, 29.0, ["0", "10", "20"]),
        (0.0, 2e-5, ["0.000000", "0.000005", "0.000010", "0.000015", "0.000020"]),
    ],
)
def test_axis_numbers_are_round(low: float, high: float, labels: list[str]) -> None:
    assert [label for _, label in Scale(low, high).round_numbers(4)] == labels


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        (bytes_text(999), "999 B"),
        (bytes_text(4_100), "4.10 kB"),
        (bytes_text(28_508_160), "28.5 MB"),
        (bytes_text(999_600_000), "1.00 GB"),
        (count_text(134_515_008), "134 515 008"),
        (seconds_text(0.417), "0.42 s"),
        (seconds_text(37.52), "37.5 s"),
        (seconds_text(375.2), "6 min 15 s"),
        (percent_text(0.9116), "91.2 %"),
        (factor_text(1.02229), "× 1.0223"),
        (factor_text(None), "not finite"),
    ],
)
def test_quantities_are_worded_for_people(said: str, wanted: str) -> None:
    assert said.replace("\N{NO-BREAK SPACE}", " ").replace("\N{NARROW NO-BREAK SPACE}", " ") == wanted


@pytest.mark.parametrize(
    ("reason", "wanted"),
    [
        ("int8", "own error 0.122"),
        ("hard rule", "own error per token 0.122, above 0.1"),
        ("gate", "taken out for its effect per byte"),
        ("given back", "taken out at first, but the gate holds with it"),
        ("by hand", "set by hand in the plan"),
        ("no block size divides its 7 inputs", "no block size divides its 7 inputs"),
    ],
)
def test_reasons_name_the_values_that_decided(reason: str, wanted: str) -> None:
    unit = UnitResult("layers.1.down", "down", "fp16", reason, measures=UnitMeasures(0.05, 0.122, 0.3, 1e-3, 0.99))
    assert reason_text(unit, 0.1) == wanted


@pytest.mark.parametrize(
    ("texts", "same", "rests"),
    [
        (["a b c", "a b c"], "a b c", ["", ""]),
        (["the Rhine", "the Rhône"], "the ", ["Rhine", "Rhône"]),
        (["one\ntwo", "one\nten"], "one\n", ["two", "ten"]),
        (["yes", "no"], "", ["yes", "no"]),
        (["yes", ""], "", ["yes", ""]),
    ],
)
def test_texts_part_at_a_word(texts: list[str], same: str, rests: list[str]) -> None:
    assert split_at_difference(texts) == (same, rests)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_contrast_in_both_schemes(scheme: str) -> None:
    """WCAG 2.2 AA: 4.5 for text, 3 for what a chart is read by."""
    style = resources.files("edge_engines.report").joinpath("templates/page.css").read_text(encoding="utf-8")
    colours = dict(re.findall(r"--([a-z0-9_-]+): (#[0-9a-f]{6})", style.split(":root")[1 if scheme == "light" else 2]))
    for ground in ("ground", "raised"):
        for name in ("ink", "soft", "link", "pass", "fail"):
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
        for name in ("qkv", "o", "gate_up", "down", "head", "embed", "other", "int8", "w8", "float"):
            assert contrast(colours[name], colours[ground]) >= 3, (name, ground)
    assert contrast(colours["mark-ink"], colours["mark"]) >= 4.5
    assert contrast(colours["int8"], colours["float"]) >= 3  # told apart in the strip


def contrast(one: str, other: str) -> float:
    """Contrast of two #rrggbb colours. Source: relative luminance of WCAG 2.2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def headings(page: str) -> list[str]:
    return re.findall(r'<h2 id="([a-z]+)"', page)


def text_of(page: str) -> str:
    """The words of some HTML, its spaces made ordinary."""
    words = re.sub(r"<[^>]+>", " ", page).replace("&nbsp;", " ").replace("&#39;", "'")
    return re.sub(r"\s+", " ", words).replace(" .", ".").replace(" :", ":")
