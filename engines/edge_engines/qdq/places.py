"""Say where the nodes of a graph stand to each other: who makes a value, who takes it, which operand is the weight."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from edge_engines.qdq.constants import Constants

PRODUCTS = ("MatMul", "Gemm", "Conv", "ConvTranspose")  # that can run INT8 with a constant second operand
QUANTISE, DEQUANTISE = "QuantizeLinear", "DequantizeLinear"
ONNX_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class Use:
    """One place where a value is taken: operand `index` of `node`."""

    node: onnx.NodeProto
    index: int


@dataclass(frozen=True, slots=True)
class Places:
    """A graph with its connections looked up."""

    model: onnx.ModelProto
    constants: Constants
    producers: Mapping[str, onnx.NodeProto]
    uses: Mapping[str, Sequence[Use]]
    outputs: frozenset[str]  # of the graph
    int8_inputs: frozenset[str]  # of the graph: caches that the caller keeps
    weight_only: frozenset[str]  # units whose products take float activations on purpose

    def producer(self, name: str) -> onnx.NodeProto | None:
        """Return the node that makes a value; None for a graph input or an initialiser."""
        return self.producers.get(name)

    def users(self, name: str) -> Sequence[Use]:
        """Return the places where a value is taken, in graph order."""
        return self.uses.get(name, ())

    def is_weight(self, dequantise: onnx.NodeProto) -> bool:
        """Say whether a DequantizeLinear stands on a constant."""
        return dequantise.input[0] in self.constants

    def is_weight_only(self, product: onnx.NodeProto) -> bool:
        """Say whether a product is to take float activations: named like its unit, or as a part of it."""
        return product.name in self.weight_only or product.name.rpartition(".")[0] in self.weight_only

    def is_cache(self, codes: str) -> bool:
        """Say whether codes cross the graph's border: rows of a cache, which attention reads as float."""
        return codes in self.int8_inputs or (bool(self.int8_inputs) and codes in self.outputs)


def look_up(model: onnx.ModelProto, folder: Path, weight_only: Collection[str] = ()) -> Places:
    """Return the connections of the top graph of `model`, whose file lies in `folder`."""
    producers = {name: node for node in model.graph.node for name in node.output if name}
    uses: dict[str, list[Use]] = {}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name:
                uses.setdefault(name, []).append(Use(node, index))
    int8_inputs = {v.name for v in model.graph.input if v.type.tensor_type.elem_type == onnx.TensorProto.INT8}
    outputs = frozenset(v.name for v in model.graph.output)
    return Places(
        model, Constants(model, folder), producers, uses, outputs, frozenset(int8_inputs), frozenset(weight_only)
    )


def is_op(node: onnx.NodeProto, *kinds: str) -> bool:
    """Say whether a node is one of these standard operators."""
    return node.op_type in kinds and node.domain in ONNX_DOMAINS


def output_axis(product: onnx.NodeProto, weight_ndim: int) -> int:
    """Return the axis of the output channels in the weight of one of PRODUCTS, 0 or more.

    MatMul: [.., K, N]; Gemm: [K, N], with transB [N, K]; Conv: [N, K / groups, ..]; ConvTranspose: [K, N / groups, ..].
    """
    if product.op_type == "Gemm":
        return 0 if int_attribute(product, "transB", 0) else 1
    return {"MatMul": weight_ndim - 1, "Conv": 0, "ConvTranspose": 1}[product.op_type]


def int_attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """Return a whole-number attribute of a node."""
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def describe(node: onnx.NodeProto) -> str:
    """Name a node for people: by its name, else by what it makes."""
    return node.name or f"{node.op_type} -> {node.output[0] if node.output else '?'}"
