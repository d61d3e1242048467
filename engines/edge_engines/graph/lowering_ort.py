"""Lower a decoder to ONNX Runtime's contrib operators: the CPU default.

GroupQueryAttention applies rotary, writes the shared cache in place and reads valid rows only. Its own window attribute
counts one key more in ONNX Runtime 1.23 than in 1.32 (measured), so a window is written as an attention bias instead.
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
    stacks_parts: ClassVar[bool] = True

    def __init__(self, g: GraphWriter, spec: ModelSpec, shape: GraphShape) -> None:
        """Write what all layers share: last valid row per slot, total length, rotary tables."""
        self._g, self._spec, self._shape = g, spec, shape
        one = g.constant("one", np.array([1], np.int64))
        length = g.op("Gather", [g.op("Shape", [IDS], "ids_shape"), one], "new_rows")  # [1] = S
        stops = g.op("Add", [STARTS, length], "stops")  # [B] valid rows after this step
        self._last_row = g.cast(g.op("Sub", [stops, one], "last_rows_int64"), "int32", "last_rows")
        self._longest_int64 = g.op("ReduceMax", [stops], "longest_int64", attrs={"keepdims": 0})  # scalar T
        self._longest = g.cast(self._longest_int64, "int32", "longest")
        windows = {layer.window for layer in spec.layers if self._is_narrow(layer.window)}
        self._biases = {window: self._write_bias(window, length) for window in windows}
        self._tables = []
        for i, rotary in enumerate(spec.rotaries):
            cos, sin = (t.astype(shape.compute) for t in rotary_tables(rotary, shape.capacity))
            self._tables.append((g.constant(f"rotary.{i}.cos", cos), g.constant(f"rotary.{i}.sin", sin)))

    def norm(self, x: str, weight: Float32, name: str) -> str:
        """See Lowering.norm."""
        return write_norm(self._g, x, weight, self._spec.norm_eps, self._shape.compute, name)

    def add_norm(self, x: str, delta: str, weight: Float32, name: str, rows: str) -> tuple[str, str]:
        """See Lowering.add_norm: one fused operator in FP32; in FP16 an FP16 sum and an FP32 norm."""
        g, eps, total = self._g, self._spec.norm_eps, f"{name}.sum"
        if self._shape.compute == "float16":
            g.op("Add", [x, delta], total)
            return total, self.norm(total, weight, name)
        gamma = g.constant(f"{name}.weight", weight)
        fused = "SkipSimplifiedLayerNormalization"
        g.op(fused, [x, delta, gamma], name, outputs=[name, "", "", total], attrs={"epsilon": eps}, domain=CONTRIB)
        width = self._spec.hidden
        return g.typed(total, "float32", ["B", rows, width]), g.typed(name, "float32", ["B", rows, width])

    def attention(self, qkv: Projected, layer: int) -> str:
        """See Lowering.attention."""
        g, spec, shape = self._g, self._spec, self._shape
        past_k, past_v, present_k, present_v = cache_names(layer)
        cache = cache_shape(spec, shape)
        for name in (past_k, past_v):
            g.input(name, shape.compute, cache)
        name = f"layers.{layer}.attention"
        heads = (qkv.fused, "", "") if qkv.fused else (qkv.q, qkv.k, qkv.v)
        bias = self._biases.get(spec.layers[layer].window)
        table = self._tables[spec.layers[layer].rotary]
        g.op(
            "GroupQueryAttention",
            [*heads, past_k, past_v, self._last_row, self._longest, *table, *(("", bias) if bias else ())],
            name,
            outputs=[name, present_k, present_v],
            attrs={
                "num_heads": spec.num_heads,
                "kv_num_heads": spec.num_kv_heads,
                "scale": spec.scale,
                "do_rotary": 1,
                "rotary_interleaved": 0,
            },
            domain=CONTRIB,
        )
        for out in (present_k, present_v):
            g.output(out, shape.compute, cache)
        return g.typed(name, shape.compute, ["B", "S", spec.num_heads * spec.head_dim])

    def _is_narrow(self, window: int | None) -> bool:
        """Whether a window hides anything within the capacity."""
        return window is not None and window < self._shape.capacity

    def _write_bias(self, window: int | None, length: str) -> str:
        """Return [B, 1, S, T]: 0 for keys c > position - window, the lowest number for those before; T valid rows."""
        assert window is not None
        g, name, low = self._g, f"window.{window}", float(np.finfo(self._shape.compute).min)

        def number(suffix: str, value: int) -> str:
            return g.constant(f"{name}.{suffix}", np.array(value, np.int64))

        zero, step = number("zero", 0), number("step", 1)
        offsets = g.op("Range", [zero, g.op("Squeeze", [length], f"{name}.length"), step], f"{name}.offsets")  # [S]
        axes = g.constant(f"{name}.axes", np.array([1, 2, 3], np.int64))
        starts = g.op("Unsqueeze", [STARTS, axes], f"{name}.starts")  # [B, 1, 1, 1]
        column = g.op("Unsqueeze", [offsets, g.constant(f"{name}.last", np.array([-1], np.int64))], f"{name}.column")
        positions = g.op("Add", [starts, column], f"{name}.positions")  # [B, 1, S, 1]
        before = g.op("Sub", [positions, number("width", window)], f"{name}.before")
        keys = g.op("Range", [zero, self._longest_int64, step], f"{name}.keys")  # [T]
        near = g.op("Greater", [keys, before], f"{name}.near")
        shown, hidden = (
            g.constant(f"{name}.{k}", np.array(v, self._shape.compute)) for k, v in (("0", 0), ("low", low))
        )
        return g.op("Where", [near, shown, hidden], name)

    def multiply_table(self, x: str, table: str, name: str) -> str:
        """See Lowering.multiply_table: packed once at load, where a Transpose node would run in every step."""
        made = self._g.op("FusedMatMul", [x, table], name, attrs={"transB": 1}, domain=CONTRIB)
        return self._g.typed(made, self._shape.compute, ["B", "R", self._spec.vocab])

    def silu(self, x: str, name: str, rows: str) -> str:
        """See Lowering.silu: QuickGelu with alpha 1 is SiLU in one pass."""
        made = self._g.op("QuickGelu", [x], name, attrs={"alpha": 1.0}, domain=CONTRIB)
        return self._g.typed(made, self._shape.compute, ["B", rows, self._spec.ffn])

    def gelu(self, x: str, name: str) -> str:
        """See Lowering.gelu."""
        return self._g.op("Gelu", [x], name, attrs={"approximate": "tanh"})
