"""Read the constants of an ONNX graph one at a time: shapes and types at once, values only when asked for.

Initialisers and Constant nodes look alike here. External data is looked for beside the model file (case C26).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edge_runtime.errors import BuildError


class Constants:
    """The constants of the top graph of `model`, whose file lies in `folder`."""

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, onnx.TensorProto] = {t.name: t for t in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant" and not node.domain:
                for tensor in _values(node):
                    self._tensors[node.output[0]] = tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a constant."""
        return tuple(self._tensors[name].dims)

    def dtype(self, name: str) -> int:
        """Return the element type of a constant, a number of onnx.TensorProto.DataType."""
        return int(self._tensors[name].data_type)

    def is_external(self, name: str) -> bool:
        """Say whether the values lie in a file of their own."""
        return bool(self._tensors[name].data_location == onnx.TensorProto.EXTERNAL)

    def array(self, name: str) -> NDArray[Any]:
        """Load one constant; it is not kept. Raises BuildError when its file is missing, short or elsewhere."""
        try:
            values: NDArray[Any] = numpy_helper.to_array(self._tensors[name], base_dir=str(self._folder))
        except (OSError, ValueError, RuntimeError, onnx.checker.ValidationError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise BuildError(
                f"constant {name!r} can't be read: {first}",
                remedy=f"put the files of its weights beside the model, in {self._folder}",
            ) from error
        return values


def _values(node: onnx.NodeProto) -> Iterator[onnx.TensorProto]:
    """Yield the value of a Constant node, unless it is of a kind that no weight has (strings, sparse)."""
    for attribute in node.attribute:
        if attribute.name == "value":
            yield attribute.t
        elif attribute.name in ("value_float", "value_floats"):
            yield numpy_helper.from_array(np.array(onnx.helper.get_attribute_value(attribute), np.float32))
        elif attribute.name in ("value_int", "value_ints"):
            yield numpy_helper.from_array(np.array(onnx.helper.get_attribute_value(attribute), np.int64))
