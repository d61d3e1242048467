"""Write the embedding and the head; where the model ties them, one stored table serves both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import numpy as np

from edge_engines.checkpoint.spec import Float32
from edge_engines.graph.linear import (
    BLOCK_BITS,
    ZERO_POINT,
    FusedInt8Linear,
    LinearForm,
    QdqLinear,
    matmul_blocks,
    quantize_blocks,
    store_blocks,
    store_int8,
)
from edge_engines.graph.writer import GraphWriter
from edge_engines.qdq.codes import to_codes
from edge_engines.sensitivity.int8 import weight_scales

Read = Callable[[str], Float32]  # canonical tensor name -> tensor
Embedding = Literal["float", "w8", "w4", "int8", "packed"]  # packed: int8 where a graph can't look INT8 constants up
PACKED = 4  # codes to a word; hidden must be a multiple
_WORD_OFFSET = 1 << 31


class Table(Protocol):
    """The two ends of a decoder. `embed` is written first."""

    def embed(self, ids: str, name: str) -> str:
        """Look ids [B, S] up; return [B, S, hidden]."""
        ...

    def multiply(self, x: str, name: str) -> str:
        """Return the logits [B, R, V] of x [B, R, hidden]."""
        ...


class FloatTable:
    """A tied float table; how it is read transposed is the lowering's to say."""

    def __init__(
        self, g: GraphWriter, table: Float32, compute: str, multiply_table: Callable[[str, str, str], str]
    ) -> None:
        self._g, self._multiply_table = g, multiply_table
        self._weight = g.constant("embed.weight", table.astype(compute))

    def embed(self, ids: str, name: str) -> str:
        """See Table.embed."""
        return self._g.op("Gather", [self._weight, ids], name)

    def multiply(self, x: str, name: str) -> str:
        """See Table.multiply."""
        return self._multiply_table(x, self._weight, name)


class BlockTable:
    """A tied table in 8 or 4 bits by block."""

    def __init__(self, g: GraphWriter, table: Float32, size: int, bits: int = 8) -> None:
        self._g = g
        self._stored = store_blocks(g, quantize_blocks(table, size, bits), "embed")

    def embed(self, ids: str, name: str) -> str:
        """See Table.embed."""
        g, (_, blocks, size) = self._g, self._stored.shape
        rows = g.op("Gather", [self._stored.codes, ids], f"{name}.codes_of_ids")  # [B, S, blocks, stored bytes]
        if self._stored.bits == 4:
            rows = self._unpack(rows, name)
        zero = g.constant(f"{name}.zero", np.array(1 << (self._stored.bits - 1), np.float32))
        centred = g.op("Sub", [g.cast(rows, "float32", f"{name}.codes_fp32"), zero], f"{name}.centred")
        scales = g.op("Gather", [self._stored.scales, ids], f"{name}.scales_of_ids")  # [B, S, blocks]
        scales = g.op("Unsqueeze", [scales, g.constant(f"{name}.last", np.array([-1]))], f"{name}.scales_4d")
        product = g.op("Mul", [centred, scales], f"{name}.scaled")
        return g.op("Reshape", [product, g.constant(f"{name}.shape", np.array([0, 0, blocks * size]))], name)

    def multiply(self, x: str, name: str) -> str:
        """See Table.multiply."""
        return matmul_blocks(self._g, x, self._stored, name)

    def _unpack(self, rows: str, name: str) -> str:
        """Return [B, S, blocks, block size], one code to a byte, of rows with two: the low one stands first."""
        g, (_, blocks, size) = self._g, self._stored.shape
        mask, four = (g.constant(f"{name}.{n}", np.array(v, np.uint8)) for n, v in (("mask", 15), ("four", 4)))
        low = g.op("BitwiseAnd", [rows, mask], f"{name}.low")
        high = g.op("BitShift", [rows, four], f"{name}.high", attrs={"direction": "RIGHT"})
        axis = g.constant(f"{name}.pair_axis", np.array([4]))
        parts = [g.op("Unsqueeze", [part, axis], f"{part}_5d") for part in (low, high)]
        pairs = g.op("Concat", parts, f"{name}.pairs", attrs={"axis": 4})  # [B, S, blocks, block size / 2, 2]
        shape = g.constant(f"{name}.unpacked_shape", np.array([0, 0, blocks, size]))
        return g.op("Reshape", [pairs, shape], f"{name}.unpacked")


