"""`edge-runtime verify`: an engine that computes what it did passes, another is refused with the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from edge_engines.accuracy import measure_accuracy
from edge_engines.progress import NoProgress
from edge_engines.texts.sets import SetSize, TextSizes
from edge_runtime.errors import UsageError
from support.command import edge_runtime
from support.tiny_engines import build_tiny

SIZES = TextSizes(SetSize(2, 32), SetSize(2, 32), SetSize(4, 32))


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ids") / "ids.npy"
    np.save(path, np.random.default_rng(1).integers(0, 320, (260, 64)))
    return path


def test_an_engine_agrees_with_itself_and_nearly_with_its_eight_bit_form(ids: Path, tmp_path: Path) -> None:
    fp32, w8 = build_tiny("qwen3", tmp_path / "fp32"), build_tiny("qwen3", tmp_path / "w8", precision="w8")
    same = measure_accuracy(fp32, fp32, text=ids, progress=NoProgress(), sizes=SIZES)
    assert same.finite
    assert same.agreement is not None
    assert same.agreement.ratio.ratio == 1.0
    assert (same.agreement.kl, same.agreement.same_top1) == (0.0, 1.0)
    other = measure_accuracy(w8, fp32, text=ids, progress=NoProgress(), sizes=SIZES)
    assert other.agreement is not None
    assert 0 < other.agreement.kl < 0.05  # 0.001 to 0.004 measured on golden models in 8 bits
    alone = measure_accuracy(w8, None, text=ids, progress=NoProgress(), sizes=SIZES)
    assert alone.perplexity == pytest.approx(other.perplexity)
    assert alone.agreement is None


def test_engines_of_different_models_are_not_compared(ids: Path, tmp_path: Path) -> None:
    one, other = build_tiny("qwen3", tmp_path / "a"), build_tiny("qwen3", tmp_path / "b")
    manifest = json.loads((other / "engine.json").read_text())
    manifest["geometry"]["vocab"] += 1
    (other / "engine.json").write_text(json.dumps(manifest))
    with pytest.raises(UsageError, match="different models"):
        measure_accuracy(one, other, text=ids, progress=NoProgress(), sizes=SIZES)


def test_the_command_passes_a_good_engine_and_refuses_one_that_fails_the_gate(ids: Path, tmp_path: Path) -> None:
    good, other = build_tiny("qwen3", tmp_path / "good"), build_tiny("qwen3", tmp_path / "w8", precision="w8")
    passed = edge_runtime("verify", str(other), "--against", str(good), "--text", str(ids), "--gate", "1.5", "--json")
    assert passed.returncode == 0, passed.stderr
    assert json.loads(passed.stdout)["agreement"]["same_top1"] > 0.5
    refused = edge_runtime("verify", str(other), "--against", str(good), "--text", str(ids), "--gate", "1.0")
    assert refused.returncode == 78
    assert "1 is allowed" in refused.stderr.splitlines()[-1]
