"""Measure what INT8 does to each unit's own output, for every clipping point of its input, in one run of one graph.

The float graph gets, beside each product, the same product in INT8 and two sums per row: of the squared difference and
of the squared output. So nothing of an activation's size leaves ONNX Runtime. Rows are tokens for products of matrices
and whole samples for convolutions, where a dark corner of an image would count as much as its subject.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_engines.onnx_model.code_file import StoredWeight
from edge_engines.onnx_model.names import FreshNames, value_names
from edge_engines.onnx_model.ranges import without_padding
from edge_engines.onnx_model.rewrite import QdqWriter
from edge_engines.onnx_model.samples import Array, Batch
from edge_engines.onnx_model.session import Session
from edge_engines.onnx_model.units import Product, Unit
from edge_engines.progress import Progress

LOCAL_NAME = "local.onnx"


@dataclass(frozen=True, slots=True)
class LocalError:
    """Error of a unit's output relative to the output itself."""

    pooled: float  # over all values together
    per_row: float  # mean over rows
    worst_row: float

    @property
    def judged(self) -> float:
        """Return what the hard rule looks at: a massive row hides all others in one, a clipped spike in the other."""
        return max(self.pooled, self.per_row)


@dataclass(slots=True)
class _Sums:
    difference: float = 0.0
    output: float = 0.0
    rows: list[NDArray[np.float32]] = field(default_factory=list)  # one number per row, not per value

    def add(self, difference: Array, output: Array) -> None:
        self.difference += float(difference.sum(dtype=np.float64))
        self.output += float(output.sum(dtype=np.float64))
        alive = output > 0
        self.rows.append(np.sqrt(difference[alive] / output[alive]).astype(np.float32).reshape(-1))

    def error(self) -> LocalError:
        rows = np.concatenate(self.rows)
        if self.output == 0 or not rows.size:
            return LocalError(0.0, 0.0, 0.0)
        return LocalError((self.difference / self.output) ** 0.5, float(rows.mean()), float(rows.max()))


def measure_local(
    model: onnx.ModelProto,
    folder: Path,
    units: Sequence[Unit],
    candidates: Mapping[str, Mapping[str, float]],
    stored: Mapping[str, StoredWeight],
    batches: Iterable[Batch],
    progress: Progress,
) -> dict[str, dict[str, LocalError]]:
    """Return the error of each unit under each candidate scale of its input, by unit and rule.

    `model` is the float graph, whose data lies in `folder`.
    """
    graph, outputs = _with_sums(model, units, candidates, stored)
    onnx.save_model(graph, folder / LOCAL_NAME)
    session = Session(folder / LOCAL_NAME)
    sums = {(unit.name, rule): _Sums() for unit in units for rule in candidates[unit.name]}
    for batch in batches:
        values = session.run(batch.feeds)
        for (unit, rule), names in outputs.items():
            difference, output = (without_padding(values[name], batch.valid) for name in names)
            sums[unit, rule].add(difference, output)
        progress.advance(batch.count)
    (folder / LOCAL_NAME).unlink()
    return {unit.name: {rule: sums[unit.name, rule].error() for rule in candidates[unit.name]} for unit in units}


Outputs = dict[tuple[str, str], tuple[str, str]]  # unit and rule -> names of the two sums


def _with_sums(
    model: onnx.ModelProto,
    units: Sequence[Unit],
    candidates: Mapping[str, Mapping[str, float]],
    stored: Mapping[str, StoredWeight],
) -> tuple[onnx.ModelProto, Outputs]:
    made = onnx.ModelProto()
    made.CopyFrom(model)
    g = _SumWriter(stored, value_names(model.graph))
    by_node = {node.name: node for node in model.graph.node}
    outputs: Outputs = {}
    for number, unit in enumerate(units):
        nodes = {p.node: by_node[p.node] for p in unit.products}
        norm = g.float_sum(f"local.{number}", unit, nodes)
        for rule, scale in candidates[unit.name].items():
            difference = g.difference_sum(f"local.{number}.{rule}", unit, nodes, scale)
            outputs[unit.name, rule] = (difference, norm)
    made.graph.node.extend(g.nodes)
    made.graph.initializer.extend(g.constants)
    made.graph.ClearField("output")
    names = dict.fromkeys(name for pair in outputs.values() for name in pair)
    made.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    return made, outputs


class _SumWriter:
    """Collects the nodes that stand beside the graph's own."""

    def __init__(self, stored: Mapping[str, StoredWeight], taken: set[str]) -> None:
        self._qdq = QdqWriter(stored, np.float32, FreshNames(taken))
        self.nodes: list[onnx.NodeProto] = []
        self._axes: dict[str, TensorProto] = {}

    @property
    def constants(self) -> list[TensorProto]:
        return [*self._qdq.constants, *self._axes.values()]

    def float_sum(self, prefix: str, unit: Unit, nodes: Mapping[str, onnx.NodeProto]) -> str:
        """Return the sum per row of the squared float outputs."""
        values = [self._float(f"{prefix}.{i}", nodes[p.node]) for i, p in enumerate(unit.products)]
        return self._total(prefix, unit, values)

    def difference_sum(self, prefix: str, unit: Unit, nodes: Mapping[str, onnx.NodeProto], scale: float) -> str:
        """Return the sum per row of the squared differences between INT8 and float outputs."""
        x, made = self._qdq.read(unit.tensor, scale)
        self.nodes += made
        values = [self._difference(f"{prefix}.{i}", nodes[p.node], p, x) for i, p in enumerate(unit.products)]
        return self._total(prefix, unit, values)

    def _difference(self, prefix: str, node: onnx.NodeProto, product: Product, x: str) -> str:
        weight, made = self._qdq.weight(product)
        self.nodes += made
        if product.kind == "Gemm":
            rounded = self._op("MatMul", [x, weight], f"{prefix}.int8")
        else:
            rounded = self._bare(f"{prefix}.int8", node, [x, weight])
        return self._op("Sub", [rounded, self._float(f"{prefix}.float", node)], f"{prefix}.diff")

    def _float(self, name: str, node: onnx.NodeProto) -> str:
        """Return the float product without its bias; where that is the graph's own, ONNX Runtime merges them."""
        return self._bare(name, node, list(node.input[:2]))

    def _bare(self, name: str, node: onnx.NodeProto, inputs: Sequence[str]) -> str:
        made = helper.make_node(node.op_type, inputs, [name], name=name)
        made.attribute.extend(node.attribute)
        self.nodes.append(made)
        return name

    def _total(self, prefix: str, unit: Unit, values: Sequence[str]) -> str:
        """Return the squares of several values summed per row: over the last axis, or over all but the first."""
        by_sample = any(product.is_convolution for product in unit.products)
        total = ""
        for value in values:
            square = self._op("Mul", [value, value], f"{value}.square")
            flat = self._op("Flatten", [square], f"{value}.flat", {"axis": 1}) if by_sample else square
            rows = self._op("ReduceSum", [flat, self._last_axis()], f"{value}.rows", {"keepdims": 0})
            total = self._op("Add", [total, rows], f"{value}.total") if total else rows
        return self._op("Identity", [total], f"{prefix}.sum")

    def _last_axis(self) -> str:
        name = "local.last_axis"
        self._axes[name] = numpy_helper.from_array(np.array([-1], np.int64), name)
        return name

    def _op(self, kind: str, inputs: list[str], name: str, attributes: Mapping[str, int] | None = None) -> str:
        node = helper.make_node(kind, inputs, [name], name=name)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in (attributes or {}).items())
        self.nodes.append(node)
        return name
