"""Move magnitude from activations into weights before INT8, folded into weights that are there: no operation is added.

Each input channel j of a unit is divided by s_j and its weights are multiplied by it (SmoothQuant, Xiao et al. 2022:
s_j = max|x_j|^alpha / max|w_j|^(1 - alpha)). The division is folded into the norm before qkv, gate_up and head, into v
before o, and into up before down: the FP32 model stays the same function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from edge_engines.checkpoint.spec import Float32, ModelSpec, Weights
from edge_engines.sensitivity.blocks import BODY_UNITS, HEAD, unit_name

Factors = Mapping[str, Float32]  # unit -> s [in]; units that are not named are left alone


@dataclass(frozen=True, slots=True)
class Smoothing:
    """Alpha per kind of unit; a kind that is not named is left alone."""

    alphas: Mapping[str, float]

    def factors(self, spec: ModelSpec, weights: Weights, ranges: Mapping[str, Float32]) -> dict[str, Float32]:
        """Return s [in] of each unit that is smoothed."""
        found: dict[str, Float32] = {}
        for kind, alpha in self.alphas.items():
            for unit in [HEAD] if kind == HEAD else [unit_name(i, kind) for i in range(len(spec.layers))]:
                found[unit] = _factors_of(unit, alpha, spec, weights, ranges[unit])
        return found


def column_absmax(unit: str, spec: ModelSpec, weights: Weights) -> Float32:
    """Return the largest magnitude [in] of a unit's weights per input channel."""
    if unit == HEAD:
        sources = ["embed" if spec.tied_head else HEAD]
    else:
        at, _, kind = unit.rpartition(".")
        sources = [f"{at}.{p}" for p in {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}.get(kind, (kind,))]
    largest = [np.abs(weights.tensor(source)).max(axis=0) for source in sources]
    absmax: Float32 = np.maximum.reduce(largest)
    return absmax


def _factors_of(unit: str, alpha: float, spec: ModelSpec, weights: Weights, activations: Float32) -> Float32:
    columns = column_absmax(unit, spec, weights)
    if unit.endswith(".o"):  # query heads of a group read the same values, so they share their factors
        activations, columns = (_over_group(t, spec) for t in (activations, columns))
    is_live = (activations > 0) & (columns > 0)
    raw = np.power(activations, alpha, where=is_live, out=np.ones_like(activations))
    raw /= np.power(columns, 1 - alpha, where=is_live, out=np.ones_like(columns))
    middle = np.exp(np.log(raw[is_live]).mean()) if is_live.any() else 1.0  # keeps weights at their usual magnitude
    factors: Float32 = np.where(is_live, raw / middle, 1.0).astype(np.float32)
    return factors


def _over_group(channels: Float32, spec: ModelSpec) -> Float32:
    """Replace each of [H * D] by the largest among the query heads that share its value channel."""
    grouped = channels.reshape(spec.num_kv_heads, -1, spec.head_dim)
    shared: Float32 = np.broadcast_to(grouped.max(axis=1, keepdims=True), grouped.shape).reshape(-1)
    return shared


class FoldedWeights:
    """Weights with the factors folded in; see Weights.

    A smoothed head no longer equals the embedding: `spec` says so, there is a tensor `head` then, and `tied_by` holds
    the factors [hidden] between the two (None where nothing was tied or the tie still holds).
    """

    def __init__(self, spec: ModelSpec, weights: Weights, factors: Factors) -> None:
        self._spec, self._weights, self._factors = spec, weights, factors
        self.spec = replace(spec, tied_head=spec.tied_head and HEAD not in factors)
        self.tied_by = factors.get(HEAD) if spec.tied_head else None

    def tensor(self, name: str) -> Float32:
        """See Weights.tensor."""
        source = "embed" if name == HEAD and self._spec.tied_head else name
        tensor, (at, _, part) = self._weights.tensor(source), name.rpartition(".")
        if part in ("q", "k", "v"):
            tensor = self._times_columns(tensor, f"{at}.qkv")
        elif part in ("gate", "up"):
            tensor = self._times_columns(tensor, f"{at}.gate_up")
        elif part in BODY_UNITS or name == HEAD:
            tensor = self._times_columns(tensor, name)
        elif part in ("attn_norm", "mlp_norm") or name == "norm":
            tensor = self._divided_norm(tensor, {"attn_norm": f"{at}.qkv", "mlp_norm": f"{at}.gate_up"}.get(part, HEAD))
        if part in ("v", "v_bias"):
            tensor = self._divided_rows(tensor, f"{at}.o")
        elif part in ("up", "up_bias"):
            tensor = self._divided_rows(tensor, f"{at}.down")
        return tensor

    def _times_columns(self, weight: Float32, unit: str) -> Float32:
        return weight * self._factors[unit] if unit in self._factors else weight

    def _divided_norm(self, weight: Float32, unit: str) -> Float32:
        """Divide offset + weight, which is what the norm multiplies by."""
        if unit not in self._factors:
            return weight
        offset = np.float32(self._spec.norm_offset)
        divided: Float32 = (offset + weight) / self._factors[unit] - offset
        return divided

    def _divided_rows(self, rows: Float32, unit: str) -> Float32:
        """Divide rows of v or up (or their bias) by the factors of the unit that reads them."""
        if unit not in self._factors:
            return rows
        factors = self._factors[unit]
        if unit.endswith(".o"):  # [H * D] -> [K * D]: equal within a group
            factors = factors.reshape(self._spec.num_kv_heads, -1, self._spec.head_dim)[:, 0].reshape(-1)
        return rows / (factors[:, None] if rows.ndim == 2 else factors)
