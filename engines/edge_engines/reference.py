"""Compute a model's logits the slow, plain way: the reference that every engine is held against.

Full sequences only, no cache, no batching, float64 throughout; weights are read one at a time. Axis letters: S
positions, H query heads, K kv heads, G = H / K, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import ModelSpec, Rotary, Weights

Array = NDArray[np.float64]


def logits(spec: ModelSpec, weights: Weights, ids: Sequence[int]) -> Array:
    """Return the logits [S, V] of a decoder-only model at every position.

    A rotary table that depends on an engine's capacity is taken as if S were it (`ModelSpec.for_capacity` settles it).
    """
    spec = spec.for_capacity(len(ids))
    x = weights.tensor("embed")[list(ids)].astype(np.float64) * spec.embed_scale  # [S, hidden]
    for i in range(len(spec.layers)):
        attended = _attention(spec, weights, i, _norm(spec, weights, f"layers.{i}.attn_norm", x))
        if spec.post_norms:
            attended = _norm(spec, weights, f"layers.{i}.post_attn_norm", attended)
        x = x + attended
        mixed = _mlp(spec, weights, i, _norm(spec, weights, f"layers.{i}.mlp_norm", x))
        if spec.post_norms:
            mixed = _norm(spec, weights, f"layers.{i}.post_mlp_norm", mixed)
        x = x + mixed
    head = weights.tensor("embed" if spec.tied_head else "head")
    result: Array = _norm(spec, weights, "norm", x) @ head.T.astype(np.float64)
    return result


def causal_mask(length: int, window: int | None) -> NDArray[np.bool_]:
    """Return [S, S]: may query (row) see key (column)? The window counts the query itself."""
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    seen = key <= query
    return seen if window is None else seen & (query - key < window)


def rotate(x: Array, rotary: Rotary) -> Array:
    """Rotate [S, heads, D] by position: the first half of the rotated dims pairs with the second half."""
    half = len(rotary.inv_freq)
    angle = np.outer(np.arange(x.shape[0]), rotary.inv_freq)[:, None, :]  # [S, 1, half]
    cos, sin = np.cos(angle) * rotary.attention_factor, np.sin(angle) * rotary.attention_factor
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _attention(spec: ModelSpec, weights: Weights, i: int, x: Array) -> Array:
    length, layer = x.shape[0], spec.layers[i]
    q = _linear(weights, f"layers.{i}.q", x, spec.qkv_bias).reshape(length, spec.num_heads, -1)  # [S, H, D]
    k = _linear(weights, f"layers.{i}.k", x, spec.qkv_bias).reshape(length, spec.num_kv_heads, -1)  # [S, K, D]
    v = _linear(weights, f"layers.{i}.v", x, spec.qkv_bias).reshape(length, spec.num_kv_heads, -1)
    if spec.qk_norm:
        q = _norm(spec, weights, f"layers.{i}.q_norm", q)
        k = _norm(spec, weights, f"layers.{i}.k_norm", k)
    q, k = rotate(q, spec.rotaries[layer.rotary]), rotate(k, spec.rotaries[layer.rotary])
    group = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)  # [S, H, D]: head h reads kv head h // G
    scores = np.einsum("shd,thd->hst", q, k) * spec.scale
    scores = np.where(causal_mask(length, layer.window), scores, -np.inf)
    mixed = np.einsum("hst,thd->shd", _softmax(scores), v).reshape(length, -1)
    return _linear(weights, f"layers.{i}.o", mixed, spec.o_bias)


def _mlp(spec: ModelSpec, weights: Weights, i: int, x: Array) -> Array:
    gate = _linear(weights, f"layers.{i}.gate", x, spec.mlp_bias)
    up = _linear(weights, f"layers.{i}.up", x, spec.mlp_bias)
    return _linear(weights, f"layers.{i}.down", _activate(spec.activation, gate) * up, spec.mlp_bias)


def _linear(weights: Weights, name: str, x: Array, has_bias: bool) -> Array:
    y: Array = x @ weights.tensor(name).T.astype(np.float64)
    if has_bias:
        y += weights.tensor(f"{name}_bias")
    return y


def _norm(spec: ModelSpec, weights: Weights, name: str, x: Array) -> Array:
    scale = spec.norm_offset + weights.tensor(name).astype(np.float64)
    normed: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + spec.norm_eps) * scale
    return normed


def _activate(kind: str, x: Array) -> Array:
    assert kind in ("silu", "gelu_tanh"), kind
    share: Array = 1 / (1 + np.exp(-x))
    if kind == "gelu_tanh":
        share = 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * share


def _softmax(scores: Array) -> Array:
    shares: Array = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares
