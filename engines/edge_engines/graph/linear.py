"""Write one linear layer, or the embedding and head, in the precision that was chosen for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import Float32
from edge_engines.graph.writer import Attribute, GraphWriter

Precision = Literal["fp32", "fp16", "w8"]
CONTRIB = "com.microsoft"
BLOCK_SIZES = (64, 32, 128, 16)  # 64 keeps SmolLM2's near-tied first tokens in order, 32 flips them (graphs.md)
ZERO_POINT = 128  # what MatMulNBits assumes for 8-bit weights without zero points


@dataclass(frozen=True, slots=True)
class BlockInt8:
    """Symmetric INT8 by blocks along the input axis, stored as uint8 around ZERO_POINT."""

    codes: NDArray[np.uint8]  # [N, blocks, block size]
    scales: Float32  # [N, blocks]


def block_size(width: int) -> int | None:
    """Return the block size for a weight of `width` inputs, or None when none divides it (the layer stays float)."""
    return next((size for size in BLOCK_SIZES if width % size == 0), None)


def quantize_blocks(weight: Float32, size: int) -> BlockInt8:
    """Round a weight [N, K] to INT8 by blocks of `size` inputs: scale = absmax / 127, 1 for a block of zeros (C17)."""
    blocks = weight.reshape(weight.shape[0], -1, size)
    absmax = np.abs(blocks).max(axis=2)
    scales = np.where(absmax > 0, absmax / 127.0, 1.0).astype(np.float32)
    codes = np.rint(blocks / scales[:, :, None]) + ZERO_POINT
    return BlockInt8(codes.astype(np.uint8), scales)


def write_linear(
    g: GraphWriter, x: str, weight: Float32, name: str, precision: Precision, bias: Float32 | None = None
) -> str:
    """Multiply x [B, S, K] with a weight [N, K] and add a bias [N]; return the value [B, S, N]."""
    size = block_size(weight.shape[1])
    if precision == "w8" and size is not None:
        quantized = quantize_blocks(weight, size)
        codes = g.constant(f"{name}.codes", quantized.codes)
        scales = g.constant(f"{name}.scales", quantized.scales)
        added = "" if bias is None else g.constant(f"{name}.bias", bias)
        return matmul_blocks(g, x, codes, scales, quantized.codes.shape, name, added)
    dtype = np.float16 if precision == "fp16" else np.float32
    product = g.op("MatMul", [x, g.constant(f"{name}.weight", weight.T.astype(dtype))], name)
    if bias is None:
        return product
    return g.op("Add", [product, g.constant(f"{name}.bias", bias.astype(dtype))], f"{name}.biased")


def matmul_blocks(
    g: GraphWriter, x: str, codes: str, scales: str, shape: tuple[int, ...], name: str, bias: str = ""
) -> str:
    """Multiply with a block-quantised weight already stored; `shape` is that of its codes [N, blocks, block size].

    Accuracy level 4 (INT8 activations by block) is required: with level 0 the 8-bit kernel is 25 times slower.
    """
    rows, blocks, size = shape
    attrs: dict[str, Attribute] = {
        "K": blocks * size,
        "N": rows,
        "bits": 8,
        "block_size": size,
        "accuracy_level": 4,
    }
    inputs = [x, codes, scales, "", "", bias] if bias else [x, codes, scales]  # zero points and g_idx are not used
    return g.op("MatMulNBits", inputs, name, attrs=attrs, domain=CONTRIB)


def gather_blocks(g: GraphWriter, ids: str, codes: str, scales: str, shape: tuple[int, ...], name: str) -> str:
    """Look ids [B, S] up in a block-quantised table (the one the head multiplies with); return [B, S, K] float32."""
    _, blocks, size = shape
    rows = g.op("Gather", [codes, ids], f"{name}.codes_of_ids")  # [B, S, blocks, block size]
    zero = g.constant(f"{name}.zero", np.array(ZERO_POINT, np.float32))
    centred = g.op("Sub", [g.cast(rows, "float32", f"{name}.codes_fp32"), zero], f"{name}.centred")
    scale_rows = g.op("Gather", [scales, ids], f"{name}.scales_of_ids")  # [B, S, blocks]
    scale_rows = g.op("Unsqueeze", [scale_rows, g.constant(f"{name}.last", np.array([-1]))], f"{name}.scales_4d")
    product = g.op("Mul", [centred, scale_rows], f"{name}.scaled")
    return g.op("Reshape", [product, g.constant(f"{name}.shape", np.array([0, 0, blocks * size]))], name)
