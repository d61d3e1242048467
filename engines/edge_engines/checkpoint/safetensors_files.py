"""Map the safetensors files of a Hugging Face folder and read their tensors one at a time.

The safetensors library checks each header; the values are read from our own map, because the library can't give
BF16 to numpy without a further package.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from edge_engines.checkpoint.config import read_json
from edge_engines.checkpoint.spec import Float32
from edge_runtime.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # limit of the format
BYTES_PER_VALUE = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte in the file
    size: int  # bytes


class SafetensorsFiles:
    """All tensors of one folder. Every header is checked against its file on construction; no value is read."""

    def __init__(self, folder: Path) -> None:
        weight_map = _read_weight_map(folder)
        self.files = _find_files(folder, weight_map)
        self._entries: dict[str, _Entry] = {}
        for file in self.files:
            for name, entry in _read_entries(file).items():
                if name in self._entries:
                    raise CheckpointError(f"tensor {name} is in both {self._entries[name].file} and {file}")
                self._entries[name] = entry
        for name, shard in weight_map.items():
            if name not in self._entries or self._entries[name].file.name != shard:
                raise CheckpointError(f"{folder / shard} lacks tensor {name}, which {INDEX_FILE} says it holds")
        self._maps = {file: np.memmap(file, dtype=np.uint8, mode="r") for file in self.files}

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: entry.shape for name, entry in self._entries.items()}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.size for entry in self._entries.values())

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Float32:
        """Return a new float32 array of the tensor, or of its rows [start, stop)."""
        dtype, data = self.stored(name)
        shape = self._entries[name].shape
        if rows is not None:
            row_size = data.size // shape[0]
            data, shape = data[rows[0] * row_size : rows[1] * row_size], (rows[1] - rows[0], *shape[1:])
        return _to_float32(np.array(data), dtype).reshape(shape)

    def stored(self, name: str) -> tuple[str, NDArray[np.uint8]]:
        """Return the storage type and the mapped bytes."""
        entry = self._entries[name]
        return entry.dtype, self._maps[entry.file][entry.start : entry.start + entry.size]

    def close(self) -> None:
        """Let go of the maps."""
        self._maps.clear()


def _read_weight_map(folder: Path) -> dict[str, str]:
    """Return tensor -> shard of the index; {} for a model in a single file."""
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file():
        return {}
    if not index.is_file():
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}",
            remedy="download the safetensors files of the model; other weight formats are not read",
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is missing or empty, expected tensor names with their files")
    for name, shard in weight_map.items():
        is_plain_name = isinstance(shard, str) and PurePosixPath(shard).name == shard not in ("", "..")
        if not is_plain_name or "\\" in shard:
            raise CheckpointError(f"{index}: tensor {name} is in {shard!r}, expected the name of a file in the folder")
    return weight_map


def _find_files(folder: Path, weight_map: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the weight files, all of them present."""
    if not weight_map:
        return (folder / SINGLE_FILE,)
    for name, shard in weight_map.items():
        if not (folder / shard).is_file():
            raise CheckpointError(
                f"{folder / shard} is missing: it holds tensor {name} by {INDEX_FILE}", remedy="download it again"
            )
    return tuple(folder / shard for shard in sorted(set(weight_map.values())))


def _read_entries(file: Path) -> dict[str, _Entry]:
    """Return the tensors of one file. Raises CheckpointError before any value is touched (C13)."""
    header, data_start = _read_header(file)
    entries = {name: _parse_entry(file, name, entry, data_start) for name, entry in header.items()}
    actual = file.stat().st_size
    for name, entry in entries.items():
        if entry.start + entry.size > actual:
            raise CheckpointError(
                f"{file} is cut: tensor {name} ends at byte {entry.start + entry.size}, the file has {actual} bytes",
                remedy="download it again",
            )
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} is not a sound safetensors file ({error})", remedy="download it again"
        ) from error
    return entries


def _read_header(file: Path) -> tuple[dict[str, object], int]:
    """Return the header without its metadata entry, and the byte at which the values begin."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if length == 0 or length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file} ({size} bytes) is not a safetensors file: it begins with {head!r}",
                remedy="download it again (was a web page saved instead?)",
            )
        if 8 + length > size:
            raise CheckpointError(
                f"{file} is cut inside its header: expected at least {8 + length} bytes, the file has {size}",
                remedy="download it again",
            )
        raw = stream.read(length)
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: the header is not JSON ({error})", remedy="download it again") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header is not a JSON object", remedy="download it again")
    header.pop("__metadata__", None)
    return header, 8 + length


def _parse_entry(file: Path, name: str, entry: object, data_start: int) -> _Entry:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[index]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file}: the header entry of tensor {name} is broken") from error
    if dtype not in BYTES_PER_VALUE:
        raise CheckpointError(
            f"{file}: tensor {name} is stored as {dtype}, expected one of {', '.join(BYTES_PER_VALUE)}",
            remedy="use the original, not quantised checkpoint",
        )
    numbers = (*shape, start, stop)
    if not all(isinstance(n, int) and n >= 0 for n in numbers) or 0 in shape:
        raise CheckpointError(f"{file}: tensor {name} has shape {list(shape)} at {[start, stop]}, expected numbers > 0")
    size = int(np.prod(shape, dtype=object)) * BYTES_PER_VALUE[dtype]
    if stop - start != size:
        raise CheckpointError(
            f"{file}: tensor {name} of shape {list(shape)} in {dtype} needs {size} bytes, "
            f"the header gives {stop - start}"
        )
    return _Entry(file=file, dtype=dtype, shape=shape, start=data_start + start, size=size)


def _to_float32(data: NDArray[np.uint8], dtype: str) -> Float32:
    if dtype == "F32":
        return data.view("<f4").astype(np.float32, copy=False)
    if dtype == "F16":
        return data.view("<f2").astype(np.float32)
    # BF16 is the upper half of a float32.
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
