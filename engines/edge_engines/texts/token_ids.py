"""Read sequences of token ids from a .npy file: for models without a tokenizer, or for exactly known text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import UsageError

FORM = "give a .npy file with a whole-number array [N, S], a row for each sequence (numpy.save)"


def read_token_ids(path: Path, rows: int, length: int, vocab: int) -> NDArray[np.int64]:
    """Return the first `rows` rows, the first `length` ids of each, as int64 [rows, length].

    Raises UsageError: no such file, not such an array, too few rows or ids, or an id outside 0..vocab - 1.
    """
    stored = _load(path)
    if stored.ndim != 2 or stored.dtype.kind not in "iu":
        raise UsageError(f"{path} holds {stored.dtype} {list(stored.shape)}", remedy=FORM)
    if stored.shape[0] < rows or stored.shape[1] < length:
        raise UsageError(
            f"{path} has {stored.shape[0]} sequences of {stored.shape[1]} ids",
            remedy=f"at least {rows} sequences of {length} ids are needed",
        )
    ids = np.asarray(stored[:rows, :length])
    wrong = np.argwhere((ids < 0) | (ids >= vocab))
    if wrong.size:
        row, column = (int(i) for i in wrong[0])
        raise UsageError(f"{path}: id {ids[row, column]} at [{row}, {column}] is outside the vocabulary 0..{vocab - 1}")
    return ids.astype(np.int64)


def _load(path: Path) -> NDArray[np.generic]:
    try:
        stored = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", remedy=FORM) from error
    except (ValueError, EOFError) as error:
        raise UsageError(f"{path} is not a .npy file of numbers", remedy=FORM) from error
    if not isinstance(stored, np.ndarray):  # an .npz archive under another name
        stored.close()
        raise UsageError(f"{path} is an archive of arrays", remedy=FORM)
    return stored
