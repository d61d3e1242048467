"""Write the graph of a decoder: one walk over its description, the target's part asked of a lowering.

Inputs: input_ids int64 [B, S], starts int64 [B] (valid rows per slot before this step), logit_rows int64 [B, R] (which
of the S positions get logits) and the KV cache; outputs: logits float32 [B, R, V] and the KV cache, bound to the same
buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from edge_engines.checkpoint.spec import Float32, ModelSpec, Weights, tensor_shapes
from edge_engines.graph.head_padding import pad_heads
from edge_engines.graph.linear import Precision, block_size, gather_blocks, matmul_blocks, quantize_blocks, write_linear
from edge_engines.graph.lowering import IDS, LOGITS, ROWS, STARTS, GraphShape, Lowering, Projected, write_norm
from edge_engines.graph.lowering_native import NativeLowering
from edge_engines.graph.lowering_ort import OrtLowering
from edge_engines.graph.writer import GraphWriter, open_writer
from edge_runtime.errors import BuildError, CheckpointError

LOWERINGS: dict[str, Callable[[GraphWriter, ModelSpec, GraphShape], Lowering]] = {
    "ort": OrtLowering,
    "native": NativeLowering,
}
GRAPH_NAME, DATA_NAME = "model.onnx", "model.onnx.data"
FLOAT16_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class GraphOptions:
    """What to write."""

    lowering: str
    precision: Precision
    capacity: int  # C

    @property
    def compute(self) -> str:
        """Type of activations and KV cache."""
        return "float16" if self.precision == "fp16" else "float32"


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
    if options.precision == "w8" and options.lowering != "ort":
        raise BuildError(
            f"precision w8 has no form in the {options.lowering} lowering yet", remedy="use --lowering ort or fp16"
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
        self.lowering = LOWERINGS[options.lowering](g, spec, GraphShape(options.capacity, self._compute))
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
        table = self._weight("embed")
        size = block_size(spec.hidden)
        self._tied_codes: tuple[str, str, tuple[int, ...]] | None = None
        if self._options.precision == "w8" and size is not None:
            quantized = quantize_blocks(table, size)
            names = g.constant("embed.codes", quantized.codes), g.constant("embed.scales", quantized.scales)
            self._tied_codes = (*names, quantized.codes.shape)
            x = gather_blocks(g, IDS, *self._tied_codes, "embed")
        else:
            x = g.op("Gather", [g.constant("embed.weight", table.astype(self._compute)), IDS], "embed")
        if spec.embed_scale == 1.0:
            return x
        factor = g.constant("embed.factor", np.array(spec.embed_scale, self._compute))
        return g.op("Mul", [x, factor], "embed.multiplied")

    def _block(self, i: int, x: str, delta: str | None) -> tuple[str, str]:
        """Write one layer; return the residual stream without, and separately, the MLP's contribution."""
        spec, at, rows = self._spec, f"layers.{i}", "S"
        x, normed = self._add_norm(x, delta, f"{at}.attn_norm", rows)
        attended = self.lowering.attention(self._project(normed, i), i)
        if i == len(spec.layers) - 1:  # from here on nothing mixes positions: only the wanted ones matter
            x, attended, rows = self._take_rows(x, f"{at}.rows"), self._take_rows(attended, f"{at}.attended_rows"), "R"
        delta = self._linear(attended, at, ("o",), "o", spec.o_bias)
        if spec.post_norms:
            delta = self._norm(delta, f"{at}.post_attn_norm")
        x, normed = self._add_norm(x, delta, f"{at}.mlp_norm", rows)
        delta = self._mlp(normed, at, rows)
        if spec.post_norms:
            delta = self._norm(delta, f"{at}.post_mlp_norm")
        return x, delta

    def _project(self, x: str, i: int) -> Projected:
        """Write q, k and v as one multiplication."""
        g, spec, at = self._g, self._spec, f"layers.{i}"
        fused = self._linear(x, at, ("q", "k", "v"), "qkv", spec.qkv_bias)
        if not spec.qk_norm:
            return Projected(fused)
        kv = spec.num_kv_heads * spec.head_dim
        sizes = g.constant(f"{at}.qkv_sizes", np.array([spec.num_heads * spec.head_dim, kv, kv], np.int64))
        parts = [f"{at}.{n}_part" for n in "qkv"]
        g.op("Split", [fused, sizes], f"{at}.qkv_split", outputs=parts, attrs={"axis": -1})
        q, k = (self._norm_heads(part, kind, at) for part, kind in zip(parts[:2], "qk", strict=True))
        return Projected(None, q, k, parts[2])

    def _norm_heads(self, x: str, kind: str, at: str) -> str:
        """RMSNorm each head of x [B, S, heads * D] over D."""
        heads = self._g.op("Reshape", [x, f"{kind}_norm_heads"], f"{at}.{kind}_heads")
        normed = self._norm(heads, f"{at}.{kind}_norm")
        return self._g.op("Reshape", [normed, f"{kind}_norm_merged"], f"{at}.{kind}")

    def _mlp(self, x: str, at: str, rows: str) -> str:
        g, spec = self._g, self._spec
        fused = self._linear(x, at, ("gate", "up"), "gate_up", spec.mlp_bias)
        gate, up = f"{at}.gate", f"{at}.up"
        g.op("Split", [fused], f"{at}.gate_up_split", outputs=[gate, up], attrs={"axis": -1, "num_outputs": 2})
        active = self._activate(gate, f"{at}.activation", rows)
        product = g.op("Mul", [active, up], f"{at}.gated")
        return self._linear(product, at, ("down",), "down", spec.mlp_bias)

    def _activate(self, x: str, name: str, rows: str) -> str:
        if self._spec.activation == "silu":
            return self.lowering.silu(x, name, rows)
        return self._g.op("Gelu", [x], name, attrs={"approximate": "tanh"})

    def _take_rows(self, x: str, name: str) -> str:
        """Return the positions [B, R, ...] of x [B, S, ...] that get logits."""
        return self._g.op("GatherND", [x, self._row_numbers], name, attrs={"batch_dims": 1})

    def _head(self, x: str, delta: str) -> None:
        """Write the final norm and the head; x and delta hold the wanted rows only."""
        g, spec = self._g, self._spec
        normed = self._norm(g.op("Add", [x, delta], "final.sum"), "norm")
        logits = self._project_head(normed)
        if self._compute != "float32":
            logits = g.cast(logits, "float32", LOGITS)
        g.output(logits, "float32", ["B", "R", spec.vocab])

    def _project_head(self, x: str) -> str:
        g, spec = self._g, self._spec
        name = LOGITS if self._compute == "float32" else "head"
        if not spec.tied_head:
            return write_linear(g, x, self._weight("head"), name, self._options.precision)
        if self._tied_codes is not None:
            return matmul_blocks(g, x, *self._tied_codes, name)
        return self.lowering.multiply_table(x, "embed.weight", name)

    def _linear(self, x: str, at: str, parts: tuple[str, ...], unit: str, has_bias: bool) -> str:
        """Multiply with the weights of `parts`, stacked along their outputs, as one unit of layer `at`."""
        weight = np.concatenate([self._weight(f"{at}.{part}") for part in parts])
        bias = np.concatenate([self._weight(f"{at}.{part}_bias") for part in parts]) if has_bias else None
        return write_linear(self._g, x, weight, f"{at}.{unit}", self._options.precision, bias)

    def _norm(self, x: str, name: str) -> str:
        return write_norm(self._g, x, self._norm_weight(name), self._spec.norm_eps, self._compute, name)

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
