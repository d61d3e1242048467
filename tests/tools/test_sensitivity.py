"""`edge-runtime sensitivity`: what it prints, and what it keeps for the next run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from edge_tools.cli import app

GOLDEN = Path(__file__).parents[1] / "data/golden"


@pytest.fixture
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Token ids enough for the default sets, and a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "prompts.npy"
    np.save(path, np.random.default_rng(1).integers(0, 320, (96, 256)))
    return path


def run(tmp_path: Path, prompts: Path, *more: str) -> str:
    command = ["sensitivity", str(GOLDEN / "qwen2"), "-o", str(tmp_path / "out"), "--calibration", str(prompts)]
    result = CliRunner().invoke(app, [*command, "--gate", "1.5", *more])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_second_run_takes_its_results_from_the_cache(tmp_path: Path, prompts: Path) -> None:
    first, second = run(tmp_path, prompts), run(tmp_path, prompts)
    assert "0 results from the cache" in first
    assert "0 passes over the ranking text" in second
    assert "results from the cache" in second
    assert list((tmp_path / "cache/edge-runtime/measurements").glob("*.journal"))


def test_no_cache_keeps_nothing(tmp_path: Path, prompts: Path) -> None:
    run(tmp_path, prompts, "--no-cache")
    assert not (tmp_path / "cache").exists()


def test_the_printed_table_names_ends_body_and_the_rule_alone(tmp_path: Path, prompts: Path) -> None:
    output = run(tmp_path, prompts, "--no-cache")
    for words in ("layers.0.down", "unsmoothed", "the rule of 0.1 alone", "INT8: ", "sensitivity.json"):
        assert words in output
