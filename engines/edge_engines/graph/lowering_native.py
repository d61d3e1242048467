"""Lower a decoder to standard ONNX operators of opset 24: TensorRT >= 10.15 and TensorRT-RTX, also ONNX Runtime.

TensorScatter writes the cache, Attention reads it whole under an explicit boolean mask (is_causal is anchored at the
upper left in TensorRT up to 10.16, case C30). The session binds past and present to one address.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edge_engines.checkpoint.spec import Float32, ModelSpec
from edge_engines.graph.lowering import (
    IDS,
    STARTS,
    GraphShape,
    Projected,
    cache_names,
    cache_shape,
    rotary_tables,
    write_norm,
)
from edge_engines.graph.writer import Attribute, GraphWriter


class NativeLowering:
    """See Lowering."""

    opsets: ClassVar[dict[str, int]] = {"": 24}
    stacks_parts: ClassVar[bool] = False

    def __init__(self, g: GraphWriter, spec: ModelSpec, shape: GraphShape) -> None:
        """Write what all layers share: positions, one mask per distinct window, rotary tables."""
        self._g, self._spec, self._shape = g, spec, shape
        self._fp32_scores = spec.scores_fp32 and shape.compute == "float16"
        self._positions = self._write_positions()  # [B, S]
        self._masks = {window: self._write_mask(window) for window in {layer.window for layer in spec.layers}}
        self._tables = []
        for i, rotary in enumerate(spec.rotaries):
            cos, sin = (t.astype(shape.compute) for t in rotary_tables(rotary, shape.capacity))
            self._tables.append((g.constant(f"rotary.{i}.cos", cos), g.constant(f"rotary.{i}.sin", sin)))
        for kind, heads in (("q", spec.num_heads), ("kv", spec.num_kv_heads)):
            g.constant(f"{kind}_heads", np.array([0, 0, heads, spec.head_dim], np.int64))
        g.constant("merged_heads", np.array([0, 0, -1], np.int64))

    def norm(self, x: str, weight: Float32, name: str) -> str:
        """See Lowering.norm."""
        return write_norm(self._g, x, weight, self._spec.norm_eps, self._shape.compute, name)

    def add_norm(self, x: str, delta: str, weight: Float32, name: str, rows: str) -> tuple[str, str]:
        """See Lowering.add_norm."""
        total = self._g.op("Add", [x, delta], f"{name}.sum")
        return total, self.norm(total, weight, name)

    def attention(self, qkv: Projected, layer: int) -> str:
        """See Lowering.attention."""
        g, spec, name = self._g, self._spec, f"layers.{layer}.attention"
        table = self._tables[spec.layers[layer].rotary]
        dims = spec.rotaries[spec.layers[layer].rotary].dim
        q = self._rotate(self._by_head(qkv.q, "q", f"{name}.q"), table, dims, f"{name}.q_rotary")
        k = self._rotate(self._by_head(qkv.k, "kv", f"{name}.k"), table, dims, f"{name}.k_rotary")
        k = self._append(k, layer, 0)
        v = self._append(self._by_head(qkv.v, "kv", f"{name}.v"), layer, 1)
        mask = self._masks[spec.layers[layer].window]
        if self._fp32_scores:
            heads = self._write_out(q, k, v, mask, name)
        else:
            heads = g.op("Attention", [q, k, v, mask], f"{name}.heads", attrs={"scale": spec.scale})  # [B, H, S, D]
        rows = g.op("Transpose", [heads], f"{name}.rows", attrs={"perm": [0, 2, 1, 3]})
        return g.op("Reshape", [rows, "merged_heads"], name)

    def _write_out(self, q: str, k: str, v: str, mask: str, name: str) -> str:
        """Return attention [B, H, S, D] in products and a softmax of FP32, for which TensorRT has no fused kernel.

        G = H / K queries share a kv head: they stand on an axis of their own, over which k and v broadcast. The scores
        of a step become a tensor, so this is slower than Attention.
        """
        g, spec = self._g, self._spec
        q, k, v = (g.cast(t, "float32", f"{name}.{n}_fp32") for t, n in ((q, "q"), (k, "k"), (v, "v")))
        axis = g.shared("group_axis", np.array([2], np.int64))
        group = spec.num_heads // spec.num_kv_heads
        by_group = g.shared("by_group", np.array([0, spec.num_kv_heads, group, -1, spec.head_dim], np.int64))
        scaled = g.op("Mul", [q, g.shared("scale", np.array(spec.scale, np.float32))], f"{name}.scaled")
        q = g.op("Reshape", [scaled, by_group], f"{name}.q_grouped")  # [B, K, G, S, D]
        turned = g.op("Transpose", [k], f"{name}.k_turned", attrs={"perm": [0, 1, 3, 2]})
        k = g.op("Unsqueeze", [turned, axis], f"{name}.k_grouped")  # [B, K, 1, D, C]
        v = g.op("Unsqueeze", [v, axis], f"{name}.v_grouped")  # [B, K, 1, C, D]
        seen = g.op("Unsqueeze", [mask, axis], f"{name}.seen")  # [B, 1, 1, S, C]
        low = g.shared("hidden_score", np.array(np.finfo(np.float32).min, np.float32))
        masked = g.op("Where", [seen, g.op("MatMul", [q, k], f"{name}.scores"), low], f"{name}.masked")
        mixed = g.op("MatMul", [g.op("Softmax", [masked], f"{name}.shares"), v], f"{name}.mixed")
        merged = g.shared("ungrouped", np.array([0, spec.num_heads, -1, spec.head_dim], np.int64))
        heads = g.op("Reshape", [mixed, merged], f"{name}.heads_fp32")
        return g.cast(heads, self._shape.compute, f"{name}.heads")

    def multiply_table(self, x: str, table: str, name: str) -> str:
        """See Lowering.multiply_table: runtimes fold the transpose of a constant when they load."""
        turned = self._g.op("Transpose", [table], "head.weight", attrs={"perm": [1, 0]})
        return self._g.op("MatMul", [x, turned], name)

    def silu(self, x: str, name: str, rows: str) -> str:
        """See Lowering.silu."""
        return self._g.op("Mul", [x, self._g.op("Sigmoid", [x], f"{name}.sigmoid")], name)

    def gelu(self, x: str, name: str) -> str:
        """See Lowering.gelu."""
        return self._g.op("Gelu", [x], name, attrs={"approximate": "tanh"})

    def _write_positions(self) -> str:
        g = self._g
        g.constant("zero", np.array(0, np.int64))
        g.constant("one", np.array(1, np.int64))
        g.constant("axis_1", np.array([1], np.int64))
        length = g.op("Gather", [g.op("Shape", [IDS], "ids_shape"), "one"], "new_rows")  # scalar S
        offsets = g.op("Range", ["zero", length, "one"], "offsets")  # [S]
        starts = g.op("Unsqueeze", [STARTS, "axis_1"], "starts_column")  # [B, 1]
        return g.op("Add", [starts, offsets], "positions")

    def _write_mask(self, window: int | None) -> str:
        """Return bool [B, 1, S, C]: key c is visible to position p when p - window < c <= p."""
        g, name = self._g, f"mask.{window or 'full'}"
        keys = g.constant(f"{name}.keys", np.arange(self._shape.capacity, dtype=np.int64))
        axes = g.constant(f"{name}.axes", np.array([1, 3], np.int64))
        rows = g.op("Unsqueeze", [self._positions, axes], f"{name}.rows")  # [B, 1, S, 1]
        causal = g.op("LessOrEqual", [keys, rows], f"{name}.causal" if window else name)
        if window is None:
            return causal
        first = g.op("Sub", [rows, g.constant(f"{name}.width", np.array(window, np.int64))], f"{name}.before")
        return g.op("And", [causal, g.op("Greater", [keys, first], f"{name}.near")], name)

    def _by_head(self, x: str, kind: str, name: str) -> str:
        """Reshape [B, S, heads * D] to [B, heads, S, D]."""
        rows = self._g.op("Reshape", [x, f"{kind}_heads"], f"{name}_rows")
        return self._g.op("Transpose", [rows], name, attrs={"perm": [0, 2, 1, 3]})

    def _rotate(self, x: str, table: tuple[str, str], dims: int, name: str) -> str:
        """Rotate the first `dims` dims of each head."""
        attrs: dict[str, Attribute] = {"interleaved": 0}
        if dims != self._spec.head_dim:
            attrs["rotary_embedding_dim"] = dims
        return self._g.op("RotaryEmbedding", [x, *table, self._positions], name, attrs=attrs)

    def _append(self, rows: str, layer: int, which: int) -> str:
        """Scatter new rows [B, K, S, D] into the cache [B, K, C, D] at each slot's start."""
        g, spec, shape = self._g, self._spec, self._shape
        past, present = cache_names(layer)[which], cache_names(layer)[2 + which]
        cache = cache_shape(spec, shape)
        g.input(past, shape.compute, cache)
        g.op("TensorScatter", [past, rows, STARTS], present, attrs={"axis": -2, "mode": "linear"})
        g.output(present, shape.compute, cache)
        return present
