"""How many cores a process may use, from captured control group files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_runtime.backends.cores import are_shared, cpu_quota, default_threads


def with_file(root: Path, name: str, text: str) -> Path:
    path = root / "sys/fs/cgroup" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root


@pytest.mark.parametrize(("text", "quota"), [("max 100000\n", None), ("150000 100000\n", 1.5), ("50000 100000\n", 0.5)])
def test_quota_is_read_from_cgroup_v2(text: str, quota: float | None, tmp_path: Path) -> None:
    assert cpu_quota(with_file(tmp_path, "cpu.max", text)) == quota


@pytest.mark.parametrize(("text", "quota"), [("-1\n", None), ("200000\n", 2.0)])
def test_quota_is_read_from_cgroup_v1(text: str, quota: float | None, tmp_path: Path) -> None:
    with_file(tmp_path, "cpu/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(with_file(tmp_path, "cpu/cpu.cfs_quota_us", text)) == quota


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    assert 1 <= default_threads(tmp_path) <= len(os.sched_getaffinity(0))


def test_a_small_quota_gives_one_thread_and_shared_cores(tmp_path: Path) -> None:
    root = with_file(tmp_path, "cpu.max", "50000 100000\n")
    assert default_threads(root) == 1
    assert are_shared(1, root)


def test_more_threads_than_cores_share_them(tmp_path: Path) -> None:
    assert are_shared(default_threads(tmp_path) + 1, tmp_path)
    assert not are_shared(default_threads(tmp_path), tmp_path)
