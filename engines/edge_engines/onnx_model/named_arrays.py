"""Keep arrays with any names in a file: names of tensors hold characters that names in an .npz may not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


def write_named(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays of numbers to an .npz file."""
    numbered: dict[str, NDArray[Any]] = {f"array_{i}": values for i, values in enumerate(arrays.values())}
    with path.open("wb") as stream:
        np.savez(stream, allow_pickle=False, names=np.array(list(arrays)), **numbered)


def read_named(path: Path) -> dict[str, NDArray[Any]]:
    """Read what `write_named` wrote, in the same order."""
    with np.load(path, allow_pickle=False) as kept:
        return {str(name): kept[f"array_{i}"] for i, name in enumerate(kept["names"])}
