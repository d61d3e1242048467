"""Count the bytes of every weight of an engine, by unit and precision, from its description alone.

Mirrors what the graph builder stores, in its order: a test builds engines and compares the files. Norms are FP32
everywhere, biases and rotary tables in the type that the graph computes in. Constants of a few bytes (shapes, input
scales) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.graph import linear
from edge_engines.graph.linear import BLOCK_BITS, block_size

Form = linear.Form
Part = Literal["embedding", "head", "embedding and head", "body", "norms and tables"]
FLOAT_BYTES = {"fp32": 4, "fp16": 2}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of an engine are stored."""

    precision: Form
    compute: Literal["fp32", "fp16"]  # type of activations, of biases, and of units that precision int8 leaves in float
    int8: frozenset[str] | None = None  # units in INT8 where the precision is int8; None = all
    shares_int8_table: bool = True  # embedding and head read one INT8 table: only ONNX Runtime's operators can
    forms: Mapping[str, Form] | None = None  # of every unit, where each has its own; goes before the precision

    def form(self, unit: str, width: int) -> Form:
        """Return how a unit whose weights have `width` inputs is stored."""
        if self.forms is not None:
            return self.forms[unit]
        if self.precision in BLOCK_BITS:
            return self.precision if block_size(width, BLOCK_BITS[self.precision]) else self.compute
        if self.precision == "int8":
            return "int8" if self.int8 is None or unit in self.int8 else self.compute
        return self.precision


@dataclass(frozen=True, slots=True)
class Stored:
    """A unit, a norm or a table of an engine."""

    name: str  # "embed", "layers.0.qkv", "layers.0.attn_norm", "rotary.0"
    part: Part
    form: Form
    arrays: tuple[int, ...]  # bytes of each array, in the order they are written
    is_looked_up: bool = False  # a step reads a row of it by token, not the whole

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(self.arrays)


def array_bytes(rows: int, width: int, form: Form, compute: str) -> tuple[int, ...]:
    """Return the bytes of the arrays that hold a weight [rows, width]: what each precision costs.

    fp32, fp16: the numbers. w8, w4: one byte or half a byte per weight, and an FP32 scale per block of inputs. int8:
    one byte per weight, and a scale of type `compute` per row, which is an output channel or a row of the table.
    """
    if form in BLOCK_BITS:
        size = block_size(width, BLOCK_BITS[form])
        assert size is not None, width
        return rows * width * BLOCK_BITS[form] // 8, 4 * rows * (width // size)
    if form == "int8":
        return rows * width, FLOAT_BYTES[compute] * rows
    return (FLOAT_BYTES[form] * rows * width,)


def list_stored(spec: ModelSpec, scheme: Scheme, capacity: int) -> Iterator[Stored]:
    """Yield all that an engine with `capacity` KV rows stores; `spec` is as lowered for the target (padded heads)."""
    for i, rotary in enumerate(spec.rotaries):
        table = FLOAT_BYTES[scheme.compute] * capacity * (rotary.dim // 2)
        yield Stored(f"rotary.{i}", "norms and tables", scheme.compute, (table, table), is_looked_up=True)
    yield from _embedding(spec, scheme)
    for i in range(len(spec.layers)):
        yield from _layer(spec, scheme, f"layers.{i}")
    yield _norm("norm", spec.hidden)
    if not spec.tied_head:
        yield _unit("head", "head", scheme, spec.vocab, spec.hidden)


def kv_bytes(spec: ModelSpec, batch: int, capacity: int, bytes_per_number: int) -> int:
    """Return the bytes of the KV buffers, 2 * L * K * D * B * C * bytes; scales of an INT8 cache are some kilobytes."""
    return 2 * len(spec.layers) * spec.num_kv_heads * spec.head_dim * batch * capacity * bytes_per_number


def _embedding(spec: ModelSpec, scheme: Scheme) -> Iterator[Stored]:
    """Yield the table. A tied one is stored once; in INT8 with the factors [hidden] that lie between its two uses."""
    if not spec.tied_head:
        table = _unit("embed", "embedding", scheme, spec.vocab, spec.hidden)
        yield Stored(table.name, table.part, table.form, table.arrays, is_looked_up=True)
        return
    form = scheme.form("head", spec.hidden)
    arrays = array_bytes(spec.vocab, spec.hidden, form, scheme.compute)
    if form == "int8":
        arrays += (FLOAT_BYTES[scheme.compute] * spec.hidden,)
    yield Stored("embed", "embedding and head", form, arrays)
    if form == "int8" and not scheme.shares_int8_table:
        yield Stored("embed.packed", "embedding", "int8", (spec.vocab * spec.hidden,), is_looked_up=True)


def _layer(spec: ModelSpec, scheme: Scheme, at: str) -> Iterator[Stored]:
    hidden, q, kv = spec.hidden, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield _norm(f"{at}.attn_norm", hidden)
    yield _unit(f"{at}.qkv", "body", scheme, q + 2 * kv, hidden, has_bias=spec.qkv_bias)
    if spec.qk_norm:
        yield _norm(f"{at}.q_norm", spec.head_dim)
        yield _norm(f"{at}.k_norm", spec.head_dim)
    yield _unit(f"{at}.o", "body", scheme, hidden, q, has_bias=spec.o_bias)
    if spec.post_norms:
        yield _norm(f"{at}.post_attn_norm", hidden)
    yield _norm(f"{at}.mlp_norm", hidden)
    yield _unit(f"{at}.gate_up", "body", scheme, 2 * spec.ffn, hidden, has_bias=spec.mlp_bias)
    yield _unit(f"{at}.down", "body", scheme, hidden, spec.ffn, has_bias=spec.mlp_bias)
    if spec.post_norms:
        yield _norm(f"{at}.post_mlp_norm", hidden)


def _unit(name: str, part: Part, scheme: Scheme, rows: int, width: int, *, has_bias: bool = False) -> Stored:
    form = scheme.form(name, width)
    bias = (FLOAT_BYTES[scheme.compute] * rows,) if has_bias else ()
    return Stored(name, part, form, array_bytes(rows, width, form, scheme.compute) + bias)


def _norm(name: str, width: int) -> Stored:
    return Stored(name, "norms and tables", "fp32", (4 * width,))
