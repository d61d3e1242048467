"""Round the factor on the input embedding as the model's own code does: to the type of its weights.

Source: transformers 4.57.1, modeling_gemma3; sqrt(640) is 25.25 in BF16, not 25.298.
"""

from __future__ import annotations

import numpy as np


def round_scale(scale: float, weight_type: str) -> float:
    """Round a factor to a storage type of safetensors: F32, F16 or BF16."""
    single = np.float32(scale)
    if weight_type == "F32":
        return float(single)
    if weight_type == "F16":
        return float(np.float16(single))
    # BF16 is the upper half of a float32: round to the nearest, of two equally near ones to the even.
    bits = int(single.view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))


def original_type(gguf_type: str) -> str:
    """Return the type of the weights that a GGUF file was made from: BF16 unless it still holds all bits of F32.

    A converter changes the storage, not the factor, and Gemma 3 is published in BF16.
    """
    return "F32" if gguf_type == "F32" else "BF16"
