"""Say what a lowering must offer the graph builder: the parts of a decoder that differ by target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from edge_engines.checkpoint.spec import Float32, ModelSpec, Rotary
from edge_engines.graph.writer import Attribute, GraphWriter

IDS, STARTS, ROWS, LOGITS = "input_ids", "starts", "logit_rows", "logits"
KvScales = Mapping[int, tuple[Float32, Float32]]  # layer -> scales of an INT8 cache: keys [K, D], values [K, D]


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What is fixed when the graph is written."""

    capacity: int  # C
    compute: str  # "float32" or "float16": activations, and the KV cache unless it is INT8
    has_qdq: bool = False  # some unit multiplies in INT8
    kv_scales: KvScales | None = None  # of an INT8 KV cache; None: the cache is float


@dataclass(frozen=True, slots=True)
class Projected:
    """One layer's queries, keys and values before rotary: one fused value, or three."""

    fused: str | None  # [B, S, (H + 2K) * D] when nothing had to be done per head
    q: str = ""  # [B, S, H * D]
    k: str = ""  # [B, S, K * D]
    v: str = ""  # [B, S, K * D]


class Lowering(Protocol):
    """One way to express norms, attention and the KV cache; made anew for each graph with what all layers share."""

    @property
    def opsets(self) -> Mapping[str, int]:
        """Operator sets by domain; final once the graph is begun."""
        ...

    stacks_parts: ClassVar[bool]  # q, k, v as one multiplication, and gate, up: fewer calls where nothing fuses them

    def norm(self, x: str, weight: Float32, name: str) -> str:
        """RMSNorm over the last axis, its inside FP32 (case C28)."""
        ...

    def add_norm(self, x: str, delta: str, weight: Float32, name: str, rows: str) -> tuple[str, str]:
        """Return (x + delta, RMSNorm of it) of values [B, rows, hidden]; the norm's inside is FP32."""
        ...

    def attention(self, qkv: Projected, layer: int) -> str:
        """Rotate, append to the cache, attend; return [B, S, H * D] and declare the layer's cache as in- and output."""
        ...

    def multiply_table(self, x: str, table: str, name: str) -> str:
        """Return x [B, R, hidden] times the transpose of a stored table [V, hidden]: the tied head."""
        ...

    def silu(self, x: str, name: str, rows: str) -> str:
        """x * sigmoid(x) of a value [B, rows, ffn]."""
        ...

    def gelu(self, x: str, name: str) -> str:
        """GELU in its tanh form."""
        ...


def write_norm(g: GraphWriter, x: str, weight: Float32, epsilon: float, compute: str, name: str) -> str:
    """Write an RMSNorm over the last axis whose inside is FP32 whatever the graph computes in (case C28)."""
    gamma = g.constant(f"{name}.weight", weight)
    attrs: dict[str, Attribute] = {"epsilon": epsilon, "axis": -1}
    if compute == "float32":
        return g.op("RMSNormalization", [x, gamma], name, attrs=attrs)
    wide = g.op("RMSNormalization", [g.cast(x, "float32", f"{name}.wide"), gamma], f"{name}.fp32", attrs=attrs)
    return g.cast(wide, compute, name)


def cache_names(layer: int) -> tuple[str, str, str, str]:
    """Return (past key, past value, present key, present value) of a layer: graph inputs and outputs [B, K, C, D]."""
    return (
        f"past_key_values.{layer}.key",
        f"past_key_values.{layer}.value",
        f"present.{layer}.key",
        f"present.{layer}.value",
    )


def new_row_names(layer: int) -> tuple[str, str]:
    """Return (new key rows, new value rows) of a layer: graph outputs [B, K, S, D] of lowerings that write no cache."""
    return f"new.{layer}.key", f"new.{layer}.value"


def cache_shape(spec: ModelSpec, shape: GraphShape) -> list[int | str]:
    """Return the shape of one layer's keys or values."""
    return ["B", spec.num_kv_heads, shape.capacity, spec.head_dim]


def rotary_tables(rotary: Rotary, positions: int) -> tuple[Float32, Float32]:
    """Return cos and sin [positions, rotated dims / 2] of one rotary description, computed in float64."""
    angles = np.outer(np.arange(positions, dtype=np.float64), np.array(rotary.inv_freq, np.float64))
    factor = rotary.attention_factor
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)
