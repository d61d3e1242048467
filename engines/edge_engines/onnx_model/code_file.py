"""Store the INT8 codes and the scales of every unit's weights in one file, once, for all graphs that are tried.

Scales are numbers that FP16 holds, whatever the graph computes in, so that FP32 and FP16 graphs share the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from edge_engines.onnx_model.data_file import DataFile
from edge_engines.onnx_model.units import Product, Unit
from edge_engines.progress import Progress
from edge_engines.qdq.codes import quantise_weight
from edge_engines.qdq.constants import Constants
from edge_runtime.errors import BuildError

CODES_DATA = "codes.data"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight in INT8: [K, N] for products of matrices, the convolution's own shape otherwise."""

    codes: TensorProto  # external, in codes.data
    scales: NDArray[np.float16]  # [N]
    axis: int  # of N


def store_codes(
    model: onnx.ModelProto, folder: Path, units: Sequence[Unit], progress: Progress
) -> dict[str, StoredWeight]:
    """Write codes.data in `folder`, beside the graph's own data, and return the stored weight of each product by node.

    A weight that several products take is stored once. Raises BuildError for a weight that is not finite.
    """
    constants, stored = Constants(model, folder), dict[tuple[str, bool], StoredWeight]()
    by_node: dict[str, StoredWeight] = {}
    with (folder / CODES_DATA).open("wb") as data:
        file = DataFile(data, CODES_DATA)
        for unit in units:
            for product in unit.products:
                key = (product.weight, product.is_transposed)
                if key not in stored:
                    codes, scales, axis = _quantise(constants, product)
                    name = f"{product.weight}.{'transposed.' if product.is_transposed else ''}codes"
                    stored[key] = StoredWeight(file.put(name, codes), scales, axis)
                by_node[product.node] = stored[key]
            progress.advance(1)
    return by_node


def _quantise(constants: Constants, product: Product) -> tuple[NDArray[np.int8], NDArray[np.float16], int]:
    weight = constants.array(product.weight)
    if not np.isfinite(weight).all():
        raise BuildError(
            f"the weights {product.weight!r} of {product.node} hold NaN or infinity",
            remedy="the model is damaged: export it again",
        )
    codes, scales = quantise_weight(weight, product.axis, np.float16)
    if product.is_transposed:
        return np.ascontiguousarray(codes.T), scales.astype(np.float16), 1
    return codes, scales.astype(np.float16), product.axis


def scale_tensor(values: NDArray[np.float16] | float, name: str, dtype: type[np.floating]) -> TensorProto:
    """Return a scale as a constant of the type that the graph computes in."""
    return numpy_helper.from_array(np.array(values, dtype), name)
