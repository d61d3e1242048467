"""Write projections that a Split takes apart as separate ones, so that a plan stores each weight once.

With one profile for decode and one for prefill, TensorRT-RTX 1.7 keeps a stacked weight twice, whole for one profile
and in parts for the other: SmolLM2-135M in FP16 (269 MB of weights) makes a plan of 429 MB stacked, 293 MB apart. With
one profile both are 276 MB. Siblings that read one value are still for TensorRT to fuse.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edge_engines.graph.writer import GraphWriter


@dataclass(frozen=True, slots=True)
class Stacked:
    """MatMul, perhaps Add of a bias, then Split; `sizes` are the widths of the parts."""

    source: str  # value [B, S, K] that is multiplied
    weight: str  # [K, N]
    bias: str | None  # [N]
    outputs: tuple[str, ...]
    sizes: tuple[int, ...]
    nodes: tuple[str, ...]

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of weight and bias."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def store(self, g: GraphWriter, name: str, array: NDArray[np.generic]) -> None:
        """Store the parts of weight or bias `name`."""
        parts = np.split(array, np.cumsum(self.sizes)[:-1], axis=-1)
        for output, part in zip(self.outputs, parts, strict=True):
            g.constant(f"{output}.{_kind(name)}", part)


def find_stacked(graph: onnx.GraphProto) -> dict[str, Stacked]:
    """Return stacked projections by the name of their Split, where nothing else reads the values between."""
    producers = {output: node for node in graph.node for output in node.output}
    readers = Counter(name for node in graph.node for name in node.input)
    constants = {tensor.name: tensor for tensor in graph.initializer}
    found = {}
    for split in graph.node:
        if split.op_type != "Split":
            continue
        last = producers.get(split.input[0])
        add = last if last is not None and last.op_type == "Add" and last.input[1] in constants else None
        product = producers.get(add.input[0]) if add is not None else last
        if product is None or product.op_type != "MatMul" or product.input[1] not in constants:
            continue
        chain = [node for node in (product, add) if node is not None]
        if any(readers[node.output[0]] != 1 for node in chain):
            continue
        found[split.name] = Stacked(
            source=product.input[0],
            weight=product.input[1],
            bias=add.input[1] if add is not None else None,
            outputs=tuple(split.output),
            sizes=_sizes(split, constants, product.input[1]),
            nodes=tuple(node.name for node in (*chain, split)),
        )
    return found


def write_apart(stacked: Stacked) -> list[onnx.NodeProto]:
    """Return the nodes of the separate projections, whose weights are stored already."""
    nodes = []
    for output in stacked.outputs:
        product = output if stacked.bias is None else f"{output}.product"
        weight = f"{output}.{_kind(stacked.weight)}"
        nodes.append(helper.make_node("MatMul", [stacked.source, weight], [product], name=product))
        if stacked.bias is not None:
            bias = f"{output}.{_kind(stacked.bias)}"
            nodes.append(helper.make_node("Add", [product, bias], [output], name=output))
    return nodes


def _sizes(split: onnx.NodeProto, constants: dict[str, onnx.TensorProto], weight: str) -> tuple[int, ...]:
    if len(split.input) > 1:
        return tuple(int(size) for size in numpy_helper.to_array(constants[split.input[1]]))
    return (constants[weight].dims[-1] // len(split.output),) * len(split.output)


def _kind(constant: str) -> str:
    """Return "weight" or "bias", the last part of a constant's name."""
    return constant.rsplit(".", 1)[-1]
