"""Describe published models by their sizes, without weights: what a plan can be computed from."""

from __future__ import annotations

from edge_engines.checkpoint.spec import LayerSpec, ModelSpec, Rotary


def describe(
    *, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, head_dim: int, vocab: int, tied: bool = True
) -> ModelSpec:
    """Return a decoder of these sizes."""
    return ModelSpec(
        family="llama",
        hidden=hidden,
        ffn=ffn,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        norm_eps=1e-5,
        max_positions=32768,
        layers=(LayerSpec(rotary=0),) * layers,
        rotaries=(Rotary(10_000.0, "default", (1.0,) * (head_dim // 2)),),
        tied_head=tied,
    )


# The models' config.json.
SMOLLM2_135M = describe(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152)
QWEN3_0_6B = describe(layers=28, hidden=1024, ffn=3072, heads=16, kv_heads=8, head_dim=128, vocab=151936)
LLAMA_3_2_1B = describe(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, head_dim=64, vocab=128256)
LLAMA_3_2_3B = describe(layers=28, hidden=3072, ffn=8192, heads=24, kv_heads=8, head_dim=128, vocab=128256)
LLAMA_3_1_8B = describe(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256, tied=False)
