"""Write an engine folder so that it is either whole or absent: temporary folder, fsync, rename.

Whatever interrupts the build, a folder that was there before is kept until its successor is complete.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_runtime.errors import BuildError
from edge_runtime.manifest import MANIFEST_NAME


def check_target(out: Path, *, force: bool, needed_bytes: int) -> None:
    """Refuse a place that can't take the engine, before any work is done.

    Raises BuildError when `out` is something else than an engine folder or an empty one, when it is an engine and
    `force` is not set, or when the disk has less than `needed_bytes` free.
    """
    if out.exists() and not out.is_dir():
        raise BuildError(f"{out} is a file", remedy="name a folder with -o")
    if (out / MANIFEST_NAME).exists() and not force:
        raise BuildError(f"{out} already holds an engine", remedy="replace it with --force, or name another folder")
    if out.exists() and any(out.iterdir()) and not (out / MANIFEST_NAME).exists():
        raise BuildError(f"{out} is not empty and not an engine folder", remedy="name a new or empty folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
    except OSError as error:
        raise BuildError(f"{out.parent}: {error.strerror}", remedy="name a folder you may write to") from error
    if free < needed_bytes:
        raise BuildError(
            f"{out.parent}: {free / 1e6:.0f} MB free, the engine needs about {needed_bytes / 1e6:.0f} MB",
            remedy="free some space or name a folder on another disk",
        )


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out`; on success make it durable and rename it to `out`, else remove it.

    Raises BuildError when the disk is full or the folder can't be written.
    """
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{out.name}.building-", dir=out.parent))
    except OSError as error:
        raise BuildError(f"{out.parent}: {error.strerror}", remedy="name a folder you may write to") from error
    try:
        yield work
        work.chmod(0o755)  # mkdtemp made it private
        _sync(work)
        _replace(work, out)
    except OSError as error:
        raise BuildError(f"{error.filename or out}: {error.strerror}", remedy="nothing was changed") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace(work: Path, out: Path) -> None:
    """Rename `work` to `out`, an old engine there being moved aside first and removed last."""
    old = work.with_name(f"{work.name}.old")
    if out.exists():
        out.rename(old)
    try:
        work.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise
    _sync_parent(out)
    shutil.rmtree(old, ignore_errors=True)


def _sync_parent(path: Path) -> None:
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
