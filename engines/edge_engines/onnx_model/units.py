"""Find the units of a graph: MatMul, Gemm and convolutions with constant weights, those that share an input as one.

Not taken: a constant first operand, batched weights, a Gemm that scales or transposes its input, tiny weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto

from edge_engines.qdq.constants import Constants
from edge_engines.qdq.places import PRODUCTS, int_attribute, is_op, output_axis

SMALLEST = 1024  # weights; below, an extra Quantize costs more than the product gains


@dataclass(frozen=True, slots=True)
class Product:
    """One node that can run INT8. For a Gemm with a transposed weight, `axis` is that of the stored weight."""

    node: str
    kind: str  # MatMul, Gemm, Conv or ConvTranspose
    weight: str
    shape: tuple[int, ...]
    axis: int  # of the output channels in the weight
    is_transposed: bool

    @property
    def num_weights(self) -> int:
        """Return the number of weights."""
        return math.prod(self.shape)

    @property
    def is_convolution(self) -> bool:
        """Say whether it is a convolution: channels are axis 1 of its output, not the last."""
        return self.kind in ("Conv", "ConvTranspose")


@dataclass(frozen=True, slots=True)
class Unit:
    """Products that share one input, hence one scale and one decision. Called like its first node."""

    name: str
    tensor: str  # the input they share
    products: tuple[Product, ...]

    @property
    def num_weights(self) -> int:
        """Return the number of weights."""
        return sum(p.num_weights for p in self.products)


def find_units(model: onnx.ModelProto, folder: Path, kinds: Collection[str] = PRODUCTS) -> list[Unit]:
    """Return the units of these kinds of nodes in graph order."""
    by_input: dict[str, list[Product]] = {}
    constants = Constants(model, folder)
    for tensor, product in _products(model, constants, kinds):
        by_input.setdefault(tensor, []).append(product)
    return [Unit(products[0].node, tensor, tuple(products)) for tensor, products in by_input.items()]


def _products(model: onnx.ModelProto, constants: Constants, kinds: Collection[str]) -> Iterator[tuple[str, Product]]:
    for node in model.graph.node:
        if not is_op(node, *kinds) or node.input[0] in constants or node.input[1] not in constants:
            continue
        weight = node.input[1]
        shape, kind = constants.shape(weight), constants.dtype(weight)
        is_matrix = node.op_type in ("MatMul", "Gemm")
        if kind != TensorProto.FLOAT or (is_matrix and len(shape) != 2) or math.prod(shape) < SMALLEST:
            continue
        if node.op_type == "Gemm" and not _is_plain(node):
            continue
        is_transposed = node.op_type == "Gemm" and bool(int_attribute(node, "transB", 0))
        axis = output_axis(node, len(shape))
        yield node.input[0], Product(node.name, node.op_type, weight, shape, axis, is_transposed)


def _is_plain(gemm: onnx.NodeProto) -> bool:
    """Say whether a Gemm is a product and a sum, nothing more."""
    scales = [a.f for a in gemm.attribute if a.name in ("alpha", "beta")]
    return all(scale == 1 for scale in scales) and not int_attribute(gemm, "transA", 0)
