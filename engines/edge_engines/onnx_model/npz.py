"""Map the arrays of an .npz file: unpack them once, so that each is read from disk where it is used."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import UsageError

_MEMBER = ".npy"


def map_arrays(path: Path, folder: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of `path` by name, mapped from files in `folder`. Raises UsageError for any other file."""
    remedy = "write it with np.savez(file, name=array)"
    found: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = [name for name in archive.namelist() if name.endswith(_MEMBER)]
            for number, member in enumerate(members):
                plain = folder / f"samples-{number:06}{_MEMBER}"  # never a name from the file: it could lead elsewhere
                with archive.open(member) as packed, plain.open("wb") as unpacked:
                    shutil.copyfileobj(packed, unpacked)
                found[member.removesuffix(_MEMBER)] = _map(path, member, plain)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", remedy="name a file of samples with --inputs") from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise UsageError(f"{path}: not an .npz file, or a damaged one: {error}", remedy=remedy) from error
    return found


def _map(path: Path, member: str, plain: Path) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(plain, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        if "mmap" in str(error):  # an empty array
            raise UsageError(f"{path}: {member} is empty", remedy="give at least one sample") from error
        raise UsageError(
            f"{path}: {member} is not an array of numbers: {error}", remedy="save arrays of one dtype and shape"
        ) from error
    return array
