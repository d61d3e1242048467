"""Put the constants of a graph into a data file of their own, one after the other, as bytes."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from edge_engines.graph.writer import INLINE_BYTES, PAGE

_BLOCK = 1 << 20


class DataFile:
    """An open data file called `location`, beside which the graph will lie."""

    def __init__(self, data: BinaryIO, location: str) -> None:
        self._data = data
        self._location = location

    @property
    def num_bytes(self) -> int:
        """Bytes written so far."""
        return self._data.tell()

    def put(self, name: str, array: NDArray[np.generic]) -> TensorProto:
        """Store an array and return the constant that stands for it; a small one stays in the graph."""
        if array.nbytes <= INLINE_BYTES:
            return numpy_helper.from_array(array, name)
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=array.shape)
        self._begin(tensor, array.nbytes)
        self._data.write(np.ascontiguousarray(array).data)
        return tensor

    def copy(self, tensor: TensorProto, folder: Path) -> TensorProto:
        """Copy a constant of another graph, whose data lies in `folder`, whatever its type."""
        said = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.data_location != TensorProto.EXTERNAL:
            return tensor
        made = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        with (folder / said["location"]).open("rb") as source:
            source.seek(int(said.get("offset", 0)))
            left = int(said["length"])
            self._begin(made, left)
            while left:
                block = source.read(min(_BLOCK, left))
                assert block, f"{said['location']} ends within {tensor.name}"
                self._data.write(block)
                left -= len(block)
        return made

    def _begin(self, tensor: TensorProto, num_bytes: int) -> None:
        """Pad to where a tensor may start, and say in it where that is."""
        self._data.write(b"\0" * (-self._data.tell() % (PAGE if num_bytes >= PAGE else 64)))
        tensor.data_location = TensorProto.EXTERNAL
        place = {"location": self._location, "offset": self._data.tell(), "length": num_bytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
