"""Write the graph of a decoder: one walk over its description, the target's part asked of a lowering.

Inputs: input_ids int64 [B, S], starts int64 [B] (valid rows per slot before this step), logit_rows int64 [B, R] (which
of the S positions get logits) and the KV cache; outputs: logits float32 [B, R, V] and the KV cache, bound to the same
buffers, or in the portable lowering its new rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from edge_engines.checkpoint.spec import Float32, ModelSpec, Weights, tensor_shapes, unit_inputs
from edge_engines.graph.head_padding import pad_heads
from edge_engines.graph.int8_units import Int8Units
from edge_engines.graph.linear import (
    BLOCK_BITS,
    BlockLinear,
    FloatLinear,
    Form,
    FusedInt8Linear,
    LinearForm,
    Precision,
    QdqLinear,
    WeightOnlyLinear,
    block_size,
)
from edge_engines.graph.lowering import IDS, LOGITS, ROWS, STARTS, GraphShape, KvScales, Lowering, Projected
from edge_engines.graph.lowering_native import NativeLowering
from edge_engines.graph.lowering_ort import OrtLowering
from edge_engines.graph.lowering_portable import PortableLowering
from edge_engines.graph.table import BlockTable, Embedding, FloatTable, Int8Table, Table, TwoTables
from edge_engines.graph.writer import GraphWriter, open_writer
from edge_runtime.errors import BuildError, CheckpointError

LOWERINGS: dict[str, Callable[[GraphWriter, ModelSpec, GraphShape], Lowering]] = {
    "ort": OrtLowering,
    "native": NativeLowering,
    "portable": PortableLowering,
}
GRAPH_NAME, DATA_NAME = "model.onnx", "model.onnx.data"
FLOAT16_MAX = 65504.0
PARTS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}  # of each unit of a layer


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """What to write."""

    lowering: str
    precision: Precision
    capacity: int  # C
    int8: Int8Units | None = None  # which units, where the precision is int8; smoothing is in the weights by then
    kv_scales: KvScales | None = None  # of an INT8 KV cache, which only the portable lowering has; None: as computed
    forms: Mapping[str, Form] | None = None  # of every unit, where each has its own; `int8` describes those in INT8
    stores_int8: bool = False  # units that are not to multiply in INT8 have INT8 weights all the same

    @property
    def kv_dtype(self) -> str:
        """Type of the KV cache."""
        return self.compute if self.kv_scales is None else "int8"

    @property
    def compute(self) -> str:
        """Type of activations, of a float KV cache, and of units that are not in INT8."""
        is_half = self.precision == "fp16" or (self.int8 is not None and self.lowering != "ort")
        return "float16" if is_half else "float32"

    def form(self, unit: str) -> Form:
        """Return the form that a unit is to have: one by block stays float where no block size divides its inputs."""
        if self.forms is not None:
            return self.forms[unit]
        if self.precision == "w8":
            return "w8"
        if self.int8 is not None and (unit in self.int8.scales or (unit == "embed" and self.int8.rounds_embedding)):
            return "int8"
        if self.stores_int8 and unit != "embed":
            return "w8"
        return "fp16" if self.compute == "float16" else "fp32"


@dataclass(frozen=True, slots=True)
class WrittenGraph:
    """What was written: the spec as lowered (heads may be wider than the checkpoint's), the graph without weights."""

    spec: ModelSpec
    model: onnx.ModelProto
    data_bytes: int


def write_graph(
    folder: Path, spec: ModelSpec, weights: Weights, options: GraphOptions, advance: Callable[[int], None] | None = None
) -> WrittenGraph:
    """Write model.onnx and model.onnx.data into `folder`; `advance` receives the number of weights written.

    Weights are read one layer at a time. Raises BuildError for a precision the lowering has no form for,
    CheckpointError for weights that are not finite or don't fit the precision.
    """
    assert (options.precision == "int8" or options.forms is not None) == (options.int8 is not None)
    by_block = {options.precision, *(options.forms or {}).values()} & BLOCK_BITS.keys()
    if by_block and options.lowering != "ort":
        raise BuildError(
            f"precision {min(by_block)} has no form in the {options.lowering} lowering yet",
            remedy="use --lowering ort or fp16",
        )
    if options.kv_scales is not None and options.lowering != "portable":
        raise BuildError(
            f"an INT8 KV cache has no form in the {options.lowering} lowering", remedy="use --lowering portable"
        )
    spec = spec.for_capacity(options.capacity)
    if options.lowering == "ort":
        spec, weights = pad_heads(spec, weights)
    with open_writer(folder, DATA_NAME) as g:
        walk = _Walk(g, spec, weights, options, advance or (lambda _: None))
        walk.write()
        metadata = {"family": spec.family, "lowering": options.lowering, "precision": options.precision}
        written = WrittenGraph(spec, g.model(spec.family, walk.lowering.opsets, metadata), g.data_bytes)
    onnx.save_model(written.model, folder / GRAPH_NAME)
    return written


class _Walk:
    """The walk from ids to logits. Values flow as names; `self._x` is the residual stream [B, S, hidden]."""

    def __init__(
        self,
        g: GraphWriter,
        spec: ModelSpec,
        weights: Weights,
        options: GraphOptions,
        advance: Callable[[int], None],
    ) -> None:
        self._g, self._spec, self._weights, self._options, self._advance = g, spec, weights, options, advance
        self._compute = options.compute
        self._shapes = dict(tensor_shapes(spec))
        g.input(IDS, "int64", ["B", "S"])
        g.input(STARTS, "int64", ["B"])
        g.input(ROWS, "int64", ["B", "R"])
        last_axis = g.constant("last_axis", np.array([-1], np.int64))
        self._row_numbers = g.op("Unsqueeze", [ROWS, last_axis], "logit_rows_3d")  # [B, R, 1]
        shape = GraphShape(options.capacity, self._compute, options.int8 is not None, options.kv_scales)
        self.lowering = LOWERINGS[options.lowering](g, spec, shape)
        if spec.qk_norm:
            for kind, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
                g.constant(f"{kind}_norm_heads", np.array([0, 0, heads, spec.head_dim], np.int64))
                g.constant(f"{kind}_norm_merged", np.array([0, 0, heads * spec.head_dim], np.int64))

    def write(self) -> None:
        """Write embedding, blocks and head."""
        x, delta = self._embed(), None
        for i in range(len(self._spec.layers)):
            x, delta = self._block(i, x, delta)
        assert delta is not None, "a model without layers"
        self._head(x, delta)

    def _embed(self) -> str:
        g, spec = self._g, self._spec
        self._table = self._make_table()
        x = self._table.embed(IDS, "embed")
        if spec.embed_scale == 1.0:
            return x
        factor = g.constant("embed.factor", np.array(spec.embed_scale, self._compute))
        return g.op("Mul", [x, factor], "embed.multiplied")

    def _make_table(self) -> Table:
        """Choose how embedding and head are stored."""
        g, spec, int8 = self._g, self._spec, self._options.int8
        head = self._form("head")
        if int8 is not None and int8.table_factors is not None:
            assert isinstance(head, FusedInt8Linear | QdqLinear)
            table = self._weight("embed" if spec.tied_head else "head")
            return Int8Table(g, table, int8.table_factors, head, self._compute)
        if spec.tied_head and isinstance(head, BlockLinear):
            return BlockTable(g, self._weight("embed"), head.size, head.bits)
        if spec.tied_head:
            return FloatTable(g, self._weight("embed"), self._compute, self.lowering.multiply_table)
        size = None
        embedding: Embedding = "float"
        match self._options.form("embed"):
            case "w8" | "w4" as form:
                size = block_size(spec.hidden, BLOCK_BITS[form])
                embedding = form if size else "float"
            case "int8":
                embedding = "int8" if self._options.lowering == "ort" else "packed"
        return TwoTables(g, self._weight, embedding, head, self._compute, size)

    def _block(self, i: int, x: str, delta: str | None) -> tuple[str, str]:
        """Write one layer; return the residual stream without, and separately, the MLP's contribution."""
        spec, at, rows = self._spec, f"layers.{i}", "S"
        x, normed = self._add_norm(x, delta, f"{at}.attn_norm", rows)
        attended = self.lowering.attention(self._project(normed, i), i)
        if i == len(spec.layers) - 1:  # from here on nothing mixes positions: only the wanted ones matter
            x, attended, rows = self._take_rows(x, f"{at}.rows"), self._take_rows(attended, f"{at}.attended_rows"), "R"
        (delta,) = self._linear(attended, at, "o", spec.o_bias)
        if spec.post_norms:
            delta = self._norm(delta, f"{at}.post_attn_norm")
        x, normed = self._add_norm(x, delta, f"{at}.mlp_norm", rows)
        delta = self._mlp(normed, at, rows)
        if spec.post_norms:
            delta = self._norm(delta, f"{at}.post_mlp_norm")
        return x, delta

    def _project(self, x: str, i: int) -> Projected:
        """Write q, k and v."""
        g, spec, at = self._g, self._spec, f"layers.{i}"
        made = self._linear(x, at, "qkv", spec.qkv_bias)
        if len(made) == 1 and not spec.qk_norm:
            return Projected(made[0])
        if len(made) == 1:
            kv = spec.num_kv_heads * spec.head_dim
            sizes = g.constant(f"{at}.qkv_sizes", np.array([spec.num_heads * spec.head_dim, kv, kv], np.int64))
            parts = tuple(f"{at}.{n}_part" for n in "qkv")
            g.op("Split", [made[0], sizes], f"{at}.qkv_split", outputs=parts, attrs={"axis": -1})
            made = parts
        q, k, v = made
        if spec.qk_norm:
            q, k = self._norm_heads(q, "q", at), self._norm_heads(k, "k", at)
        return Projected(None, q, k, v)

    def _norm_heads(self, x: str, kind: str, at: str) -> str:
        """RMSNorm each head of x [B, S, heads * D] over D."""
        heads = self._g.op("Reshape", [x, f"{kind}_norm_heads"], f"{at}.{kind}_heads")
        normed = self._norm(heads, f"{at}.{kind}_norm")
        return self._g.op("Reshape", [normed, f"{kind}_norm_merged"], f"{at}.{kind}")

    def _mlp(self, x: str, at: str, rows: str) -> str:
        g, spec = self._g, self._spec
        made = self._linear(x, at, "gate_up", spec.mlp_bias)
        if len(made) == 1:
            fused, made = made, (f"{at}.gate", f"{at}.up")
            g.op("Split", fused, f"{at}.gate_up_split", outputs=made, attrs={"axis": -1, "num_outputs": 2})
        gate, up = made
        active = self._activate(gate, f"{at}.activation", rows)
        product = g.op("Mul", [active, up], f"{at}.gated")
        (down,) = self._linear(product, at, "down", spec.mlp_bias)
        return down

    def _activate(self, x: str, name: str, rows: str) -> str:
        if self._spec.activation == "silu":
            return self.lowering.silu(x, name, rows)
        return self.lowering.gelu(x, name)

    def _take_rows(self, x: str, name: str) -> str:
        """Return the positions [B, R, ...] of x [B, S, ...] that get logits."""
        return self._g.op("GatherND", [x, self._row_numbers], name, attrs={"batch_dims": 1})

    def _head(self, x: str, delta: str) -> None:
        """Write the final norm and the head; x and delta hold the wanted rows only."""
        g, spec = self._g, self._spec
        normed = self._norm(g.op("Add", [x, delta], "final.sum"), "norm")
        logits = self._table.multiply(normed, LOGITS if self._compute == "float32" else "head")
        if self._compute != "float32":
            logits = g.cast(logits, "float32", LOGITS)
        g.output(logits, "float32", ["B", "R", spec.vocab])

    def _linear(self, x: str, at: str, kind: str, has_bias: bool) -> tuple[str, ...]:
        """Multiply as one unit of layer `at`: one value, or one per part where the lowering keeps parts apart."""
        unit, parts = f"{at}.{kind}", PARTS[kind]
        form = self._form(unit)
        read = form.read(self._g, x)
        groups = [parts] if self.lowering.stacks_parts else [(part,) for part in parts]
        names = [unit] if len(groups) == 1 else [f"{unit}.{part}" for part in parts]
        return tuple(
            form.multiply(self._g, read, self._stacked(at, group, ""), name, self._bias(at, group, has_bias))
            for name, group in zip(names, groups, strict=True)
        )

    def _form(self, unit: str) -> LinearForm:
        """Return how a unit multiplies."""
        form, compute = self._options.form(unit), self._compute
        if form == "int8":
            assert self._options.int8 is not None
            scale = self._options.int8.scales[unit]
            return FusedInt8Linear(unit, scale) if self._options.lowering == "ort" else QdqLinear(unit, scale, compute)
        if form == "w8" and self._options.lowering != "ort":
            return WeightOnlyLinear(compute)
        bits = BLOCK_BITS.get(form)
        size = block_size(unit_inputs(self._spec)[unit.rpartition(".")[2]], bits) if bits else None
        return BlockLinear(size, bits) if bits and size else FloatLinear(compute)

    def _stacked(self, at: str, parts: tuple[str, ...], suffix: str) -> Float32:
        return np.concatenate([self._weight(f"{at}.{part}{suffix}") for part in parts])

    def _bias(self, at: str, parts: tuple[str, ...], has_bias: bool) -> Float32 | None:
        return self._stacked(at, parts, "_bias") if has_bias else None

    def _norm(self, x: str, name: str) -> str:
        return self.lowering.norm(x, self._norm_weight(name), name)

    def _add_norm(self, x: str, delta: str | None, name: str, rows: str) -> tuple[str, str]:
        if delta is None:
            return x, self._norm(x, name)
        return self.lowering.add_norm(x, delta, self._norm_weight(name), name, rows)

    def _norm_weight(self, name: str) -> Float32:
        weight: Float32 = self._weight(name) + np.float32(self._spec.norm_offset)
        return weight

    def _weight(self, name: str) -> Float32:
        """Read one canonical tensor; its shape is the reader's promise, its values are checked."""
        tensor = self._weights.tensor(name)
        assert tensor.shape == self._shapes[name], (name, tensor.shape, self._shapes[name])
        largest = float(np.abs(tensor).max())
        if not np.isfinite(largest):
            raise CheckpointError(
                f"tensor {name} holds NaN or infinity", remedy="the checkpoint is damaged: fetch it again"
            )
        if self._compute == "float16" and largest > FLOAT16_MAX:
            raise CheckpointError(
                f"tensor {name} reaches {largest:g}, FP16 ends at {FLOAT16_MAX:g}", remedy="build with --precision fp32"
            )
        self._advance(1)
        return tensor
