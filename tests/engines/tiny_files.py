"""Write tiny checkpoints for tests: the golden models, changed where a test needs it, in both file formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
GOLDEN_MODELS = ("llama-tied", "llama3-scaled", "qwen2", "qwen3", "mistral-window")

Tensors = dict[str, NDArray[np.generic]]
Config = dict[str, Any]

GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def load_golden(name: str) -> tuple[Config, Tensors]:
    """Return configuration and tensors of a golden model, to be changed at will."""
    folder = GOLDEN / name
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def write_folder(folder: Path, config: Config, tensors: Tensors) -> Path:
    """Write a Hugging Face folder with one weight file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, config: Config, tensors: Tensors, num_shards: int) -> Path:
    """Write a Hugging Face folder whose tensors lie in several files."""
    folder.mkdir(parents=True)
    write_json(folder / "config.json", config)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::num_shards]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def write_gguf(
    path: Path,
    config: Config,
    tensors: Tensors,
    *,
    architecture: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    extra: Mapping[str, NDArray[np.generic]] | None = None,
    edit: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """Write what a converter would: for architecture llama the rows of q and k come in rotary pairs.

    Matrices whose rows fit are stored as `kind`, all else as F32. `edit` adds further metadata.
    """
    writer = GGUFWriter(path, architecture)
    _add_geometry(writer, config)
    if edit:
        edit(writer)
    for name, tensor in tensors.items():
        heads = _paired_heads(name, config) if architecture == "llama" else 0
        values = _pair_rows(tensor, heads) if heads else tensor
        if kind != GGMLQuantizationType.F32 and values.ndim == 2 and values.shape[1] % 32 == 0:
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), values.astype(np.float32))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    """Translate a Hugging Face tensor name to what a converter calls it."""
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    part, _, suffix = rest.rpartition(".")
    return f"blk.{layer}.{GGUF_PARTS[part]}.{suffix}"


def _add_geometry(writer: GGUFWriter, config: Config) -> None:
    rope = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])


def _paired_heads(name: str, config: Config) -> int:
    if "q_proj" in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if "k_proj" in name else 0


def _pair_rows(tensor: NDArray[np.generic], heads: int) -> NDArray[np.generic]:
    """Interleave the two halves of each head: rows 0, D/2, 1, D/2 + 1 ..."""
    size = tensor.shape[0] // heads
    order = np.arange(size).reshape(2, size // 2).T.ravel()
    return np.concatenate([tensor[head * size : (head + 1) * size][order] for head in range(heads)])
