"""Translate GGUF metadata to the configuration keys the families read.

Errors keep the file's own words through `Config.labels`. Key meanings: the GGUF specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.gguf_file import GgufFile
from edge_engines.checkpoint.tensor_names import (
    GGUF_LONG_FACTORS,
    GGUF_NAMES,
    GGUF_ROPE_FACTORS,
    GGUF_SHORT_FACTORS,
)
from edge_runtime.errors import CheckpointError

# Configuration key -> metadata key after the name of the architecture.
KEYS: Mapping[str, str] = MappingProxyType(
    {
        "num_hidden_layers": "block_count",
        "max_position_embeddings": "context_length",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
        "rope_local_base_freq": "rope.freq_base_swa",
        "rotary_dims": "rope.dimension_count",
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "sliding_window": "attention.sliding_window",
        "sliding_window_pattern": "attention.sliding_window_pattern",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "vocab_size": "vocab_size",
    }
)


def read_architecture(file: GgufFile) -> str:
    """Return `general.architecture`."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(f"{file.path}: general.architecture is missing", remedy="convert the model again")
    return architecture


def gguf_config(file: GgufFile, architecture: str) -> Config:
    """Return the model's configuration. Raises CheckpointError for what no key of ours can express."""
    metadata, path = file.metadata, str(file.path)
    labels = {key: f"{architecture}.{name}" for key, name in KEYS.items()}
    values = {key: _one_for_all_layers(path, label, metadata) for key, label in labels.items() if label in metadata}
    embed = file.shapes.get(GGUF_NAMES["embed"])
    if "vocab_size" not in values and embed:
        values["vocab_size"] = embed[0]  # the key is optional
    if "num_attention_heads" in values:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
    _refuse_experts(path, architecture, metadata)
    values |= _facts_from_tensors(file)
    values |= _scaling(architecture, file)
    if values.get("sliding_window") == 0:
        values["sliding_window"] = None  # so written where a model without a window might be taken for one with
    labels |= {"rope_scaling": f"{architecture}.rope.scaling", "rope_freqs": GGUF_ROPE_FACTORS}
    config = Config(file=path, values=values, labels=labels)
    _check_head_sizes(config, architecture, metadata)
    return config


def _one_for_all_layers(path: str, label: str, metadata: Mapping[str, object]) -> object:
    """Return a value; a list with one value by layer only if all are the same."""
    value = metadata[label]
    if not isinstance(value, list):
        return value
    if not value or any(item != value[0] for item in value):
        raise CheckpointError(f"{path}: {label} differs by layer ({value[:8]}...), which is not supported")
    return value[0]


def _facts_from_tensors(file: GgufFile) -> dict[str, object]:
    """Return what GGUF says by holding a tensor or not."""
    first = "blk.0."
    facts: dict[str, object] = {
        "attention_bias": f"{first}attn_q.bias" in file.shapes,
        "mlp_bias": f"{first}ffn_gate.bias" in file.shapes,
    }
    if GGUF_ROPE_FACTORS in file.shapes:
        facts["rope_freqs"] = tuple(file.read(GGUF_ROPE_FACTORS).ravel().tolist())
    return facts


def _scaling(architecture: str, file: GgufFile) -> dict[str, object]:
    """Return the rope scaling section; kind "none" means no section. Two tensors of factors mean longrope."""
    prefix, metadata = f"{architecture}.rope.scaling.", file.metadata
    found = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    kind = found.pop("type", None)
    if f"{architecture}.rope.scale_linear" in metadata:  # older name
        kind, found["factor"] = kind or "linear", metadata[f"{architecture}.rope.scale_linear"]
    lists = {"long_factor": GGUF_LONG_FACTORS, "short_factor": GGUF_SHORT_FACTORS}
    held = {key: file.read(name).ravel().tolist() for key, name in lists.items() if name in file.shapes}
    if held:
        return {"rope_scaling": {"rope_type": "longrope", "attention_factor": found.get("attn_factor"), **held}}
    if kind in (None, "none"):
        return {}
    return {"rope_scaling": {"rope_type": kind, **found}}


def _refuse_experts(path: str, architecture: str, metadata: Mapping[str, object]) -> None:
    experts = metadata.get(f"{architecture}.expert_count", 0)
    if experts:
        raise CheckpointError(f"{path}: {architecture}.expert_count = {experts}: mixtures of experts are not supported")


def _check_head_sizes(config: Config, architecture: str, metadata: Mapping[str, object]) -> None:
    """Raise CheckpointError unless keys and values span the same head."""
    hidden, heads = config.values.get("hidden_size"), config.values.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1:
        return  # the family names the missing key
    head_dim = config.values.get("head_dim", hidden // heads)
    label = f"{architecture}.attention.value_length"
    value = metadata.get(label, head_dim)
    if value != head_dim:
        raise CheckpointError(f"{config.file}: {label} = {value}, expected the head size {head_dim}")
