"""Choose the scales of an INT8 KV cache from calibration text, and simulate the cache.

One fixed scale per channel, [K, D], for keys behind rotary and for values; codes -127..127, zero point 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import Float32
from edge_engines.graph.lowering import KvScales
from edge_engines.qdq.codes import MAX_CODE
from edge_engines.sensitivity.blocks import Keep, Multiply, multiply_exactly
from edge_engines.sensitivity.int8 import weight_scales
from edge_engines.sensitivity.passes import Ids, Passes, Stream
from edge_runtime.errors import BuildError

# Headroom over what calibration has seen, so that a somewhat larger key of another text is not clipped. Costs a tenth
# of the resolution, of which per-channel scales leave plenty: absmax itself gives a perplexity ratio of 1.0004.
MARGIN = 1.1

KvRanges = dict[int, tuple[Float32, Float32]]  # layer -> largest magnitudes of keys [K, D] and values [K, D]


def collect_kv_ranges(passes: Passes, ids: Ids, advance: Callable[[int], None]) -> KvRanges:
    """Return the largest magnitude of each channel over all tokens, from an FP32 pass; `advance` is told of each layer.

    Only maxima are kept.
    """
    ranges: KvRanges = {}

    def observe(layer: int, keys: Float32, values: Float32) -> tuple[Float32, Float32]:
        seen = np.abs(keys).max(axis=0), np.abs(values).max(axis=0)
        known = ranges.get(layer, seen)
        ranges[layer] = np.maximum(known[0], seen[0]), np.maximum(known[1], seen[1])
        return keys, values

    run_keeping(passes, passes.embed(ids), multiply_exactly, observe, advance)
    return ranges


def kv_scales(ranges: KvRanges) -> KvScales:
    """Return the scales of each layer's keys and values, normal numbers of FP16; 1 for a dead channel.

    Raises BuildError for ranges that are not finite.
    """
    return {
        layer: (_scales(keys, f"keys of layer {layer}"), _scales(values, f"values of layer {layer}"))
        for layer, (keys, values) in ranges.items()
    }


class RoundedKv:
    """A Keep that rounds keys and values as an INT8 cache does; new rows are read rounded too, as every later step."""

    def __init__(self, scales: KvScales) -> None:
        self._scales = scales

    def __call__(self, layer: int, keys: Float32, values: Float32) -> tuple[Float32, Float32]:
        """See Keep."""
        of_keys, of_values = self._scales[layer]
        return _rounded(keys, of_keys), _rounded(values, of_values)


def run_keeping(
    passes: Passes, stream: Stream, multiply: Multiply, keep: Keep, advance: Callable[[int], None] = lambda _: None
) -> Stream:
    """Run all layers with what `keep` makes of keys and values; return the residual streams behind the last."""
    for layer in range(passes.num_layers):
        block = passes.block(layer)
        stream = [block.run(x, multiply, keep) for x in stream]
        passes.num_layer_runs += len(stream)
        advance(1)
    return stream


def _scales(largest: Float32, name: str) -> Float32:
    if not np.isfinite(largest).all():
        raise BuildError(f"{name} reach {largest.max()}", remedy="the model or the calibration text is broken")
    return weight_scales((largest * np.float32(MARGIN)).reshape(-1, 1)).reshape(largest.shape)


def _rounded(rows: Float32, scales: Float32) -> Float32:
    """Quantise and dequantise [S, K, D]."""
    codes: NDArray[np.float32] = np.rint(rows / scales)
    np.clip(codes, -MAX_CODE, MAX_CODE, out=codes)
    return codes * scales
