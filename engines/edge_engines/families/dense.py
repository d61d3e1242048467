"""Describe what the families share: pre-norm blocks of grouped-query attention and a gated MLP."""

from __future__ import annotations

import json

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.rotary import read_rotary
from edge_engines.checkpoint.spec import LayerSpec, ModelSpec, Rotary

Windows = tuple[int | None, ...]  # visible keys by layer, the query included; None = all

# Far above any published model: a damaged file must not make us build tables of billions of entries.
MAX_LAYERS = 1024
MAX_HEAD_DIM = 4096

NULLABLE = frozenset({"num_key_value_heads", "head_dim", "sliding_window", "layer_types"})


def describe_plain(config: Config, family: str, windows: Windows, *, absent_base: float | None) -> ModelSpec:
    """Describe blocks with SiLU and one rotary table over whole heads."""
    rotary = read_rotary(config, read_head_dim(config), absent_base=absent_base)
    require(config, "hidden_act", "silu")
    return describe_dense(config, family, tuple(LayerSpec(rotary=0, window=window) for window in windows), (rotary,))


def describe_dense(
    config: Config, family: str, layers: tuple[LayerSpec, ...], rotaries: tuple[Rotary, ...]
) -> ModelSpec:
    """Describe the dimensions of blocks whose layers and rotary tables the family has read."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise config.refusal("num_key_value_heads", kv_heads, f"a divisor of the {heads} query heads")
    return ModelSpec(
        family=family,
        hidden=config.integer("hidden_size"),
        ffn=config.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=read_head_dim(config),
        vocab=config.integer("vocab_size"),
        norm_eps=config.number("rms_norm_eps"),
        max_positions=config.integer("max_position_embeddings"),
        layers=layers,
        rotaries=rotaries,
        tied_head=config.flag("tie_word_embeddings"),
    )


def read_head_dim(config: Config) -> int:
    """Return the stated head size; hidden / heads only where the family lets it be absent (C04)."""
    heads = config.integer("num_attention_heads")
    stated, hidden = config.optional_integer("head_dim"), config.integer("hidden_size")
    if stated is None and hidden % heads:
        raise config.refusal("hidden_size", hidden, f"a multiple of the {heads} heads, or a head_dim of its own")
    head_dim = stated or hidden // heads
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise config.refusal("head_dim", head_dim, f"an even number (rotary works on pairs) from 2 to {MAX_HEAD_DIM}")
    return head_dim


def count_layers(config: Config) -> int:
    """Return the number of layers L."""
    return config.integer("num_hidden_layers", MAX_LAYERS)


def no_windows(config: Config) -> Windows:
    """Return full attention in every layer."""
    return (None,) * count_layers(config)


def one_window(config: Config) -> Windows:
    """Return the one window of all layers, or full attention where it is null (C08)."""
    return (config.optional_integer("sliding_window"),) * count_layers(config)


def listed_windows(config: Config, kinds: object, window: int) -> Windows:
    """Return the windows of a list of layer types, one by layer."""
    names = {"full_attention": None, "sliding_attention": window}
    num_layers = count_layers(config)
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(str(kind) not in names for kind in kinds):
        raise config.refusal("layer_types", kinds, f"{num_layers} of {', '.join(names)}")
    return tuple(names[kind] for kind in kinds)


def require(config: Config, key: str, expected: object) -> None:
    """Raise CheckpointError unless a key has the one value that the family is built for."""
    value = config.value(key)
    if value != expected:
        raise config.refusal(key, value, f"{json.dumps(expected)} in this family")
