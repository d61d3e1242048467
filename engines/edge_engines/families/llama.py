"""Say what Llama 2 and 3, SmolLM2 and the Llama distills of DeepSeek-R1 are."""

from __future__ import annotations

from dataclasses import replace

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.families.dense import NULLABLE, describe_plain, no_windows
from edge_engines.families.entry import Family

LLAMA3_VOCAB = 128256  # rows of Llama 3: the mark of checkpoints that never use the rotary base of Llama 2


def _describe(config: Config) -> ModelSpec:
    # Llama 2 configurations of 2023 leave the base out and mean 1e4 (mit-han-lab/llm-awq PR #326).
    base = None if config.integer("vocab_size") == LLAMA3_VOCAB else 1e4
    bias = config.flag("attention_bias")
    spec = describe_plain(config, "llama", no_windows(config), absent_base=base)
    return replace(spec, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias"))


LLAMA = Family(
    describe=_describe,
    absent={
        "num_key_value_heads": None,  # before grouped queries: as many as query heads [tf]
        "head_dim": None,  # hidden / heads [tf]
        "hidden_act": "silu",  # [tf]
        "attention_bias": False,  # key is younger than the first checkpoints [tf]
        "mlp_bias": False,  # the same
        "tie_word_embeddings": False,  # [tf]
    },
    nullable=NULLABLE,
)
