"""Read the user's samples from an .npz file and deal them out for calibration, ranking and the gate.

An input called `x` is given as one array `x`, whose first axis counts the samples, or as arrays `x/000`, `x/001` ...
where samples differ in shape. An array with as many axes as the input is cut along the input's own first axis; with one
axis more, each of its parts is a whole input. Arrays are mapped, not loaded: memory doesn't grow with their number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_engines.onnx_model.npz import map_arrays
from edge_engines.onnx_model.source import Source, Value
from edge_runtime.errors import UsageError

Array = NDArray[Any]

FEWEST, USUAL = 16, 64
MASK = "attention_mask"  # positions where it is 0 are padding: left out of ranges and errors
# Of eight samples four judge the result, three give ranges, one ranks units; interleaved, so that an order in the file
# (by class, by length) reaches all three alike.
_TURNS = ("gate", "calibration", "gate", "calibration", "gate", "calibration", "gate", "ranking")


@dataclass(frozen=True, slots=True)
class Batch:
    """What the model is fed at once."""

    feeds: Mapping[str, Array]
    count: int  # samples in it
    valid: NDArray[np.bool_] | None  # [B, S], false where padded; None without an attention mask


@dataclass(frozen=True, slots=True)
class Split:
    """Indexes of the samples of each set; no sample of one is in another."""

    calibration: Sequence[int]
    ranking: Sequence[int]
    gate: Sequence[int]
    num_repeated: int  # samples left out because an earlier one is equal


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of all inputs, one after the other or `batch` at a time."""

    path: Path
    parts: Mapping[str, Sequence[Array]]  # of each input, the parts in order; each is fed as it is
    count: int
    batch: int = 1

    def batched(self, batch: int) -> Samples:
        """Return the same samples, fed `batch` at a time where their shapes allow it."""
        return replace(self, batch=batch)

    def batches(self, indexes: Sequence[int]) -> Iterator[Batch]:
        """Yield these samples in order."""
        start = 0
        while start < len(indexes):
            stop = start + 1
            while stop < min(start + self.batch, len(indexes)) and self._alike(indexes[start], indexes[stop]):
                stop += 1
            yield self._join(indexes[start:stop])
            start = stop

    def num_batches(self, indexes: Sequence[int]) -> int:
        """Return the least number of batches, which holds when all samples have one shape."""
        return -(-len(indexes) // self.batch)

    def shapes(self, name: str) -> set[tuple[int, ...]]:
        """Return the shapes of one input over all samples."""
        return {part.shape for part in self.parts[name]}

    def split(self) -> Split:
        """Deal the samples out. Raises UsageError when too few are different."""
        sets: dict[str, list[int]] = {turn: [] for turn in _TURNS}
        seen: set[bytes] = set()
        for index in range(self.count):
            digest = self._digest(index)
            if digest not in seen:
                sets[_TURNS[len(seen) % len(_TURNS)]].append(index)
                seen.add(digest)
        if len(seen) < FEWEST:
            raise UsageError(
                f"{self.path}: {self.count} samples, {len(seen)} of them different, at least {FEWEST} are needed",
                remedy=f"give more samples of what the model will see; {USUAL} or more make a tight bound",
            )
        return Split(sets["calibration"], sets["ranking"], sets["gate"], self.count - len(seen))

    def _alike(self, one: int, other: int) -> bool:
        return all(parts[one].shape == parts[other].shape for parts in self.parts.values())

    def _join(self, indexes: Sequence[int]) -> Batch:
        feeds = {
            name: np.concatenate([parts[i] for i in indexes]) if len(indexes) > 1 else np.array(parts[indexes[0]])
            for name, parts in self.parts.items()
        }
        mask = feeds.get(MASK)
        return Batch(feeds, len(indexes), mask != 0 if mask is not None and mask.ndim == 2 else None)

    def _digest(self, index: int) -> bytes:
        sha = hashlib.sha256()
        for name in sorted(self.parts):
            part = np.ascontiguousarray(self.parts[name][index])
            sha.update(f"{part.shape}".encode() + part.tobytes())
        return sha.digest()


def open_samples(path: Path, source: Source, folder: Path) -> Samples:
    """Map the samples for the inputs of a model; `folder` takes their unpacked arrays.

    Raises UsageError naming the file, the input, what was found and what is expected.
    """
    arrays = map_arrays(path, folder)
    parts = {value.name: _parts(path, value, arrays) for value in source.inputs}
    counts = {name: len(found) for name, found in parts.items()}
    if len(set(counts.values())) > 1:
        raise UsageError(
            f"{path}: inputs have different numbers of samples: {counts}", remedy="give every input for every sample"
        )
    return Samples(path, parts, next(iter(counts.values())))


def _parts(path: Path, value: Value, arrays: Mapping[str, Array]) -> Sequence[Array]:
    """Return the parts of one input, each of a shape that the model takes."""
    if value.name in arrays:
        found = _cut(arrays[value.name], value)
    else:
        numbered = sorted(key for key in arrays if key.startswith(f"{value.name}/"))
        found = [arrays[key] for key in numbered]
    if not found and value.name not in arrays:
        raise UsageError(
            f"{path}: no array {value.name!r}, which is an input of the model; it holds {', '.join(arrays) or 'none'}",
            remedy=f"save it as {value.name}= with the samples along the first axis, or as '{value.name}/000' ...",
        )
    for part in found:
        _check_part(path, value, part)
    return found


def _cut(array: Array, value: Value) -> list[Array]:
    """Cut along the first axis into what is fed at once; an incomplete last group is left out."""
    if array.ndim == len(value.shape) + 1:
        return [array[i] for i in range(len(array))]
    if array.ndim == 0 or not value.shape:
        return [array]
    size = value.shape[0] if isinstance(value.shape[0], int) else 1
    return [array[i : i + size] for i in range(0, len(array) - size + 1, size)] if len(array) >= size else [array]


def _check_part(path: Path, value: Value, part: Array) -> None:
    wanted = [d if isinstance(d, int) else (d or "any") for d in value.shape]
    if part.dtype.name != value.dtype:
        raise UsageError(
            f"{path}: {value.name!r} is {part.dtype.name}, the model takes {value.dtype}",
            remedy=f"save it with .astype(np.{value.dtype})",
        )
    fits = part.ndim == len(value.shape) and all(
        not isinstance(d, int) or d == n for d, n in zip(value.shape, part.shape, strict=True)
    )
    if not fits:
        raise UsageError(
            f"{path}: a sample of {value.name!r} has shape {list(part.shape)}, the model takes {wanted}",
            remedy="give arrays of the model's own shape, or with the samples along one more axis in front",
        )
