"""Load what a worker serves, session and text, and run it once so that the first request finds it warm."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.manifest import MANIFEST_NAME, digest_file, read_manifest
from edge_runtime.session.session import Session
from edge_runtime.session.text import TextCodec
from edge_runtime.worker.frames import Init

_PROGRESS_STEP = 5.0  # percent between two reports

Report = Callable[[str, float], None]  # phase, percent 0..100


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded engine. Owned by the thread that opened it."""

    session: Session
    codec: TextCodec | None  # None: the folder has no tokenizer
    sha256: str  # of the manifest, which holds the digest of every file
    seconds: dict[str, float]  # start-up time by phase


def open_engine(init: Init, report: Report) -> Engine:
    """Check every digest of the folder, then load it.

    Raises EngineRefusedError before anything is loaded, NoDeviceError and BackendError by the backend.
    """
    folder = Path(init.engine)
    began = time.perf_counter()
    _check_files(folder, report)
    read = time.perf_counter()
    report("load", 0.0)
    session = Session.open(folder, threads=init.threads, spinning=init.spinning, check_digests=False)
    codec = TextCodec.load(folder) if session.manifest.model.has_text else None
    sha256 = digest_file(folder / MANIFEST_NAME)
    return Engine(session, codec, sha256, {"read": read - began, "load": time.perf_counter() - read})


def warm_up(engine: Engine, *, slots: int, chunk: int) -> float:
    """Run every kind of step once: a prefill chunk, then one token per slot alone and together. Return the seconds."""
    began = time.perf_counter()
    session = engine.session
    if engine.codec is not None:
        engine.codec.encode("warm up")  # tokenizers build their tables at the first call
    num_prompt = min(chunk, session.geometry.capacity - 1)
    session.prefill(0, [0] * num_prompt)
    session.decode([0], [0], [num_prompt])
    if slots > 1:
        session.decode([1], [0], [0])
        session.decode([0, 1], [0, 0], [num_prompt, 0])
    for slot in range(slots):
        session.reset(slot)
    return time.perf_counter() - began


def _check_files(folder: Path, report: Report) -> None:
    total = sum(entry.size for entry in read_manifest(folder, check_digests=False).files)
    done = 0
    reported = -_PROGRESS_STEP

    def count(num_bytes: int) -> None:
        nonlocal done, reported
        done += num_bytes
        percent = min(100.0, 100.0 * done / max(1, total))
        if percent >= reported + _PROGRESS_STEP or reported < percent == 100.0:
            reported = percent
            report("read", percent)

    read_manifest(folder, progress=count)
