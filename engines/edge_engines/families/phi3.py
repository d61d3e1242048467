"""Say what Phi-3, Phi-3.5 and Phi-4-mini are: fused projections, longrope, a part of each head rotated."""

from __future__ import annotations

from collections.abc import Collection

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.longrope import read_longrope
from edge_engines.checkpoint.mapping import Source
from edge_engines.checkpoint.spec import LayerSpec, ModelSpec
from edge_engines.checkpoint.tensor_names import hf_sources
from edge_engines.families.dense import NULLABLE, describe_dense, one_window, read_head_dim, require
from edge_engines.families.entry import Family
from edge_runtime.errors import CheckpointError


def _describe(config: Config) -> ModelSpec:
    rotary = read_longrope(config, read_head_dim(config), absent_base=1e4)  # [tf]
    require(config, "hidden_act", "silu")
    layers = tuple(LayerSpec(rotary=0, window=window) for window in one_window(config))
    return describe_dense(config, "phi3", layers, (rotary,))


def _sources(spec: ModelSpec, stored: Collection[str]) -> dict[str, Source]:
    return hf_sources(spec, stored, fused=True)


def check_phi3_gguf(config: Config) -> Config:
    """Return the configuration of a GGUF file unless it is silent about the window (0 stands for none)."""
    if "sliding_window" not in config.values:
        raise CheckpointError(
            f"{config.file}: {config.label('sliding_window')} is missing",
            remedy="convert the model again with a current converter: older ones left the window out",
        )
    return config


PHI3 = Family(
    describe=_describe,
    absent={
        # original_max_position_embeddings is not here: longrope can't be chosen without it.
        "num_key_value_heads": None,  # as many as query heads [tf]
        "head_dim": None,  # hidden / heads [tf]
        "hidden_act": "silu",  # [tf]
        "sliding_window": None,  # [tf]
        "tie_word_embeddings": False,  # [tf]; Phi-4-mini states true
    },
    nullable=NULLABLE,
    sources=_sources,
)
