"""Describe a decoder model: what the graph builder and the slow twin need to know, and nothing of files.

Axis letters: L layers, H query heads, K kv heads, D head size, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LongRange:
    """The second list of longrope: frequencies beyond the context that a model was first trained on."""

    original: int  # positions up to which Rotary.inv_freq holds
    inv_freq: tuple[float, ...]  # [rotated dims / 2], float64 values


@dataclass(frozen=True, slots=True)
class Rotary:
    """One rotary table. `inv_freq` already holds any scaling, so tables are `outer(position, inv_freq)`."""

    base: float
    kind: str  # "default", "llama3", "linear" ...: recorded in the manifest
    inv_freq: tuple[float, ...]  # [rotated dims / 2], float64 values; half-split rotation
    attention_factor: float = 1.0  # multiplies cos and sin
    long: LongRange | None = None  # None: inv_freq holds at every capacity

    @property
    def dim(self) -> int:
        """Rotated dims per head (equals D unless the family rotates a part only)."""
        return 2 * len(self.inv_freq)

    def for_capacity(self, capacity: int) -> Rotary:
        """Return the table of an engine with `capacity` KV rows.

        Keys are rotated once, when they enter the cache, so an engine keeps to one of two lists whatever the length of
        a prompt: the first up to the original context, the second beyond.
        """
        if self.long is None:
            return self
        if capacity <= self.long.original:
            return replace(self, kind=f"{self.kind}-short", long=None)
        return replace(self, kind=f"{self.kind}-long", inv_freq=self.long.inv_freq, long=None)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rotary: int  # index into ModelSpec.rotaries
    window: int | None = None  # visible keys, the query itself included; None = all


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model: pre-norm blocks of grouped-query attention and a gated MLP."""

    family: str  # "llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3"
    hidden: int
    ffn: int
    num_heads: int  # H
    num_kv_heads: int  # K
    head_dim: int  # D; from the config, never hidden / H when given
    vocab: int  # V, rows of the head; may exceed the tokenizer's ids
    norm_eps: float
    max_positions: int
    layers: tuple[LayerSpec, ...]
    rotaries: tuple[Rotary, ...]
    activation: str = "silu"  # or "gelu_tanh"
    tied_head: bool = False  # the head is the embedding table: there is no tensor "head"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm over D per head, before rotary
    post_norms: bool = False  # two more norms, after attention and after the MLP (Gemma 3)
    norm_offset: float = 0.0  # the norm multiplies by (offset + weight)
    embed_scale: float = 1.0
    query_scale: float = 0.0  # multiplies QK; 0 means 1 / sqrt(D)
    scores_fp32: bool = False  # QK overflows FP16 in this family (case C43)

    @property
    def scale(self) -> float:
        """Factor on the QK scores."""
        return self.query_scale or float(self.head_dim**-0.5)

    def for_capacity(self, capacity: int) -> ModelSpec:
        """Return the model as an engine with `capacity` KV rows computes it."""
        return replace(self, rotaries=tuple(rotary.for_capacity(capacity) for rotary in self.rotaries))


def tensor_shapes(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield every canonical tensor name with its shape; linear weights are [out, in] as checkpoints store them.

    Names: `embed`, `norm`, `head` (absent when tied) and per layer `layers.{i}.` + `attn_norm`, `q`, `k`, `v`, `o`,
    `mlp_norm`, `gate`, `up`, `down`, and where the spec says so `q_bias`, `k_bias`, `v_bias`, `o_bias`, `gate_bias`,
    `up_bias`, `down_bias`, `q_norm`, `k_norm`, `post_attn_norm`, `post_mlp_norm`.
    """
    h, q, kv = spec.hidden, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    yield "embed", (spec.vocab, h)
    for i in range(len(spec.layers)):
        shapes: dict[str, tuple[int, ...]] = {"attn_norm": (h,), "q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q)}
        if spec.qkv_bias:
            shapes |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
        if spec.o_bias:
            shapes["o_bias"] = (h,)
        if spec.qk_norm:
            shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
        if spec.post_norms:
            shapes |= {"post_attn_norm": (h,), "post_mlp_norm": (h,)}
        shapes |= {"mlp_norm": (h,), "gate": (spec.ffn, h), "up": (spec.ffn, h), "down": (h, spec.ffn)}
        if spec.mlp_bias:
            shapes |= {"gate_bias": (spec.ffn,), "up_bias": (spec.ffn,), "down_bias": (h,)}
        for name, shape in shapes.items():
            yield f"layers.{i}.{name}", shape
    yield "norm", (h,)
    if not spec.tied_head:
        yield "head", (spec.vocab, h)


def unit_inputs(spec: ModelSpec) -> dict[str, int]:
    """Return the width K of what each kind of unit reads: a unit is a projection, or several that read one value."""
    attended = spec.num_heads * spec.head_dim
    return {"qkv": spec.hidden, "o": attended, "gate_up": spec.hidden, "down": spec.ffn, "head": spec.hidden}


class Weights(Protocol):
    """Where the graph builder takes weights from: one tensor at a time, nothing kept."""

    def tensor(self, name: str) -> Float32:
        """Return one canonical tensor as float32 in the shape of `tensor_shapes`; read from the file on each call."""
        ...


@dataclass(frozen=True, slots=True)
class TextAssets:
    """What the runtime needs to turn text into ids and back; copied into the engine folder."""

    tokenizer_json: bytes
    chat_template: str | None  # jinja2 source
    bos_token: str | None
    eos_token: str | None
    add_bos: bool  # raw prompts get one BOS in front
    known_ids: int  # ids the tokenizer knows: [known_ids, V) is padding and never sampled


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Ids that steer generation: the union of config.json, generation_config.json and tokenizer_config.json."""

    eos_ids: tuple[int, ...]
    bos_id: int | None = None
