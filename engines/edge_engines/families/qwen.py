"""Say what Qwen2, Qwen2.5, Qwen3 and the Qwen2 distills of DeepSeek-R1 are."""

from __future__ import annotations

from dataclasses import replace

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.families.dense import (
    NULLABLE,
    Windows,
    count_layers,
    describe_plain,
    listed_windows,
    no_windows,
)
from edge_engines.families.entry import Family


def _describe_qwen2(config: Config) -> ModelSpec:
    spec = describe_plain(config, "qwen2", _windows(config), absent_base=None)
    # Bias on q, k, v without a flag that says so [tf]; QK overflows FP16 (C43).
    return replace(spec, qkv_bias=True, scores_fp32=True)


def _describe_qwen3(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    spec = describe_plain(config, "qwen3", _windows(config), absent_base=None)
    return replace(spec, qkv_bias=bias, o_bias=bias, qk_norm=True)


def _windows(config: Config) -> Windows:
    """Return the windows by layer: these configurations set a window and then mostly turn it off (C08)."""
    if not config.flag("use_sliding_window"):
        return no_windows(config)
    window = config.integer("sliding_window")
    kinds = config.value("layer_types")
    if kinds is None:
        full = config.integer("max_window_layers")  # the first so many layers see everything [tf]
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(count_layers(config))]
    return listed_windows(config, kinds, window)


QWEN2 = Family(
    describe=_describe_qwen2,
    absent={
        "head_dim": None,  # hidden / heads [tf]
        "hidden_act": "silu",  # [tf]
        "use_sliding_window": False,  # [tf]
        "layer_types": None,  # key is younger than most checkpoints: max_window_layers decides
        "tie_word_embeddings": False,  # [tf]
    },
    nullable=NULLABLE,
)

QWEN3 = Family(
    describe=_describe_qwen3,
    absent={
        # head_dim is not here: 128 does not follow from hidden / heads, and every release states it.
        "hidden_act": "silu",  # [tf]
        "attention_bias": False,  # [tf]
        "use_sliding_window": False,  # [tf]
        "layer_types": None,
        "tie_word_embeddings": False,  # [tf]
    },
    nullable=NULLABLE - {"head_dim"},
)
