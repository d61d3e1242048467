"""Lower a decoder to ONNX Runtime's contrib operators: the CPU default.

GroupQueryAttention applies rotary, writes the shared cache in place and reads valid rows only.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edge_engines.checkpoint.spec import Float32, ModelSpec
from edge_engines.graph.linear import CONTRIB
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
from edge_engines.graph.writer import GraphWriter


class OrtLowering:
    """See Lowering. Opset 23 is the newest that ONNX Runtime 1.23 accepts, and the first with RMSNormalization."""

    opsets: ClassVar[dict[str, int]] = {"": 23, CONTRIB: 1}

    def __init__(self, g: GraphWriter, spec: ModelSpec, shape: GraphShape) -> None:
        """Write what all layers share: last valid row per slot, total length, rotary tables."""
        self._g, self._spec, self._shape = g, spec, shape
        one = g.constant("one", np.array([1], np.int64))
        length = g.op("Gather", [g.op("Shape", [IDS], "ids_shape"), one], "new_rows")  # [1] = S
        stops = g.op("Add", [STARTS, length], "stops")  # [B] valid rows after this step
        self._last_row = g.cast(g.op("Sub", [stops, one], "last_rows_int64"), "int32", "last_rows")
        longest = g.op("ReduceMax", [stops], "longest_int64", attrs={"keepdims": 0})
        self._longest = g.cast(longest, "int32", "longest")
        self._tables = []
        for i, rotary in enumerate(spec.rotaries):
            cos, sin = (t.astype(shape.compute) for t in rotary_tables(rotary, shape.capacity))
            self._tables.append((g.constant(f"rotary.{i}.cos", cos), g.constant(f"rotary.{i}.sin", sin)))

    def add_norm(self, x: str, delta: str, weight: Float32, name: str) -> tuple[str, str]:
        """See Lowering.add_norm: one fused operator in FP32; in FP16 an FP16 sum and an FP32 norm."""
        g, eps, total = self._g, self._spec.norm_eps, f"{name}.sum"
        if self._shape.compute == "float16":
            g.op("Add", [x, delta], total)
            return total, write_norm(g, total, weight, eps, "float16", name)
        gamma = g.constant(f"{name}.weight", weight)
        fused = "SkipSimplifiedLayerNormalization"
        g.op(fused, [x, delta, gamma], name, outputs=[name, "", "", total], attrs={"epsilon": eps}, domain=CONTRIB)
        width = self._spec.hidden
        return g.typed(total, "float32", ["B", "S", width]), g.typed(name, "float32", ["B", "S", width])

    def attention(self, qkv: Projected, layer: int) -> str:
        """See Lowering.attention."""
        g, spec, shape = self._g, self._spec, self._shape
        past_k, past_v, present_k, present_v = cache_names(layer)
        cache = cache_shape(spec, shape)
        for name in (past_k, past_v):
            g.input(name, shape.compute, cache)
        name = f"layers.{layer}.attention"
        heads = (qkv.fused, "", "") if qkv.fused else (qkv.q, qkv.k, qkv.v)
        g.op(
            "GroupQueryAttention",
            [*heads, past_k, past_v, self._last_row, self._longest, *self._tables[spec.layers[layer].rotary]],
            name,
            outputs=[name, present_k, present_v],
            attrs={
                "num_heads": spec.num_heads,
                "kv_num_heads": spec.num_kv_heads,
                "scale": spec.scale,
                "do_rotary": 1,
                "rotary_interleaved": 0,
                "local_window_size": spec.layers[layer].window or -1,
            },
            domain=CONTRIB,
        )
        for out in (present_k, present_v):
            g.output(out, shape.compute, cache)
        return g.typed(name, shape.compute, ["B", "S", spec.num_heads * spec.head_dim])

    def multiply_table(self, x: str, table: str, name: str) -> str:
        """See Lowering.multiply_table: packed once at load, where a Transpose node would run in every step."""
        made = self._g.op("FusedMatMul", [x, table], name, attrs={"transB": 1}, domain=CONTRIB)
        return self._g.typed(made, self._shape.compute, ["B", "R", self._spec.vocab])

    def silu(self, x: str, name: str) -> str:
        """See Lowering.silu: QuickGelu with alpha 1 is SiLU in one pass."""
        made = self._g.op("QuickGelu", [x], name, attrs={"alpha": 1.0}, domain=CONTRIB)
        return self._g.typed(made, self._shape.compute, ["B", "S", self._spec.ffn])
