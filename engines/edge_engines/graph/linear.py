"""Say how a unit multiplies: float, weights by block, INT8 for ONNX Runtime, or INT8 as Q/DQ for TensorRT.

A unit is what is decided as one (qkv, o, gate_up, down, head); its weights read one input.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import Float32
from edge_engines.graph.writer import Attribute, GraphWriter
from edge_engines.qdq.codes import to_codes
from edge_engines.sensitivity.int8 import weight_scales

Precision = Literal["fp32", "fp16", "w8", "int8", "auto"]
Form = Literal["fp32", "fp16", "w8", "int8", "w4"]  # of one unit; a float one is of the type the graph computes in
CONTRIB = "com.microsoft"
BLOCK_SIZES = (64, 32, 128, 16)  # 64 keeps SmolLM2's near-tied first tokens in order, 32 flips them (graphs.md)
# Of 4-bit weights. Blocks of 16 err 12 % less for 20 % more bytes, blocks of 64 11 % more for 10 % fewer (measured on
# normally distributed weights): 64 would put about half the units of SmolLM2 above an error of 0.1.
BLOCK_SIZES_4 = (32, 16)
BLOCK_BITS = MappingProxyType({"w8": 8, "w4": 4})
ZERO_POINT = 128  # of uint8 codes: what MatMulNBits assumes, and where ours are centred


class LinearForm(Protocol):
    """How one unit multiplies."""

    def read(self, g: GraphWriter, x: str) -> str:
        """Return the unit's input x [B, S, K] as its weights want it: quantised once, however many they are."""
        ...

    def multiply(self, g: GraphWriter, x: str, weight: Float32, name: str, bias: Float32 | None = None) -> str:
        """Multiply a read input with a weight [N, K] and add a bias [N]; return the value [B, S, N]."""
        ...


@dataclass(frozen=True, slots=True)
class FloatLinear:
    """A plain MatMul."""

    compute: str  # "float32" or "float16"

    def read(self, g: GraphWriter, x: str) -> str:
        """See LinearForm.read."""
        return x

    def multiply(self, g: GraphWriter, x: str, weight: Float32, name: str, bias: Float32 | None = None) -> str:
        """See LinearForm.multiply."""
        product = g.op("MatMul", [x, g.constant(f"{name}.weight", weight.T.astype(self.compute))], name)
        return _add_bias(g, product, bias, self.compute)


@dataclass(frozen=True, slots=True)
class BlockLinear:
    """MatMulNBits: weights in 8 or 4 bits by block, activations in INT8 by block in each step; ONNX Runtime only."""

    size: int
    bits: int = 8

    def read(self, g: GraphWriter, x: str) -> str:
        """See LinearForm.read."""
        return x

    def multiply(self, g: GraphWriter, x: str, weight: Float32, name: str, bias: Float32 | None = None) -> str:
        """See LinearForm.multiply."""
        stored = store_blocks(g, quantize_blocks(weight, self.size, self.bits), name)
        return matmul_blocks(g, x, stored, name, "" if bias is None else g.constant(f"{name}.bias", bias))


@dataclass(frozen=True, slots=True)
class FusedInt8Linear:
    """INT8 on both sides for ONNX Runtime, in its fused form: the product leaves as float, bias included.

    Activations are uint8 centred at 128: kernels for signed ones are about 10 times slower on x86 (measured).
    """

    unit: str
    scale: float  # of the input

    def read(self, g: GraphWriter, x: str) -> str:
        """See LinearForm.read."""
        scale = g.constant(f"{self.unit}.input_scale", np.array(self.scale, np.float32))
        zero = g.shared("int8.zero", np.array(ZERO_POINT, np.uint8))
        # The contrib form: ONNX Runtime 1.23 has no kernel for that of opset 23.
        return g.op("QuantizeLinear", [x, scale, zero], f"{self.unit}.input", domain=CONTRIB)

    def multiply(self, g: GraphWriter, x: str, weight: Float32, name: str, bias: Float32 | None = None) -> str:
        """See LinearForm.multiply."""
        return self.multiply_stored(g, x, *store_int8(g, weight, name, "float32"), name, bias)

    def multiply_stored(
        self, g: GraphWriter, x: str, codes: str, scales: str, name: str, bias: Float32 | None = None
    ) -> str:
        """Multiply with codes [K, N] and scales [N] that are constants already."""
        inputs = [x, codes, f"{self.unit}.input_scale", scales, "int8.zero"]
        if bias is not None:
            inputs += ["", g.constant(f"{name}.bias", bias)]
        return g.op("MatMulIntegerToFloat", inputs, name, domain=CONTRIB)


@dataclass(frozen=True, slots=True)
class QdqLinear:
    """INT8 on both sides in the standard's words: Q and DQ on the input, DQ on the weight, a float MatMul.

    Symmetric with zero point 0 (case C16); scales in the type of the MatMul, so that no Cast stands between.
    """

    unit: str
    scale: float  # of the input
    compute: str

    def read(self, g: GraphWriter, x: str) -> str:
        """See LinearForm.read."""
        scale = g.constant(f"{self.unit}.input_scale", np.array(self.scale, self.compute))
        zero = g.shared("int8.zero", np.array(0, np.int8))
        codes = g.op("QuantizeLinear", [x, scale, zero], f"{self.unit}.input_codes")
        return g.op("DequantizeLinear", [codes, scale, zero], f"{self.unit}.input")

    def multiply(self, g: GraphWriter, x: str, weight: Float32, name: str, bias: Float32 | None = None) -> str:
        """See LinearForm.multiply."""
        return self.multiply_stored(g, x, *store_int8(g, weight, name, self.compute), name, bias)

    def multiply_stored(
        self, g: GraphWriter, x: str, codes: str, scales: str, name: str, bias: Float32 | None = None
    ) -> str:
        """Multiply with codes [K, N] and scales [N] that are constants already."""
        weight = g.op("DequantizeLinear", [codes, scales], f"{name}.weight", attrs={"axis": 1})
        return _add_bias(g, g.op("MatMul", [x, weight], name), bias, self.compute)


