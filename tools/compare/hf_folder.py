"""Write a checkpoint as a Hugging Face folder with FP32 weights, bit for bit those that our reader returns."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import save_file

from edge_engines.checkpoint.open import Checkpoint
from edge_engines.checkpoint.spec import ModelSpec, tensor_shapes
from edge_engines.checkpoint.tensor_names import hf_sources
from edge_runtime.errors import UsageError


def write_hf_folder(folder: Path, model: Checkpoint) -> None:
    """Write config.json, model.safetensors and, where the model has them, the tokenizer's files into `folder`."""
    config = hf_config(model)
    sources = hf_sources(model.spec)
    tensors = {sources[name].name: model.tensor(name) for name, _ in tensor_shapes(model.spec)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    if model.text is None:
        return
    (folder / "tokenizer.json").write_bytes(model.text.tokenizer_json)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": model.text.bos_token,
        "eos_token": model.text.eos_token,
    }
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in settings.items() if value})


def hf_config(model: Checkpoint) -> dict[str, object]:
    """Return config.json of a model. Raises UsageError for a kind of model that this comparison does not write."""
    spec = model.spec
    _check_kind(spec)
    eos, bos = model.generation.eos_ids, model.generation.bos_id
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "vocab_size": spec.vocab,
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rotaries[0].base,
        "hidden_act": spec.activation,
        "attention_bias": spec.qkv_bias,
        "mlp_bias": spec.mlp_bias,
        "tie_word_embeddings": spec.tied_head,
        "torch_dtype": "float32",
        "bos_token_id": spec.vocab - 1 if bos is None else bos,
        "eos_token_id": eos[0] if eos else spec.vocab - 1,
    }


def _check_kind(spec: ModelSpec) -> None:
    rotary = spec.rotaries[0].kind
    if spec.family != "llama" or rotary != "default":
        raise UsageError(
            f"--checkpoint: family {spec.family} with {rotary} rotary scaling can't be compared",
            remedy="give one of family llama without rotary scaling",
        )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
