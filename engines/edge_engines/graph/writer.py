"""Collect the nodes of one ONNX graph and stream its weights to an external data file.

Weights are written as they arrive and never kept, so exporting needs memory for one tensor at a time. Knows
nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

Attribute = int | float | str | list[int]
Shape = Sequence[int | str]

INLINE_BYTES = 1024  # smaller constants live in the graph file
PAGE = 4096  # large tensors start on a page, so that runtimes can map them
ONNX_TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int64": TensorProto.INT64,
    "int32": TensorProto.INT32,
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "bool": TensorProto.BOOL,
}


class GraphWriter:
    """One graph in the making. Value names equal node names, so a layer's outputs can be found by reading the graph."""

    def __init__(self, data: BinaryIO, data_name: str) -> None:
        self._data = data
        self._data_name = data_name
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._values: list[onnx.ValueInfoProto] = []

    @property
    def data_bytes(self) -> int:
        """Bytes written to the external data file so far."""
        return self._data.tell()

    def input(self, name: str, dtype: str, shape: Shape) -> str:
        """Declare a graph input and return its name."""
        self._inputs.append(helper.make_tensor_value_info(name, ONNX_TYPES[dtype], list(shape)))
        return name

    def output(self, name: str, dtype: str, shape: Shape) -> None:
        """Declare an existing value as a graph output."""
        self._outputs.append(helper.make_tensor_value_info(name, ONNX_TYPES[dtype], list(shape)))

    def typed(self, name: str, dtype: str, shape: Shape) -> str:
        """State type and shape of a value that ONNX shape inference can't derive (contrib operators)."""
        self._values.append(helper.make_tensor_value_info(name, ONNX_TYPES[dtype], list(shape)))
        return name

    def constant(self, name: str, array: NDArray[np.generic]) -> str:
        """Store an array once under `name` and return the name; storing the same name again is a bug."""
        assert name not in self._initializers, name
        array = np.asarray(array, order="C")
        inline = array.nbytes <= INLINE_BYTES
        self._initializers[name] = numpy_helper.from_array(array, name) if inline else self._external(name, array)
        return name

    def shared(self, name: str, array: NDArray[np.generic]) -> str:
        """Return the name of a constant that several nodes read, storing it the first time."""
        return name if name in self._initializers else self.constant(name, array)

    def op(
        self,
        kind: str,
        inputs: Sequence[str],
        name: str,
        *,
        outputs: Sequence[str] | None = None,
        attrs: Mapping[str, Attribute] | None = None,
        domain: str = "",
    ) -> str:
        """Add a node and return its first output, which is called like the node unless `outputs` names them."""
        made = list(outputs) if outputs else [name]
        node = helper.make_node(kind, list(inputs), made, name=name, domain=domain)
        node.attribute.extend(helper.make_attribute(k, v) for k, v in sorted((attrs or {}).items()))
        self._nodes.append(node)
        return made[0]

    def cast(self, x: str, dtype: str, name: str) -> str:
        """Convert a value."""
        return self.op("Cast", [x], name, attrs={"to": ONNX_TYPES[dtype]})

    def model(self, name: str, opsets: Mapping[str, int], metadata: Mapping[str, str]) -> onnx.ModelProto:
        """Return the finished model."""
        graph = helper.make_graph(
            self._nodes, name, self._inputs, self._outputs, list(self._initializers.values()), value_info=self._values
        )
        imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        model = helper.make_model(graph, opset_imports=imports, producer_name="edge-runtime")
        model.ir_version = helper.find_min_ir_version_for([i for i in imports if not i.domain])
        helper.set_model_props(model, dict(metadata))
        return model

    def _external(self, name: str, array: NDArray[np.generic]) -> onnx.TensorProto:
        alignment = PAGE if array.nbytes >= PAGE else 64
        self._data.write(b"\0" * (-self._data.tell() % alignment))
        tensor = TensorProto(name=name, data_type=ONNX_TYPES[array.dtype.name], dims=array.shape)
        tensor.data_location = TensorProto.EXTERNAL
        location = {"location": self._data_name, "offset": str(self._data.tell()), "length": str(array.nbytes)}
        for key, value in location.items():
            tensor.external_data.add(key=key, value=value)
        array.tofile(self._data)
        return tensor


@contextmanager
def open_writer(folder: Path, data_name: str) -> Iterator[GraphWriter]:
    """Open the external data file in `folder` and yield the writer of the graph that uses it."""
    with (folder / data_name).open("wb") as data:
        yield GraphWriter(data, data_name)
