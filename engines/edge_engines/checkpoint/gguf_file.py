"""Map a GGUF file and dequantise its tensors one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from edge_engines.checkpoint.gguf_header import GgufTensor, read_gguf_header
from edge_engines.checkpoint.spec import Float32
from edge_runtime.errors import CheckpointError


class GgufFile:
    """One GGUF file. Header, bounds and storage types are checked on construction; no value is read."""

    def __init__(self, path: Path) -> None:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path} is empty (0 bytes)", remedy="download it again")
        self.path = path
        self._data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        header = read_gguf_header(path, self._data)
        self.metadata = header.metadata
        self._tensors = header.tensors
        _check_types(path, self._tensors)
        num_parts = self.metadata.get("split.count", 1)
        if num_parts not in (0, 1):
            raise CheckpointError(
                f"{path} is one of {num_parts} parts", remedy="join them into one file first (llama-gguf-split --merge)"
            )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, outermost dimension first."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.size for tensor in self._tensors.values())

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Float32:
        """Return a new float32 array of the tensor, or of its rows [start, stop) of the outermost dimension."""
        tensor = self._tensors[name]
        _, data = self.stored(name)
        by_row = data.reshape(*tensor.shape[:-1], -1)  # quantised blocks never span two rows
        if rows is not None:
            by_row = by_row[rows[0] : rows[1]]
        return np.array(dequantize(by_row, tensor.kind), dtype=np.float32)

    def stored(self, name: str) -> tuple[str, NDArray[np.uint8]]:
        """Return the storage type and the mapped bytes."""
        tensor = self._tensors[name]
        return tensor.kind.name, self._data[tensor.start : tensor.start + tensor.size]

    def close(self) -> None:
        """Let go of the map."""
        self._data = np.empty(0, np.uint8)


def _check_types(path: Path, tensors: Mapping[str, GgufTensor]) -> None:
    """Raise CheckpointError for a storage type that the gguf library can't turn into floats."""
    bad = {kind for kind in {tensor.kind for tensor in tensors.values()} if not _can_dequantize(kind)}
    for tensor in tensors.values():
        if tensor.kind in bad:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} is stored as {tensor.kind.name}, which can't be dequantised here",
                remedy="use a GGUF file of type F16, Q8_0, Q4_K_M or similar",
            )


def _can_dequantize(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
