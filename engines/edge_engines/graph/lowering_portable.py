"""Lower a decoder to operators that every runtime has: TensorRT 10.3, older ONNX Runtimes; the home of INT8 KV caches.

The cache is a plain input that is never written. The graph gives the rows of this step, `new.{i}.key` and
`new.{i}.value` [B, K, S, D], and the session writes them into its buffers at each slot's start. Queries meet past and
new keys in two products under one masked softmax.

What the cache holds is told by portable_cache.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from edge_engines.checkpoint.spec import Float32, ModelSpec, Rotary
from edge_engines.graph.lowering import IDS, STARTS, GraphShape, Projected, rotary_tables
from edge_engines.graph.portable_cache import KEY, VALUE, Cache, FloatCache, Int8Cache
from edge_engines.graph.writer import Attribute, GraphWriter

OPSET = 17
OPSET_OF_FP16_SCALES = 19  # QuantizeLinear and DequantizeLinear read FP32 scales only before
FAR = 2**30  # position of a cache row that holds nothing: behind every query
END = 2**63 - 1


class PortableLowering:
    """See Lowering."""

    stacks_parts: ClassVar[bool] = False

    def __init__(self, g: GraphWriter, spec: ModelSpec, shape: GraphShape) -> None:
        """Write what all layers share: positions, one mask per distinct window, rotary rows of this step."""
        self._g, self._spec, self._shape = g, spec, shape
        self._group = spec.num_heads // spec.num_kv_heads  # G query heads share a kv head
        self._scores = "float32" if spec.scores_fp32 else shape.compute
        needs_fp16_scales = shape.compute == "float16" and (shape.has_qdq or shape.kv_scales is not None)
        self._opset = OPSET_OF_FP16_SCALES if needs_fp16_scales else OPSET
        form = FloatCache if shape.kv_scales is None else Int8Cache
        self._cache: Cache = form(g, spec, shape, self._scores)
        starts = g.op("Unsqueeze", [STARTS, g.constant("axis_1", np.array([1], np.int64))], "starts_column")  # [B, 1]
        self._positions = self._write_positions(starts)  # [B, S]
        self._masks = self._write_masks(starts)
        self._tables = [self._write_rotary(rotary, f"rotary.{i}") for i, rotary in enumerate(spec.rotaries)]

    @property
    def opsets(self) -> Mapping[str, int]:
        """See Lowering.opsets."""
        return {"": self._opset}

    def norm(self, x: str, weight: Float32, name: str) -> str:
        """See Lowering.norm."""
        g, is_wide = self._g, self._shape.compute == "float32"
        x = x if is_wide else g.cast(x, "float32", f"{name}.wide")
        square = g.op("Pow", [x, g.shared("two", np.array(2, np.float32))], f"{name}.square")
        mean = self._mean(square, f"{name}.mean")
        epsilon = g.shared("norm_epsilon", np.array(self._spec.norm_eps, np.float32))
        root = g.op("Sqrt", [g.op("Add", [mean, epsilon], f"{name}.positive")], f"{name}.root")
        scaled = [g.op("Div", [x, root], f"{name}.scaled"), g.constant(f"{name}.weight", weight)]
        if is_wide:
            return g.op("Mul", scaled, name)
        return g.cast(g.op("Mul", scaled, f"{name}.fp32"), self._shape.compute, name)

    def add_norm(self, x: str, delta: str, weight: Float32, name: str, rows: str) -> tuple[str, str]:
        """See Lowering.add_norm."""
        total = self._g.op("Add", [x, delta], f"{name}.sum")
        return total, self.norm(total, weight, name)

    def attention(self, qkv: Projected, layer: int) -> str:
        """See Lowering.attention."""
        g, spec, name = self._g, self._spec, f"layers.{layer}.attention"
        q = self._rotated(qkv.q, spec.num_heads, layer, f"{name}.q")  # [B, S, H, D]
        k = self._rotated(qkv.k, spec.num_kv_heads, layer, f"{name}.k")
        v = self._by_head(qkv.v, spec.num_kv_heads, f"{name}.v")
        past_k, new_k = self._cache.append(k, layer, KEY)
        past_v, new_v = self._cache.append(v, layer, VALUE)
        of_past, of_new = self._shares(self._grouped(q, layer, name), past_k, new_k, layer, name)
        past = g.op("MatMul", [of_past, past_v], f"{name}.past_mixed")  # [B, K, G * S, D]
        new = g.op("MatMul", [of_new, new_v], f"{name}.new_mixed")
        mixed = self._cache.rescale(g.op("Add", [past, new], f"{name}.mixed"), layer)
        by_group = np.array([0, spec.num_kv_heads, self._group, -1, spec.head_dim], np.int64)
        heads = g.op("Reshape", [mixed, g.shared("mixed_by_group", by_group)], f"{name}.heads")  # [B, K, G, S, D]
        rows = g.op("Transpose", [heads], f"{name}.rows", attrs={"perm": [0, 3, 1, 2, 4]})
        merged = np.array([0, 0, spec.num_heads * spec.head_dim], np.int64)
        return g.op("Reshape", [rows, g.shared("merged_heads", merged)], name)

    def multiply_table(self, x: str, table: str, name: str) -> str:
        """See Lowering.multiply_table: runtimes fold the transpose of a constant when they load."""
        turned = self._g.op("Transpose", [table], "head.weight", attrs={"perm": [1, 0]})
        return self._g.op("MatMul", [x, turned], name)

    def silu(self, x: str, name: str, rows: str) -> str:
        """See Lowering.silu."""
        return self._g.op("Mul", [x, self._g.op("Sigmoid", [x], f"{name}.sigmoid")], name)

    def gelu(self, x: str, name: str) -> str:
        """See Lowering.gelu: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x³))).

        x³ may overflow FP16: tanh of an infinity is 1 or -1, which is right.
        """
        g = self._g

        def number(value: float, called: str) -> str:
            return g.shared(f"gelu.{called}", np.array(value, self._shape.compute))

        cube = g.op("Mul", [g.op("Mul", [x, x], f"{name}.square"), x], f"{name}.cube")
        third = g.op("Mul", [cube, number(0.044715, "third")], f"{name}.third")
        inner = g.op("Add", [x, third], f"{name}.inner")
        angle = g.op("Mul", [inner, number((2 / np.pi) ** 0.5, "inner")], f"{name}.angle")
        twice = g.op("Add", [g.op("Tanh", [angle], f"{name}.tanh"), number(1, "one")], f"{name}.twice")
        return g.op("Mul", [x, g.op("Mul", [twice, number(0.5, "half")], f"{name}.share")], name)

    def _write_positions(self, starts: str) -> str:
        g = self._g
        zero, one = (g.constant(n, np.array(i, np.int64)) for i, n in enumerate(("zero", "one")))
        length = g.op("Gather", [g.op("Shape", [IDS], "ids_shape"), one], "num_new_rows")  # scalar S
        return g.op("Add", [starts, g.op("Range", [zero, length, one], "offsets")], "positions")

    def _write_masks(self, starts: str) -> dict[int | None, str]:
        """Return by window bool [B, 1, G * S, C + S]: which keys, past ones first, does each query see?

        The key at position c is visible from position p when p - window < c <= p.
        """
        g, spec = self._g, self._spec
        rows = g.constant("cache_rows", np.arange(self._shape.capacity, dtype=np.int64))  # [C]
        is_valid = g.op("Less", [rows, starts], "is_past")  # [B, C]
        past = g.op("Where", [is_valid, rows, g.constant("far", np.array(FAR, np.int64))], "past_positions")
        keys = g.op("Concat", [past, self._positions], "key_positions_2d", attrs={"axis": 1})  # [B, C + S]
        keys = g.op("Unsqueeze", [keys, g.constant("axes_1_2", np.array([1, 2], np.int64))], "key_positions")
        repeats = g.constant("group_repeats", np.array([1, self._group], np.int64))
        queries = g.op("Tile", [self._positions, repeats], "query_positions_2d")  # [B, G * S]
        queries = g.op("Unsqueeze", [queries, g.constant("axes_1_3", np.array([1, 3], np.int64))], "query_positions")
        causal = g.op("LessOrEqual", [keys, queries], "mask.full")
        masks: dict[int | None, str] = {}
        for window in {layer.window for layer in spec.layers}:
            masks[window] = causal if window is None else self._write_window(window, causal, keys, queries)
        return masks

    def _write_window(self, window: int, causal: str, keys: str, queries: str) -> str:
        g, name = self._g, f"mask.{window}"
        before = g.op("Sub", [queries, g.constant(f"{name}.width", np.array(window, np.int64))], f"{name}.before")
        return g.op("And", [causal, g.op("Greater", [keys, before], f"{name}.near")], name)

    def _write_rotary(self, rotary: Rotary, name: str) -> tuple[str, str]:
        """Return cos and sin [B, S, 1, D] for x * cos + swapped(x) * sin; dims that are not rotated get 1 and 0."""
        g = self._g
        cos, sin = rotary_tables(rotary, self._shape.capacity)  # [C, dims / 2]
        rest = np.ones((self._shape.capacity, self._spec.head_dim - rotary.dim), np.float32)
        wide = {"cos": np.concatenate([cos, cos, rest], axis=1), "sin": np.concatenate([-sin, sin, 0 * rest], axis=1)}
        axis = g.shared("axis_2", np.array([2], np.int64))
        made = []
        for kind, table in wide.items():
            stored = g.constant(f"{name}.{kind}", table.astype(self._shape.compute))
            rows = g.op("Gather", [stored, self._positions], f"{name}.{kind}_of_positions")  # [B, S, D]
            made.append(g.op("Unsqueeze", [rows, axis], f"{name}.{kind}_rows"))
        return made[0], made[1]

    def _rotated(self, x: str, heads: int, layer: int, name: str) -> str:
        """Reshape [B, S, heads * D] to [B, S, heads, D] and rotate the first dims of each head."""
        g, index, head_dim = self._g, self._spec.layers[layer].rotary, self._spec.head_dim
        cos, sin = self._tables[index]
        dims = self._spec.rotaries[index].dim
        sizes = [dims // 2, dims // 2] + ([head_dim - dims] if dims < head_dim else [])
        x = self._by_head(x, heads, name)
        parts = [f"{name}.{part}" for part in ("first", "second", "rest")[: len(sizes)]]
        stored = g.shared(f"rotary.{index}.sizes", np.array(sizes, np.int64))
        g.op("Split", [x, stored], f"{name}.split", outputs=parts, attrs={"axis": 3})
        swapped = g.op("Concat", [parts[1], parts[0], *parts[2:]], f"{name}.swapped", attrs={"axis": 3})
        terms = g.op("Mul", [x, cos], f"{name}.straight"), g.op("Mul", [swapped, sin], f"{name}.crossed")
        return g.op("Add", terms, f"{name}.rotated")

    def _by_head(self, x: str, heads: int, name: str) -> str:
        shape = self._g.shared(f"heads.{heads}", np.array([0, 0, heads, self._spec.head_dim], np.int64))
        return self._g.op("Reshape", [x, shape], f"{name}.by_head")

    def _grouped(self, q: str, layer: int, name: str) -> str:
        """Return scaled queries [B, K, G * S, D] of q [B, S, H, D]: heads that share keys are rows of one product."""
        g, spec, kv_heads = self._g, self._spec, self._spec.num_kv_heads
        by_group = np.array([0, 0, kv_heads, self._group, spec.head_dim], np.int64)
        q = g.op("Reshape", [q, g.shared("q_by_group", by_group)], f"{name}.q_by_group")
        q = g.op("Transpose", [q], f"{name}.q_turned", attrs={"perm": [0, 2, 3, 1, 4]})  # [B, K, G, S, D]
        rows = np.array([0, kv_heads, -1, spec.head_dim], np.int64)
        q = g.op("Reshape", [q, g.shared("q_rows", rows)], f"{name}.q_rows")
        if self._scores != self._shape.compute:
            q = g.cast(q, self._scores, f"{name}.q_fp32")
        return g.op("Mul", [q, self._cache.query_factor(layer)], f"{name}.q_scaled")

    def _shares(self, q: str, past: str, new: str, layer: int, name: str) -> tuple[str, str]:
        """Return what each query takes of the past and of the new values, one softmax over both."""
        g, capacity = self._g, self._shape.capacity
        products = []
        for part, keys in (("past", past), ("new", new)):
            turned = g.op("Transpose", [keys], f"{name}.{part}_k_turned", attrs={"perm": [0, 1, 3, 2]})
            products.append(g.op("MatMul", [q, turned], f"{name}.{part}_scores"))
        scores = g.op("Concat", products, f"{name}.scores", attrs={"axis": 3})  # [B, K, G * S, C + S]
        low = g.shared("hidden_score", np.array(np.finfo(self._scores).min, self._scores))
        masked = g.op("Where", [self._masks[self._spec.layers[layer].window], scores, low], f"{name}.masked")
        shares = g.op("Softmax", [masked], f"{name}.shares", attrs={"axis": 3})
        if self._scores != self._shape.compute:
            shares = g.cast(shares, self._shape.compute, f"{name}.shares_fp16")
        bounds = [g.shared(f"bound.{b}", np.array([v], np.int64)) for b, v in (("0", 0), ("C", capacity), ("end", END))]
        axis = g.shared("axis_3", np.array([3], np.int64))
        of_past = g.op("Slice", [shares, bounds[0], bounds[1], axis], f"{name}.past_shares")
        return of_past, g.op("Slice", [shares, bounds[1], bounds[2], axis], f"{name}.new_shares")

    def _mean(self, x: str, name: str) -> str:
        """Mean over the last axis, which is an attribute up to opset 17 and an input from 18 on."""
        if self._opset > OPSET:
            axes = self._g.shared("norm_axes", np.array([-1], np.int64))
            return self._g.op("ReduceMean", [x, axes], name)
        attrs: dict[str, Attribute] = {"axes": [-1]}
        return self._g.op("ReduceMean", [x], name, attrs=attrs)
