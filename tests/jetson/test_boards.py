"""The table of boards: consistent in itself, and with the published bandwidths."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edge_jetson.boards import BOARDS, Board, find_board
from edge_runtime.errors import UsageError

# GB/s of the modules, jetson.md §1; to one decimal, as published.
PUBLISHED = {
    "agx-orin-64gb": 204.8,
    "agx-orin-32gb": 204.8,
    "orin-nx-16gb": 102.4,
    "orin-nx-8gb": 102.4,
    "orin-nano-8gb": 68.3,
    "orin-nano-super-8gb": 102.4,
    "orin-nano-4gb": 34.1,
    "orin-nano-super-4gb": 51.2,
}


def bandwidth(board: Board, mode: str) -> float:
    (found,) = (m for m in board.modes if m.name == mode)
    return board.bandwidth_gb_s(found)


@pytest.mark.parametrize(("name", "gb_s"), PUBLISHED.items())
def test_bandwidth_of_the_highest_mode_is_the_published_one(name: str, gb_s: float) -> None:
    board = find_board(name)
    assert max(board.bandwidth_gb_s(mode) for mode in board.modes) == gb_s


def test_a_mode_that_caps_the_memory_clock_has_less_bandwidth() -> None:
    assert bandwidth(find_board("agx-orin-64gb"), "MODE_15W") == 136.5
    assert bandwidth(find_board("orin-nano-super-8gb"), "15W") == 68.3
    assert bandwidth(find_board("orin-nano-super-8gb"), "25W") == 102.4
    assert bandwidth(find_board("orin-nx-16gb"), "10W") == 68.3


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_modes_stay_within_their_module(board: Board) -> None:
    names = [mode.name for mode in board.modes]
    assert board.default_mode in names
    assert len(set(names)) == len(names)
    for mode in board.modes:
        assert 0 < mode.sms <= board.sms
        assert mode.gpu_mhz is None or mode.gpu_mhz <= board.gpu_mhz
    assert 0.6 * board.ram_mib < board.usable_mib < board.ram_mib
    assert board.cuda_cores == 128 * board.sms


def test_no_memory_figure_is_passed_off_as_measured_by_us() -> None:
    assert all("not measured by us" in board.usable_source for board in BOARDS)
    reported = {board.name for board in BOARDS if "one public report" in board.usable_source}
    assert reported == {"orin-nano-8gb", "orin-nano-super-8gb"}
    assert find_board("orin-nano-8gb").usable_mib == 6963  # 6.8 GiB


def test_names_are_unique_and_an_unknown_one_is_refused_with_the_list() -> None:
    names = [board.name for board in BOARDS]
    assert len(set(names)) == len(names)
    with pytest.raises(UsageError, match=r"orin-nano-5gb.*this, orin-nano-4gb, .*agx-orin-64gb"):
        find_board("orin-nano-5gb")


def test_the_table_costs_the_daemon_no_heavy_import() -> None:
    script = (
        "import sys, edge_jetson.boards; print([m for m in ('numpy', 'onnx', 'psutil', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {script}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "[]"
