"""Engines that can't be loaded here are refused before anything of them is read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil
import pytest

from edge_runtime import backends
from edge_runtime.errors import EngineRefusedError, UsageError
from edge_runtime.manifest import read_manifest
from support.tiny_engines import build_tiny


def test_an_engine_that_memory_can_not_hold_is_refused_with_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_tiny("qwen2", tmp_path / "engine")
    manifest = msgspec.structs.replace(read_manifest(folder), weight_bytes=5_000_000_000)
    memory = psutil.virtual_memory()._replace(available=4_000_000_000)
    monkeypatch.setattr(backends.psutil, "virtual_memory", lambda: memory)
    with pytest.raises(EngineRefusedError, match=r"needs about 5,00\d MB, 4,000 MB are available and 10% .*1,40\d MB"):
        backends.open_backend(folder, manifest, backends.BackendOptions())


def test_a_target_without_a_backend_is_refused(tmp_path: Path) -> None:
    folder = build_tiny("qwen2", tmp_path / "engine")
    manifest = msgspec.structs.replace(read_manifest(folder), target="tensorrt")
    with pytest.raises(UsageError, match="build with --target ort-cpu"):
        backends.check_loadable(folder, manifest)
