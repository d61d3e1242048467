"""Name the tensors of common checkpoints: canonical name -> name in the files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
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
        "qkv": "model.layers.{i}.self_attn.qkv_proj.weight",
        "o": "model.layers.{i}.self_attn.o_proj.weight",
        "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
        "mlp_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "gate": "model.layers.{i}.mlp.gate_proj.weight",
        "up": "model.layers.{i}.mlp.up_proj.weight",
        "gate_up": "model.layers.{i}.mlp.gate_up_proj.weight",
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
        "qkv": "blk.{i}.attn_qkv.weight",
        "o": "blk.{i}.attn_output.weight",
        "q_norm": "blk.{i}.attn_q_norm.weight",
        "k_norm": "blk.{i}.attn_k_norm.weight",
        "post_attn_norm": "blk.{i}.post_attention_norm.weight",
        "mlp_norm": "blk.{i}.ffn_norm.weight",
        "post_mlp_norm": "blk.{i}.post_ffw_norm.weight",
        "gate": "blk.{i}.ffn_gate.weight",
        "up": "blk.{i}.ffn_up.weight",
        "gate_up": "blk.{i}.ffn_up.weight",  # twice as many rows
        "down": "blk.{i}.ffn_down.weight",
    }
)
GGUF_ROPE_FACTORS = "rope_freqs.weight"
GGUF_LONG_FACTORS, GGUF_SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"

# What stands before the body's and before the head's tensors where the language model is one part of several: in the
# checkpoints of early 2025, and as transformers writes them since 4.52.
LANGUAGE_PREFIXES = (("language_model.model.", "language_model."), ("model.language_model.", ""))


def hf_sources(
    spec: ModelSpec, stored: Collection[str] = (), *, names: Mapping[str, str] = HF_NAMES, fused: bool = False
) -> dict[str, Source]:
    """Return the sources of a Hugging Face checkpoint that holds the tensors `stored`; of a tied model the head too.

    `fused`: q, k, v are one tensor, gate and up another.
    """
    names = _relocate(names, stored)
    return {"head": Source(names["head"]), **_sources(spec, names, fused)}


def gguf_sources(spec: ModelSpec, *, paired: bool = False, fused: bool = False) -> dict[str, Source]:
    """Return the sources of a GGUF file.

    `paired`: the converter laid the rotary pairs of q and k side by side (architecture llama). `fused`: as above.
    """
    sources = _sources(spec, GGUF_NAMES, fused)
    if not paired:
        return sources
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads}
    return {
        name: replace(source, paired_heads=heads.get(name.rpartition(".")[2].removesuffix("_bias"), 0))
        for name, source in sources.items()
    }


def _relocate(names: Mapping[str, str], stored: Collection[str]) -> dict[str, str]:
    """Return the names with the prefix under which the language model is stored."""
    embed = names["embed"].removeprefix("model.")
    body, head = next((both for both in LANGUAGE_PREFIXES if both[0] + embed in stored), ("model.", ""))
    return {part: head + name if part == "head" else body + name.removeprefix("model.") for part, name in names.items()}


def _sources(spec: ModelSpec, names: Mapping[str, str], fused: bool) -> dict[str, Source]:
    parts = _fused_parts(spec) if fused else {}
    sources = {}
    for name, _ in tensor_shapes(spec):
        layer, _, part = name.rpartition(".")
        whole, rows = parts.get(part, (part, None))
        sources[name] = Source(_source_name(f"{layer}.{whole}" if layer else whole, names), rows)
    return sources


def _fused_parts(spec: ModelSpec) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return part -> (fused tensor, rows): q, k, v in this order, gate before up. Source: modeling_phi3."""
    q, kv, ffn = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.ffn
    return {
        "q": ("qkv", (0, q)),
        "k": ("qkv", (q, q + kv)),
        "v": ("qkv", (q + kv, q + 2 * kv)),
        "gate": ("gate_up", (0, ffn)),
        "up": ("gate_up", (ffn, 2 * ffn)),
    }


def _source_name(canonical: str, names: Mapping[str, str]) -> str:
    """Translate "layers.3.q_bias" through the template of "q"."""
    *layer, part = canonical.split(".")
    if part.endswith("_bias"):
        template = names[part.removesuffix("_bias")].removesuffix(".weight") + ".bias"
    else:
        template = names[part]
    return template.format(i=layer[1]) if layer else template
