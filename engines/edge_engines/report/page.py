"""Render a report as one HTML page that needs nothing else: no network, no fonts, no library.

The page's content policy names the digests of its style and script, so nothing that a name or a text smuggled in
could run.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined

from edge_engines.report import small_charts, words
from edge_engines.report.data import ReportData
from edge_engines.report.unit_chart import colour_of, measured_units, unit_chart
from edge_engines.report.xy_chart import gate_chart, pareto_chart, residual_chart

PACKAGE = "edge_engines.report"


def render_page(data: ReportData) -> str:
    """Return the page of a report."""
    style, script = _asset("page.css"), _asset("page.js")
    return (
        _environment()
        .get_template("page.html")
        .render(
            data=data,
            style=style,
            script=script,
            policy=content_policy(style, script),
            sections=present_sections(data),
            measured=measured_units(data),
            unit_chart=unit_chart(data),
            gauge=small_charts.gauge(data.gate) if data.gate else None,
            gate_chart=gate_chart(data),
            residual_chart=residual_chart(data),
            pareto_chart=pareto_chart(data),
            precision_groups=precision_groups(data),
            byte_sums=[sum(p.real or 0 for p in data.parts), sum(p.predicted or 0 for p in data.parts)],
        )
    )


def present_sections(data: ReportData) -> list[tuple[str, str]]:
    """Return template and title of the sections that have something to show, in order."""
    has_measures = bool(measured_units(data))
    sections: list[tuple[str, str, object]] = [
        ("units", "Units", has_measures),
        ("precisions", "Precision", data.units and not has_measures),
        ("gate", "Gate", gate_chart(data)),
        ("bytes", "Bytes", data.parts),
        ("speed", "Speed ceiling", data.ceilings),
        ("samples", "Side by side", data.samples),
        ("depth", "Depth", residual_chart(data)),
        ("histograms", "Worst units", data.histograms),
        ("choices", "Choices", data.pareto),
        ("cost", "Cost", data.steps),
        ("facts", "Origin", True),
        ("plan", "Plan", data.plan),
    ]
    return [(name, title) for name, title, content in sections if content]


def content_policy(style: str, script: str) -> str:
    """Return the content policy: our style and our script, and nothing from anywhere."""
    return f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; base-uri 'none'"


def precision_groups(data: ReportData) -> list[tuple[str, str, int]]:
    """Return precision, reason and number of units, for a build whose units were not measured."""
    counts: dict[tuple[str, str], int] = {}
    for unit in data.units:
        key = unit.precision, unit.reason
        counts[key] = counts.get(key, 0) + 1
    return [(precision, reason, count) for (precision, reason), count in counts.items()]


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader(PACKAGE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "bytes": words.bytes_text,
        "count": words.count_text,
        "seconds": words.seconds_text,
        "percent": words.percent_text,
        "factor": words.factor_text,
        "precision": words.precision_text,
        "state": words.state_text,
        "reason": words.reason_text,
        "colour": colour_of,
        "split": words.split_at_difference,
        "stacked": small_charts.stacked,
        "shares": small_charts.shares,
        "histogram": small_charts.histogram_bars,
    }
    return environment


def _asset(name: str) -> str:
    return (resources.files(PACKAGE) / "templates" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
