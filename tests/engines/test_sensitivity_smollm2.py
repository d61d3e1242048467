"""SmolLM2-135M on short texts: the gate passes with most of the body in INT8, where the rule alone fails it."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_engines.progress import NoProgress
from edge_engines.sensitivity.command import measure_checkpoint
from edge_engines.sensitivity.table import Table
from edge_engines.texts.sets import SetSize, TextSizes

# A fifth of the default texts, all domains in each: 1,536 ids give the ranges, 288 rank, 1,152 are judged.
SHORT = TextSizes(SetSize(24, 64), SetSize(6, 48), SetSize(12, 96))

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def table(smollm2_gguf: Path) -> Table:
    return measure_checkpoint(
        smollm2_gguf, calibration=None, threshold=0.1, gate=1.05, progress=NoProgress(), sizes=SHORT
    )


def test_the_chosen_set_passes_the_gate_with_most_of_the_body_and_both_ends_in_int8(table: Table) -> None:
    """Short texts leave the gate's bound wide (standard error 0.01), so fewer bytes fit than on the default ones."""
    precision = {unit.unit: unit.precision for unit in table.units}
    assert table.gate.upper <= 1.05
    assert table.int8_share >= 0.7
    assert precision["embed"] == precision["head"]
    assert table.gate.checks <= 10


def test_the_rule_alone_fails_the_gate(table: Table) -> None:
    """The pooled error misses what smoothing and the joint check see: x 1.21 on the default texts."""
    assert table.rule_only is not None
    assert table.rule_only.ratio > 1.1


def test_the_few_down_projections_that_break_are_found(table: Table) -> None:
    ruled_out = {unit.unit for unit in table.units if unit.reason == "hard rule"}
    assert {"layers.11.down", "layers.28.down"} <= ruled_out
    assert all(unit.endswith(".down") for unit in ruled_out)


def test_smoothing_saves_units_that_would_break_the_rule(table: Table) -> None:
    saved = [unit for unit in table.units if unit.score < 0.1 < unit.score_without_smoothing]
    assert len(saved) > 10