@dataclass(frozen=True, slots=True)
class WeightOnlyLinear:
    """INT8 weights per output channel, DQ before a float MatMul: activations stay as they are."""

    compute: str

    def read(self, g: GraphWriter, x: str) -> str:
        """See LinearForm.read."""
        return x

    def multiply(self, g: GraphWriter, x: str, weight: Float32, name: str, bias: Float32 | None = None) -> str:
        """See LinearForm.multiply."""
        codes, scales = store_int8(g, weight, name, self.compute)
        widened = g.op("DequantizeLinear", [codes, scales], f"{name}.weight", attrs={"axis": 1})
        return _add_bias(g, g.op("MatMul", [x, widened], name), bias, self.compute)


def store_int8(g: GraphWriter, weight: Float32, name: str, dtype: str) -> tuple[str, str]:
    """Store a weight [N, K] as int8 codes [K, N] with one scale per output [N]; return both names."""
    scales = weight_scales(weight)
    codes = to_codes(weight, scales[:, None])
    return g.constant(f"{name}.codes", codes.T), g.constant(f"{name}.scales", scales.astype(dtype))


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [N, K] rounded by blocks along the input axis; the codes are centred at 2^(bits - 1)."""

    codes: NDArray[np.uint8]  # [N, blocks, block size], one code to a byte
    scales: Float32  # [N, blocks]
    bits: int  # 8 or 4

    @property
    def packed(self) -> NDArray[np.uint8]:
        """The codes as they are stored: [N, blocks, block size * bits / 8], of two 4-bit ones the first one low."""
        if self.bits == 8:
            return self.codes
        packed: NDArray[np.uint8] = self.codes[:, :, ::2] | np.left_shift(self.codes[:, :, 1::2], np.uint8(4))
        return packed

    @property
    def restored(self) -> Float32:
        """The weight [N, K] that the codes stand for."""
        restored: Float32 = self.codes.astype(np.float32)
        restored -= np.float32(1 << (self.bits - 1))
        restored *= self.scales[:, :, None]
        return restored.reshape(len(restored), -1)


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """Names of the constants of a block-rounded weight, and its sizes."""

    codes: str  # packed
    scales: str
    shape: tuple[int, int, int]  # N, blocks, block size
    bits: int


def block_size(width: int, bits: int = 8) -> int | None:
    """Return the block size for a weight of `width` inputs, or None when none divides it (the layer stays float)."""
    return next((size for size in (BLOCK_SIZES if bits == 8 else BLOCK_SIZES_4) if width % size == 0), None)


def quantize_blocks(weight: Float32, size: int, bits: int = 8) -> Blocks:
    """Round a weight [N, K] by blocks of `size` inputs; the scale of a block of zeros is 1 (C17).

    8 bits: symmetric, scale = absmax / 127. 4 bits: the value of the largest magnitude becomes code 0, which stands for
    -8, so its scale is negative where that value is positive: all 16 codes are used, where a symmetric range has 15.
    That lowers the error by an eighth.
    """
    blocks = weight.reshape(weight.shape[0], -1, size)
    if bits == 8:
        extremes, lowest = np.abs(blocks).max(axis=2), 127.0
    else:
        places = np.abs(blocks).argmax(axis=2)[:, :, None]
        extremes, lowest = np.take_along_axis(blocks, places, axis=2)[:, :, 0], -8.0
    scales = np.where(extremes != 0, extremes / lowest, 1.0).astype(np.float32)
    middle = 1 << (bits - 1)
    codes = np.rint(blocks / scales[:, :, None])
    np.clip(codes, -middle, middle - 1, out=codes)
    return Blocks((codes + middle).astype(np.uint8), scales, bits)


def store_blocks(g: GraphWriter, rounded: Blocks, name: str) -> StoredBlocks:
    """Store codes and scales once."""
    rows, blocks, size = rounded.codes.shape
    codes, scales = g.constant(f"{name}.codes", rounded.packed), g.constant(f"{name}.scales", rounded.scales)
    return StoredBlocks(codes, scales, (rows, blocks, size), rounded.bits)


def matmul_blocks(g: GraphWriter, x: str, weight: StoredBlocks, name: str, bias: str = "") -> str:
    """Multiply with a block-rounded weight.

    Accuracy level 4 (INT8 activations by block) is required: with level 0 the 8-bit kernel is 25 times slower.
    """
    rows, blocks, size = weight.shape
    attrs: dict[str, Attribute] = {
        "K": blocks * size,
        "N": rows,
        "bits": weight.bits,
        "block_size": size,
        "accuracy_level": 4,
    }
    inputs = [x, weight.codes, weight.scales]
    inputs += ["", "", bias] if bias else []  # zero points and g_idx are not used
    return g.op("MatMulNBits", inputs, name, attrs=attrs, domain=CONTRIB)


def _add_bias(g: GraphWriter, product: str, bias: Float32 | None, compute: str) -> str:
    if bias is None:
        return product
    return g.op("Add", [product, g.constant(f"{product}.bias", bias.astype(compute))], f"{product}.biased")