class Int8Table:
    """A tied table in INT8 by row: codes of table x `factors`, which is what the head multiplies with.

    The embedding undoes the factors that smoothing has put into the head. ONNX Runtime reads both from one constant;
    TensorRT takes the head's codes in no other place, so there the embedding has them again, packed.
    """

    def __init__(
        self, g: GraphWriter, head: Float32, factors: Float32, form: FusedInt8Linear | QdqLinear, compute: str
    ) -> None:
        """`head` [V, hidden] has the factors [hidden] folded in; `form` says how the head multiplies."""
        self._g, self._form, self._compute = g, form, compute
        self._inverse = (1 / factors).astype(compute)
        self._codes, self._scales = store_int8(g, head, "table", compute)  # [hidden, V], [V]
        self._packed = None if isinstance(form, FusedInt8Linear) else store_packed(g, head, "embed.packed")

    def embed(self, ids: str, name: str) -> str:
        """See Table.embed."""
        g = self._g
        if self._packed is None:
            columns = g.op("Gather", [self._codes, ids], f"{name}.codes", attrs={"axis": 1})  # [hidden, B, S]
            turned = g.op("Transpose", [columns], f"{name}.rows", attrs={"perm": [1, 2, 0]})
            rows = g.cast(turned, self._compute, f"{name}.widened")
        else:
            rows = unpack_rows(g, self._packed, ids, self._compute, name)
        scaled = scale_rows(g, rows, self._scales, ids, f"{name}.scaled")
        return g.op("Mul", [scaled, g.constant(f"{name}.inverse", self._inverse)], name)

    def multiply(self, x: str, name: str) -> str:
        """See Table.multiply."""
        read = self._form.read(self._g, x)
        return self._form.multiply_stored(self._g, read, self._codes, self._scales, name)


class TwoTables:
    """An embedding and a head of their own. Each is read when it is written, so only one is in memory."""

    def __init__(
        self, g: GraphWriter, read: Read, embedding: Embedding, head: LinearForm, compute: str, block: int | None
    ) -> None:
        """`block` is the block size of an embedding in w8 or w4."""
        self._g, self._read, self._embedding, self._head = g, read, embedding, head
        self._compute, self._block = compute, block

    def embed(self, ids: str, name: str) -> str:
        """See Table.embed."""
        g, table = self._g, self._read("embed")
        if self._embedding == "float":
            return g.op("Gather", [g.constant(f"{name}.weight", table.astype(self._compute)), ids], name)
        if self._embedding in BLOCK_BITS:
            assert self._block is not None
            return BlockTable(g, table, self._block, BLOCK_BITS[self._embedding]).embed(ids, name)
        scales = weight_scales(table)
        stored = g.constant(f"{name}.scales", scales.astype(self._compute))
        if self._embedding == "packed":
            rows = unpack_rows(g, store_packed(g, table, f"{name}.packed"), ids, self._compute, name)
        else:
            codes = g.constant(f"{name}.codes", to_codes(table, scales[:, None]))  # [V, hidden]
            rows = g.cast(g.op("Gather", [codes, ids], f"{name}.rows"), self._compute, f"{name}.widened")
        return scale_rows(g, rows, stored, ids, name)

    def multiply(self, x: str, name: str) -> str:
        """See Table.multiply."""
        read = self._head.read(self._g, x)
        return self._head.multiply(self._g, read, self._read("head"), name)


def scale_rows(g: GraphWriter, rows: str, scales: str, ids: str, name: str) -> str:
    """Return rows of codes [B, S, hidden], as floats, times the scales [V] of their ids."""
    of_ids = g.op("Gather", [scales, ids], f"{name}.scales_of_ids")  # [B, S]
    return g.op("Mul", [rows, g.op("Unsqueeze", [of_ids, "last_axis"], f"{name}.scales_column")], name)


def store_packed(g: GraphWriter, table: Float32, name: str) -> str:
    """Store the int8 codes of a table [V, hidden] four to an INT32 [V, hidden / 4]; return its name.

    TensorRT allows an INT8 constant only before Dequantize, and dequantising the whole table in every step would move
    more bytes than the head does. Part i of a row of codes + 128 is byte i of its words, less 2^31.
    """
    codes = to_codes(table, weight_scales(table)[:, None]).astype(np.int64) + ZERO_POINT
    parts = codes.reshape(len(codes), PACKED, -1)
    words = np.zeros((len(codes), parts.shape[2]), np.int64)
    for i in range(PACKED):
        words += parts[:, i] << (8 * i)
    return g.constant(name, (words - _WORD_OFFSET).astype(np.int32))


def unpack_rows(g: GraphWriter, packed: str, ids: str, compute: str, name: str) -> str:
    """Return the codes [B, S, hidden] of ids as floats."""
    byte = g.constant(f"{name}.byte", np.array(256, np.int64))
    offset = g.constant(f"{name}.offset", np.array(_WORD_OFFSET, np.int64))
    words = g.cast(g.op("Gather", [packed, ids], f"{name}.words"), "int64", f"{name}.words_int64")
    rest, parts = g.op("Add", [words, offset], f"{name}.rest_0"), []
    for i in range(PACKED):
        above = g.op("Div", [rest, byte], f"{name}.rest_{i + 1}")
        shifted = g.op("Mul", [above, byte], f"{name}.shifted_{i}")
        parts.append(g.op("Sub", [rest, shifted], f"{name}.part_{i}"))
        rest = above
    row = g.op("Concat", parts, f"{name}.unsigned", attrs={"axis": -1})
    zero = g.constant(f"{name}.zero", np.array(ZERO_POINT, compute))
    return g.op("Sub", [g.cast(row, compute, f"{name}.widened"), zero], f"{name}.unpacked")
