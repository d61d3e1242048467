"""A measurement that is ended at any point goes on where it stood and gives the identical table."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edge_engines.progress import NoProgress, Progress
from edge_engines.sensitivity.command import measure_checkpoint
from edge_engines.sensitivity.table import Table
from edge_engines.texts.sets import SetSize, TextSizes
from support.tiny_engines import GOLDEN

SIZES = TextSizes(SetSize(3, 24), SetSize(2, 20), SetSize(4, 24))
GATE_ROWS, RANKING_ROWS = 4, 2  # the order of rows in a file of ids: gate, ranking, calibration
GATE = 1.004  # so narrow that units have to leave INT8
ROOT = Path(__file__).parents[2]


class EndedError(Exception):
    """The run ends here."""


class Countdown(NoProgress):
    """Progress that ends the run after so many parts."""

    def __init__(self, parts: int) -> None:
        self.left = parts

    def advance(self, n: int) -> None:
        self.left -= n
        if self.left <= 0:
            raise EndedError


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(9).integers(0, 320, (9, 24))


def measure(folder: Path, ids: np.ndarray, progress: Progress | None = None, model: Path = GOLDEN / "qwen2") -> Table:
    np.save(folder / "ids.npy", ids)
    return measure_checkpoint(
        model,
        calibration=folder / "ids.npy",
        threshold=0.1,
        gate=GATE,
        progress=progress or NoProgress(),
        sizes=SIZES,
        journal=folder / "journal",
    )


def result(table: Table) -> Table:
    """Return a table without what tells of the run."""
    return msgspec.structs.replace(table, seconds=0, model_passes=0, cache_hits=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, ids: np.ndarray) -> Table:
    return measure(tmp_path_factory.mktemp("whole"), ids)


def test_this_model_needs_several_checks_of_the_gate(whole: Table) -> None:
    """Else the tests below would not see them resumed."""
    assert whole.gate.checks >= 2
    assert "gate" in {unit.reason for unit in whole.units}
    assert whole.cache_hits == 0


def test_a_second_run_measures_nothing_and_says_the_same(tmp_path: Path, ids: np.ndarray, whole: Table) -> None:
    first, second = measure(tmp_path, ids), measure(tmp_path, ids)
    assert result(first) == result(second) == result(whole)
    assert second.model_passes == 0
    assert second.cache_hits > 30


@pytest.mark.parametrize("seed", range(4))
def test_a_run_ended_at_random_points_gives_the_identical_table(
    tmp_path: Path, ids: np.ndarray, whole: Table, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(3):
        with pytest.raises(EndedError):
            measure(tmp_path, ids, Countdown(int(rng.integers(1, 40))))
        journal = tmp_path / "journal"
        for file in journal.glob("*") if journal.exists() else []:  # a kill may tear the last line
            content = file.read_bytes()
            file.write_bytes(content[: len(content) - int(rng.integers(0, 30))])
    assert result(measure(tmp_path, ids)) == result(whole)


KILLED = """
import os, signal, sys
from pathlib import Path
from edge_engines.progress import NoProgress
from test_sensitivity_resume import measure
import numpy as np

class Killed(NoProgress):
    left = int(sys.argv[2])
    def advance(self, n):
        self.left -= n
        if self.left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
measure(folder, np.load(folder / "ids.npy"), Killed())
"""


def test_a_killed_process_loses_only_what_it_had_not_finished(tmp_path: Path, ids: np.ndarray, whole: Table) -> None:
    np.save(tmp_path / "ids.npy", ids)
    paths = [ROOT, ROOT / "engines", ROOT / "tools", ROOT / "tests", Path(__file__).parent]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), "34"],  # 3 layers, 20 alphas, 2 x 3 layers, then single units
        env={**os.environ, "PYTHONPATH": ":".join(map(str, paths))},
        timeout=120,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL
    table = measure(tmp_path, ids)
    assert result(table) == result(whole)
    assert table.cache_hits >= 1 + 20 + 2 + 4


def test_one_flipped_bit_of_a_weight_invalidates_everything(tmp_path: Path, ids: np.ndarray) -> None:
    model = tmp_path / "qwen2"
    shutil.copytree(GOLDEN / "qwen2", model)
    measure(tmp_path, ids, model=model)
    weights = next(model.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(bytes(content))
    assert measure(tmp_path, ids, model=model).cache_hits == 0


def test_one_changed_calibration_token_invalidates_everything(tmp_path: Path, ids: np.ndarray) -> None:
    measure(tmp_path, ids)
    changed = ids.copy()
    changed[GATE_ROWS + RANKING_ROWS, 5] += 1
    assert measure(tmp_path, changed).cache_hits == 0


def test_one_changed_gate_token_invalidates_the_gate_only(tmp_path: Path, ids: np.ndarray) -> None:
    measure(tmp_path, ids)
    changed = ids.copy()
    changed[0, 5] += 1
    table = measure(tmp_path, changed)
    assert table.cache_hits >= 1 + 20 + 2 + 13  # ranges, alphas, own errors with and without smoothing, effects
    assert 0 < table.model_passes < measure(tmp_path / "journal", changed).model_passes


def test_one_changed_ranking_token_keeps_the_ranges(tmp_path: Path, ids: np.ndarray) -> None:
    measure(tmp_path, ids)
    changed = ids.copy()
    changed[GATE_ROWS, 5] += 1
    table = measure(tmp_path, changed)
    assert table.cache_hits >= 1
    assert [unit.kl for unit in table.units] != [unit.kl for unit in measure(tmp_path, ids).units]
