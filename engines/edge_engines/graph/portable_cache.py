"""Say what the portable lowering's KV cache holds: float rows, or INT8 codes of one fixed scale per channel.

Scales of keys are multiplied into the queries, those of values behind the product with them, so codes are only ever
widened. DequantizeLinear does that with scale 1: TensorRT takes no scale per channel for what is not a constant
(NVIDIA/TensorRT#4008), and widens INT8 in no other way.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.graph.lowering import GraphShape, cache_names, cache_shape, new_row_names
from edge_engines.graph.writer import GraphWriter
from edge_engines.qdq.codes import MAX_CODE

KEY, VALUE = 0, 1


class Cache(Protocol):
    """How rows are stored and read back. Attention reads new rows as later steps will."""

    def append(self, rows: str, layer: int, which: int) -> tuple[str, str]:
        """Declare the past [B, K, C, D] as input and the new rows [B, K, S, D], made of `rows` [B, S, K, D], as output.

        Return both as attention reads them, in its type; from an INT8 cache that is codes.
        """
        ...

    def query_factor(self, layer: int) -> str:
        """Return the constant that queries [B, K, rows, D] are multiplied with, the scale of the scores included."""
        ...

    def rescale(self, mixed: str, layer: int) -> str:
        """Return what attention has read of the values, [B, K, rows, D], in their own unit."""
        ...


class FloatCache:
    """Rows as they were computed. See Cache."""

    def __init__(self, g: GraphWriter, spec: ModelSpec, shape: GraphShape, scores: str) -> None:
        """`scores` is the type of queries, keys and their products."""
        self._g, self._spec, self._shape, self._scores = g, spec, shape, scores

    def append(self, rows: str, layer: int, which: int) -> tuple[str, str]:
        """See Cache.append."""
        g, dtype = self._g, self._shape.compute
        past, new = cache_names(layer)[which], new_row_names(layer)[which]
        g.input(past, dtype, cache_shape(self._spec, self._shape))
        g.op("Transpose", [rows], new, attrs={"perm": [0, 2, 1, 3]})
        g.output(new, dtype, new_rows_shape(self._spec))
        if which == VALUE or self._scores == dtype:
            return past, new
        return g.cast(past, self._scores, f"{past}.wide"), g.cast(new, self._scores, f"{new}.wide")

    def query_factor(self, layer: int) -> str:
        """See Cache.query_factor."""
        return self._g.shared("scale", np.array(self._spec.scale, self._scores))

    def rescale(self, mixed: str, layer: int) -> str:
        """See Cache.rescale."""
        return mixed


class Int8Cache:
    """Codes -127..127, zero point 0 (case C16). See Cache."""

    def __init__(self, g: GraphWriter, spec: ModelSpec, shape: GraphShape, scores: str) -> None:
        """`scores` is the type of queries, keys and their products."""
        assert shape.kv_scales is not None
        self._g, self._spec, self._shape = g, spec, shape
        self._read_as = (scores, shape.compute)
        self._scales = {  # [K, 1, D]
            layer: (keys[:, None], values[:, None]) for layer, (keys, values) in shape.kv_scales.items()
        }
        self._zero = g.constant("kv.zero", np.array(0, np.int8))

    def append(self, rows: str, layer: int, which: int) -> tuple[str, str]:
        """See Cache.append."""
        g, dtype = self._g, self._shape.compute
        past, new = cache_names(layer)[which], new_row_names(layer)[which]
        g.input(past, "int8", cache_shape(self._spec, self._shape))
        turned = g.op("Transpose", [rows], f"{new}.rows", attrs={"perm": [0, 2, 1, 3]})
        scales = g.constant(f"{new}.scales", self._scales[layer][which].astype(dtype))
        scaled = g.op("Div", [turned, scales], f"{new}.scaled")
        # QuantizeLinear alone would use -128 too.
        limits = [g.shared(f"kv.{n}", np.array(v, dtype)) for n, v in (("least", -MAX_CODE), ("most", MAX_CODE))]
        clipped = g.op("Clip", [scaled, *limits], f"{new}.clipped")
        g.op("QuantizeLinear", [clipped, self._one(dtype), self._zero], new)
        g.output(new, "int8", new_rows_shape(self._spec))
        return self._widen(past, which), self._widen(new, which)

    def query_factor(self, layer: int) -> str:
        """See Cache.query_factor."""
        factor = self._scales[layer][KEY] * np.float32(self._spec.scale)
        return self._g.constant(f"layers.{layer}.query_factor", factor.astype(self._read_as[KEY]))

    def rescale(self, mixed: str, layer: int) -> str:
        """See Cache.rescale."""
        return self._g.op("Mul", [mixed, f"{new_row_names(layer)[VALUE]}.scales"], f"{mixed}.rescaled")

    def _widen(self, codes: str, which: int) -> str:
        one = self._one(self._read_as[which])
        return self._g.op("DequantizeLinear", [codes, one, self._zero], f"{codes}.wide")

    def _one(self, dtype: str) -> str:
        return self._g.shared(f"kv.one.{dtype}", np.array(1, dtype))


def new_rows_shape(spec: ModelSpec) -> list[int | str]:
    """Return the shape of one layer's new keys or values."""
    return ["B", spec.num_kv_heads, "S", spec.head_dim]
