"""Run a decoder block by block in numpy, every multiplication with a weight left to the caller.

That one seam serves the baseline, the collection of ranges, and simulated INT8 of any set of units. FP32, one sequence
at a time. Axis letters: S positions, H query heads, K kv heads, G = H / K, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from edge_engines.checkpoint.spec import Float32, ModelSpec, Rotary, Weights
from edge_engines.reference import causal_mask

BODY_UNITS = ("qkv", "o", "gate_up", "down")
EMBED, HEAD = "embed", "head"
Multiply = Callable[[str, Float32, Float32], Float32]  # (unit, x [S, in], weight [out, in]) -> [S, out]
Keep = Callable[[int, Float32, Float32], tuple[Float32, Float32]]  # (layer, keys [S, K, D], values) -> as attended to

_PARTS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


def multiply_exactly(unit: str, x: Float32, weight: Float32) -> Float32:
    """Multiply in FP32: the baseline."""
    product: Float32 = x @ weight.T
    return product


def keep_exactly(layer: int, keys: Float32, values: Float32) -> tuple[Float32, Float32]:
    """Attend to keys, behind rotary, and values as they are: the baseline."""
    return keys, values


def unit_name(layer: int, unit: str) -> str:
    """Return the name of a unit of a layer, as nodes and manifests call it."""
    return f"layers.{layer}.{unit}"


class Block:
    """One layer with its weights in memory, float32."""

    def __init__(self, spec: ModelSpec, weights: Weights, layer: int) -> None:
        self._spec, self._layer = spec, layer
        at = f"layers.{layer}"
        norms = ["attn_norm", "mlp_norm"]
        norms += ["q_norm", "k_norm"] if spec.qk_norm else []
        norms += ["post_attn_norm", "post_mlp_norm"] if spec.post_norms else []
        self._norms = {n: weights.tensor(f"{at}.{n}") + np.float32(spec.norm_offset) for n in norms}
        self.weights: dict[str, Float32] = {}
        self._biases: dict[str, Float32] = {}
        has_bias = {"qkv": spec.qkv_bias, "o": spec.o_bias, "gate_up": spec.mlp_bias, "down": spec.mlp_bias}
        for unit, parts in _PARTS.items():
            self.weights[unit] = np.concatenate([weights.tensor(f"{at}.{p}") for p in parts])
            if has_bias[unit]:
                self._biases[unit] = np.concatenate([weights.tensor(f"{at}.{p}_bias") for p in parts])

    def run(self, x: Float32, multiply: Multiply, keep: Keep = keep_exactly, num_sequences: int = 1) -> Float32:
        """Return the residual stream [S, hidden] behind this layer.

        Sequences of equal length may stand one behind the other: only attention keeps them apart.
        """
        spec, at = self._spec, f"layers.{self._layer}."

        def linear(unit: str, value: Float32) -> Float32:
            product = multiply(at + unit, value, self.weights[unit])
            return product + self._biases[unit] if unit in self._biases else product

        each = np.split(linear("qkv", self._norm(x, "attn_norm")), num_sequences)
        delta = linear("o", np.concatenate([self._attend(qkv, keep) for qkv in each]))
        x = x + (self._norm(delta, "post_attn_norm") if spec.post_norms else delta)
        gate, up = np.split(linear("gate_up", self._norm(x, "mlp_norm")), 2, axis=1)
        delta = linear("down", _activate(spec.activation, gate) * up)
        return x + (self._norm(delta, "post_mlp_norm") if spec.post_norms else delta)

    def _norm(self, x: Float32, name: str) -> Float32:
        return rms_norm(x, self._norms[name], self._spec.norm_eps)

    def _attend(self, qkv: Float32, keep: Keep) -> Float32:
        spec, length = self._spec, qkv.shape[0]
        layer = spec.layers[self._layer]
        num_q, num_kv, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        q, k, v = np.split(qkv, [num_q * dim, (num_q + num_kv) * dim], axis=1)
        q, k, v = q.reshape(length, num_q, dim), k.reshape(length, num_kv, dim), v.reshape(length, num_kv, dim)
        if spec.qk_norm:
            q, k = self._norm(q, "q_norm"), self._norm(k, "k_norm")
        rotary = spec.rotaries[layer.rotary]
        q, k = _rotate(q, rotary), _rotate(k, rotary)
        k, v = keep(self._layer, k, v)
        group = num_q // num_kv
        q = q.transpose(1, 0, 2).reshape(num_kv, group * length, dim)  # [K, G * S, D]: group heads share their keys
        scores = q @ k.transpose(1, 2, 0)
        scores *= np.float32(spec.scale)
        scores = scores.reshape(num_q, length, length)
        np.copyto(scores, -np.inf, where=~causal_mask(length, layer.window))
        shares = _softmax(scores).reshape(num_kv, group * length, length)
        mixed = (shares @ v.transpose(1, 0, 2)).reshape(num_q, length, dim)
        return np.ascontiguousarray(mixed.transpose(1, 0, 2)).reshape(length, num_q * dim)


def rms_norm(x: Float32, weight: Float32, epsilon: float) -> Float32:
    """Norm the last axis."""
    mean = np.square(x).mean(axis=-1, keepdims=True)
    normed: Float32 = x * (weight / np.sqrt(mean + np.float32(epsilon)))
    return normed


def _rotate(x: Float32, rotary: Rotary) -> Float32:
    """Rotate [S, heads, D] by position; the first half of the rotated dims pairs with the second."""
    half = len(rotary.inv_freq)
    angle = np.outer(np.arange(x.shape[0]), rotary.inv_freq)[:, None, :]  # float64 [S, 1, half]
    cos = (np.cos(angle) * rotary.attention_factor).astype(np.float32)
    sin = (np.sin(angle) * rotary.attention_factor).astype(np.float32)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _softmax(scores: Float32) -> Float32:
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def _activate(kind: str, x: Float32) -> Float32:
    assert kind in ("silu", "gelu_tanh"), kind
    if kind == "gelu_tanh":
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x**3)
        tanh: Float32 = np.float32(0.5) * x * (1 + np.tanh(inner))
        return tanh
    with np.errstate(over="ignore"):  # exp of a large negative gate: its share is 0
        silu: Float32 = x / (1 + np.exp(-x))
    return silu
