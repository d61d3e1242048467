"""Say what Gemma 3 is: four norms of 1 + w, local and global layers with a rotary table each, a scaled embedding.

Text only: of a multimodal checkpoint the language model is built and the vision tower left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.mapping import Source
from edge_engines.checkpoint.rotary import read_rotary
from edge_engines.checkpoint.spec import LayerSpec, ModelSpec, Rotary
from edge_engines.checkpoint.tensor_names import HF_NAMES, hf_sources
from edge_engines.families.dense import (
    Windows,
    count_layers,
    describe_dense,
    listed_windows,
    read_head_dim,
    require,
)
from edge_engines.families.entry import Family
from edge_runtime.errors import CheckpointError

LAYERS_27B = 62  # the one size whose queries are scaled by hidden / heads, not by the head size [gm]

# Key of a model with one rotary table -> key of the global or the local table.
_GLOBAL_KEYS = {"rope_theta": "rope_theta", "rope_scaling": "rope_scaling", "rope_parameters": "rope_parameters"}
_LOCAL_KEYS = {"rope_theta": "rope_local_base_freq"}

_NAMES = MappingProxyType(
    {
        **HF_NAMES,
        "post_attn_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "mlp_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
        "post_mlp_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
    }
)


def _describe(config: Config) -> ModelSpec:
    require(config, "hidden_activation", "gelu_pytorch_tanh")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        require(config, key, None)  # Gemma 2 caps, Gemma 3 does not
    require(config, "use_bidirectional_attention", False)  # true in an embedding model, which can't decode
    bias = config.flag("attention_bias")
    layers = tuple(LayerSpec(rotary=int(window is not None), window=window) for window in _windows(config))
    spec = describe_dense(config, "gemma3", layers, _rotaries(config))
    return replace(
        spec,
        activation="gelu_tanh",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        embed_scale=math.sqrt(spec.hidden),  # rounded when the type of the weights is known
        query_scale=config.number("query_pre_attn_scalar") ** -0.5,
    )


def _describe_multimodal(config: Config) -> ModelSpec:
    text = config.section("text_config")
    if text is None:
        raise config.refusal("text_config", None, "an object that describes the language model")
    require(replace(text, absent={"model_type": "gemma3_text"}), "model_type", "gemma3_text")
    outer = {key: config.values[key] for key in ("tie_word_embeddings",) if key in config.values}
    return _describe(replace(text, values={**outer, **text.values}, absent=config.absent, nullable=config.nullable))


def _windows(config: Config) -> Windows:
    """Return the windows by layer: as listed, else one layer of every so many sees everything (C07)."""
    window, kinds = config.integer("sliding_window"), config.value("layer_types")
    if kinds is None:
        period, num_layers = _period(config), count_layers(config)
        kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]
    return listed_windows(config, kinds, window)


def _period(config: Config) -> int:
    """Return the length of the pattern, which is found under two names."""
    names = [name for name in ("sliding_window_pattern", "_sliding_window_pattern") if name in config.values]
    found = {config.integer(name) for name in names or ["sliding_window_pattern"]}
    if len(found) > 1:
        raise CheckpointError(f"{config.file}: {' and '.join(names)} disagree", remedy="keep one of them")
    return found.pop()


def _rotaries(config: Config) -> tuple[Rotary, Rotary]:
    """Return the tables of global layers, which may be scaled, and of local ones, which never are."""
    head_dim = read_head_dim(config)
    whole = read_rotary(_table(config, "full_attention", _GLOBAL_KEYS), head_dim, absent_base=1e6)  # [gm]
    local = read_rotary(_table(config, "sliding_attention", _LOCAL_KEYS), head_dim, absent_base=1e4)  # [gm]
    if local.kind != "default":
        raise CheckpointError(f"{config.file}: local layers have {local.kind} rope scaling, expected none")
    return whole, local


def _table(config: Config, layer_type: str, keys: Mapping[str, str]) -> Config:
    """Return what a configuration says of one rotary table, in the keys of a model that has one only."""
    keys = {**keys, "rotary_dims": "rotary_dims", "partial_rotary_factor": "partial_rotary_factor"}
    values = {key: config.values[name] for key, name in keys.items() if name in config.values}
    labels = {key: config.label(name) for key, name in keys.items()}
    both = config.section("rope_parameters")
    if both is not None and any(isinstance(value, dict) for value in both.values.values()):
        if both.values.keys() != {"full_attention", "sliding_attention"}:
            raise CheckpointError(
                f"{both.file} has the keys {', '.join(both.values)}, expected full_attention and sliding_attention"
            )
        values["rope_parameters"] = both.values[layer_type]
        labels["rope_parameters"] = f"rope_parameters: {layer_type}"
    return Config(file=config.file, values=values, labels=labels)


def _sources(spec: ModelSpec, stored: Collection[str]) -> dict[str, Source]:
    return hf_sources(spec, stored, names=_NAMES)


def complete_gemma3_gguf(config: Config) -> Config:
    """Return the configuration of a GGUF file with the scale of its queries, which such files do not hold."""
    scalar = config.values.get("head_dim", _ABSENT["head_dim"])
    if config.values.get("num_hidden_layers") == LAYERS_27B:
        scalar = config.integer("hidden_size") // config.integer("num_attention_heads")
    return replace(config, values={**config.values, "query_pre_attn_scalar": scalar})


# The official 4B and 12B configurations leave most keys out; absence means what the class defaults of [tf] say, except
# for the window, whose default of 4096 no release has.
_ABSENT = MappingProxyType(
    {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "layer_types": None,  # key is younger than the first checkpoints: the pattern decides
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    }
)
_NULLABLE = frozenset({"layer_types", "attn_logit_softcapping", "final_logit_softcapping"})

GEMMA3_TEXT = Family(describe=_describe, absent=_ABSENT, nullable=_NULLABLE, sources=_sources)
GEMMA3 = replace(
    GEMMA3_TEXT,
    describe=_describe_multimodal,
    unused=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
