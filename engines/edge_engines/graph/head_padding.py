"""Widen attention heads with zeros for a target that wants a multiple of 16, without changing what the model computes.

Rotary pairs dim i with dim i + D/2, so zeros are put behind each half. They add nothing to a dot product; padded values
meet zero columns of the output projection.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edge_engines.checkpoint.spec import Float32, ModelSpec, Weights
from edge_runtime.errors import BuildError

MULTIPLE = 16  # head sizes, and numbers of rotated dims, that GroupQueryAttention of ONNX Runtime accepts


def pad_heads(spec: ModelSpec, weights: Weights) -> tuple[ModelSpec, Weights]:
    """Return the model with heads widened to the next multiple of 16; as it is when they already are one.

    Raises BuildError for models whose heads are normed or rotated in part: there zeros would change the result. Of a
    wide enough head a part may be rotated, as long as that too is a multiple of 16.
    """
    wide = -(-spec.head_dim // MULTIPLE) * MULTIPLE
    if wide == spec.head_dim:
        _check_rotated_dims(spec)
        return spec, weights
    if spec.qk_norm or any(rotary.dim != spec.head_dim for rotary in spec.rotaries):
        raise BuildError(
            f"head size {spec.head_dim} of family {spec.family} is not a multiple of {MULTIPLE}, which ONNX Runtime's "
            f"attention needs",
            remedy="use --lowering native",
        )
    extra = (wide - spec.head_dim) // 2
    rotaries = tuple(replace(r, inv_freq=r.inv_freq + (0.0,) * extra) for r in spec.rotaries)
    padded = replace(spec, head_dim=wide, rotaries=rotaries, query_scale=spec.scale)
    return padded, _PaddedWeights(weights, spec.head_dim, wide)


def _check_rotated_dims(spec: ModelSpec) -> None:
    for rotary in spec.rotaries:
        if rotary.dim % MULTIPLE:
            raise BuildError(
                f"family {spec.family} rotates {rotary.dim} of {spec.head_dim} dims per head, which is not a multiple "
                f"of {MULTIPLE}, which ONNX Runtime's attention needs",
                remedy="use --lowering native",
            )


class _PaddedWeights:
    """Weights whose q, k, v rows and o columns are widened as they are read."""

    def __init__(self, weights: Weights, narrow: int, wide: int) -> None:
        self._weights, self._narrow, self._wide = weights, narrow, wide

    def tensor(self, name: str) -> Float32:
        """See Weights.tensor."""
        tensor, kind = self._weights.tensor(name), name.rsplit(".", 1)[-1]
        if kind in ("q", "k", "v", "q_bias", "k_bias", "v_bias"):
            return self._widen(tensor)
        return self._widen(tensor.T).T if kind == "o" else tensor

    def _widen(self, rows: Float32) -> Float32:
        """Pad [heads * D, ...] to [heads * wide, ...], zeros behind each half of a head."""
        half, rest = self._narrow // 2, rows.shape[1:]
        halves = rows.reshape(-1, half, *rest)
        padded = np.zeros((halves.shape[0], self._wide // 2, *rest), np.float32)
        padded[:, :half] = halves
        return padded.reshape(-1, *rest)
