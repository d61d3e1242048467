"""Parse the header of a GGUF file and check that every tensor it lists lies within the file.

The gguf library's own reader reports a cut file as a numpy reshape error and loops over absurd counts, so the header is
read here; the library gives the type table and dequantises (gguf_file.py). Source: the GGUF specification, versions 2
and 3, little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from edge_runtime.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

_NUMPY_OF_TYPE: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]  # outermost first, as numpy counts
    kind: GGMLQuantizationType
    start: int  # byte in the file
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (Python numbers, strings, lists of them) and tensors."""

    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path, data: NDArray[np.uint8]) -> GgufHeader:
    """Parse the mapped file. Raises CheckpointError naming file, tensor, expected and actual size (C13)."""
    cursor = _Cursor(path, data)
    if bytes(data[:4]) != MAGIC:
        raise CheckpointError(
            f"{path} ({data.size} bytes) is not a GGUF file: it begins with {bytes(data[:16])!r}",
            remedy="download it again (was a web page saved instead?)",
        )
    cursor.position = 4
    version = cursor.number("<u4", "the version")
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: GGUF version {version} is not supported, expected one of {VERSIONS}")
    num_tensors, num_keys = cursor.count("<u8", "tensor count", 24), cursor.count("<u8", "key count", 13)
    metadata = _read_metadata(cursor, num_keys)
    tensors = _read_tensors(cursor, num_tensors, metadata)
    return GgufHeader(metadata=metadata, tensors=tensors)


class _Cursor:
    """Reads forward through the mapped header and never beyond the file."""

    def __init__(self, path: Path, data: NDArray[np.uint8]) -> None:
        self.path = path
        self.position = 0
        self._data = data

    def take(self, size: int, what: str) -> NDArray[np.uint8]:
        """Return the next `size` bytes; `what` is named if the file ends before."""
        end = self.position + size
        if end > self._data.size:
            raise CheckpointError(
                f"{self.path} is cut inside {what}: expected at least {end} bytes, the file has {self._data.size}",
                remedy="download it again",
            )
        piece = self._data[self.position : end]
        self.position = end
        return piece

    def number(self, dtype: str, what: str) -> int:
        """Return one whole number."""
        return int(np.frombuffer(self.take(np.dtype(dtype).itemsize, what), dtype)[0])

    def count(self, dtype: str, what: str, min_item_bytes: int) -> int:
        """Return a number of items that can still fit into the file."""
        value = self.number(dtype, what)
        if self.position + value * min_item_bytes > self._data.size:
            raise CheckpointError(
                f"{self.path}: {what} = {value} needs at least {self.position + value * min_item_bytes} bytes, "
                f"the file has {self._data.size}",
                remedy="download it again",
            )
        return value

    def string(self, what: str) -> str:
        """Return one string with its length in front."""
        length = self.number("<u8", what)
        raw = self.take(length, what).tobytes()
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not UTF-8 text ({raw[:40]!r})") from error

    def value(self, kind: int, what: str) -> object:
        """Return one metadata value of a GGUF type."""
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        return self._numbers(kind, 1, what)[0]

    def _array(self, what: str) -> list[object]:
        kind = self.number("<u4", what)
        if kind == _STRING:
            return [self.string(what) for _ in range(self.count("<u8", what, 8))]
        size = np.dtype(self._dtype(kind, what)).itemsize
        return self._numbers(kind, self.count("<u8", what, size), what)

    def _numbers(self, kind: int, count: int, what: str) -> list[object]:
        dtype = np.dtype(self._dtype(kind, what))
        values = np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        if dtype == np.float32:  # 9.9999997e-06 was written as 1e-5 and means that
            return [float(str(value)) for value in values]
        return list(values.tolist())

    def _dtype(self, kind: int, what: str) -> str:
        if kind not in _NUMPY_OF_TYPE:
            raise CheckpointError(f"{self.path}: {what} has the unknown value type {kind}", remedy="download it again")
        return _NUMPY_OF_TYPE[kind]


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, object]:
    metadata: dict[str, object] = {}
    for index in range(num_keys):
        key = cursor.string(f"metadata key {index} of {num_keys}")
        if key in metadata:
            raise CheckpointError(f"{cursor.path}: metadata key {key} appears twice")
        metadata[key] = cursor.value(cursor.number("<u4", key), key)
    return metadata


def _read_tensors(cursor: _Cursor, num_tensors: int, metadata: Mapping[str, object]) -> dict[str, GgufTensor]:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{cursor.path}: general.alignment = {alignment}, expected a power of two")
    listed = [_read_tensor(cursor, f"the entry of tensor {index} of {num_tensors}") for index in range(num_tensors)]
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in listed:
        if name in tensors:
            raise CheckpointError(f"{cursor.path}: tensor {name} appears twice")
        if offset % alignment:
            raise CheckpointError(
                f"{cursor.path}: tensor {name} begins at {offset}, expected a multiple of {alignment}"
            )
        tensors[name] = _place(cursor.path, name, shape, kind, data_start + offset)
    _check_bounds(cursor.path, tensors)
    return tensors


def _read_tensor(cursor: _Cursor, what: str) -> tuple[str, tuple[int, ...], int, int]:
    """Return (name, shape, type, offset from the start of the data)."""
    name = cursor.string(what)
    num_dims = cursor.number("<u4", f"tensor {name}")
    if not 1 <= num_dims <= MAX_DIMS:
        raise CheckpointError(f"{cursor.path}: tensor {name} has {num_dims} dimensions, expected 1 to {MAX_DIMS}")
    innermost_first = [cursor.number("<u8", f"tensor {name}") for _ in range(num_dims)]
    kind, offset = cursor.number("<u4", f"tensor {name}"), cursor.number("<u8", f"tensor {name}")
    return name, tuple(reversed(innermost_first)), kind, offset


def _place(path: Path, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
    try:
        known = GGMLQuantizationType(kind)
    except ValueError as error:
        raise CheckpointError(f"{path}: tensor {name} has the unknown storage type {kind}") from error
    block, block_bytes = GGML_QUANT_SIZES[known]
    if 0 in shape or shape[-1] % block:
        raise CheckpointError(
            f"{path}: tensor {name} has shape {list(shape)}, {known.name} needs rows of {block}·n values"
        )
    return GgufTensor(name, shape, known, start, math.prod(shape) // block * block_bytes)


def _check_bounds(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    actual = path.stat().st_size
    for tensor in tensors.values():
        if tensor.start + tensor.size > actual:
            raise CheckpointError(
                f"{path} is cut: tensor {tensor.name} ends at byte {tensor.start + tensor.size}, "
                f"the file has {actual} bytes",
                remedy="download it again",
            )
