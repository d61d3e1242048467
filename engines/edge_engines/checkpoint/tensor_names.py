"""Name the tensors of common checkpoints: canonical name -> name in the files."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from edge_engines.checkpoint.mapping import Source
from edge_engines.checkpoint.spec import ModelSpec, tensor_shapes

# {i} is the layer. Biases stand beside their weight in both layouts.
HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "head": "lm_head.weight",
        "attn_norm": "model.layers.{i}.input_layernorm.weight",
        "q": "model.layers.{i}.self_attn.q_proj.weight",
        "k": "model.layers.{i}.self_attn.k_proj.weight",
        "v": "model.layers.{i}.self_attn.v_proj.weight",
        "o": "model.layers.{i}.self_attn.o_proj.weight",
        "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
        "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "gate": "model.layers.{i}.mlp.gate_proj.weight",
        "up": "model.layers.{i}.mlp.up_proj.weight",
        "down": "model.layers.{i}.mlp.down_proj.weight",
    }
)
GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed": "token_embd.weight",
        "norm": "output_norm.weight",
        "head": "output.weight",
        "attn_norm": "blk.{i}.attn_norm.weight",
        "q": "blk.{i}.attn_q.weight",
        "k": "blk.{i}.attn_k.weight",
        "v": "blk.{i}.attn_v.weight",
        "o": "blk.{i}.attn_output.weight",
        "q_norm": "blk.{i}.attn_q_norm.weight",
        "k_norm": "blk.{i}.attn_k_norm.weight",
        "mlp_norm": "blk.{i}.ffn_norm.weight",
        "gate": "blk.{i}.ffn_gate.weight",
        "up": "blk.{i}.ffn_up.weight",
        "down": "blk.{i}.ffn_down.weight",
    }
)
GGUF_ROPE_FACTORS = "rope_freqs.weight"


def hf_sources(spec: ModelSpec) -> dict[str, Source]:
    """Return the sources of a Hugging Face checkpoint in which no tensor is fused."""
    return {name: Source(_source_name(name, HF_NAMES)) for name, _ in tensor_shapes(spec)}


def gguf_sources(spec: ModelSpec, *, paired: bool) -> dict[str, Source]:
    """Return the sources of a GGUF file in which no tensor is fused.

    `paired`: the converter laid the rotary pairs of q and k side by side (architecture llama).
    """
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads} if paired else {}
    return {
        name: Source(
            _source_name(name, GGUF_NAMES),
            paired_heads=heads.get(name.rpartition(".")[2].removesuffix("_bias"), 0),
        )
        for name, _ in tensor_shapes(spec)
    }


def _source_name(canonical: str, names: Mapping[str, str]) -> str:
    """Translate "layers.3.q_bias" through the template of "q"."""
    *layer, part = canonical.split(".")
    if part.endswith("_bias"):
        template = names[part.removesuffix("_bias")].removesuffix(".weight") + ".bias"
    else:
        template = names[part]
    return template.format(i=layer[1]) if layer else template
