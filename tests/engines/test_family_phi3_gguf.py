"""Phi-3 as a GGUF file: fused tensors, rotary factors as tensors, a window of 0, white space behind markers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import quantize
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edge_engines.checkpoint.gguf_tokenizer import gguf_text_assets
from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import tensor_shapes
from edge_runtime.errors import CheckpointError
from engines.slow_twin import SlowTwin
from engines.tiny_files import GOLDEN, load_golden

TOLERANCE = 2e-4  # the golden logits were computed in float32, the twin's in float64
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
FACTORS = {
    "rope_factors_long.weight": np.arange(2, 10, dtype=np.float32),
    "rope_factors_short.weight": np.arange(1, 9, dtype=np.float32),
}


def write_twin(
    path: Path,
    *,
    window: int | None = 0,
    rotated: int = 16,
    kind: Kind = Kind.F32,
    extra: Mapping[str, NDArray[np.generic]] | None = None,
    edit: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """Write the golden model with the keys and names of the converter, which states no head size."""
    config, tensors = load_golden("phi3")
    writer = GGUFWriter(path, "phi3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_rope_scaling_orig_ctx_len(64)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(10000.0)
    if window is not None:
        writer.add_sliding_window(window)
    if edit:
        edit(writer)
    for name, tensor in tensors.items():
        if kind != Kind.F32 and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            writer.add_tensor(gguf_name(name), quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), tensor)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    fixed = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in fixed:
        return f"{fixed[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.weight"


def test_a_gguf_file_gives_the_logits_of_its_safetensors_twin(tmp_path: Path) -> None:
    expected = np.load(GOLDEN / "phi3" / "expected.npz")
    with open_checkpoint(write_twin(tmp_path / "m.gguf")) as twin, open_checkpoint(GOLDEN / "phi3") as own:
        np.testing.assert_allclose(
            SlowTwin(twin).logits(expected["input_ids"]), expected["logits"], rtol=0, atol=TOLERANCE
        )
        for field in ("layers", "rotaries", "head_dim", "num_kv_heads", "tied_head", "family"):
            assert getattr(twin.spec, field) == getattr(own.spec, field), field
        for name, _ in tensor_shapes(own.spec):
            np.testing.assert_array_equal(twin.tensor(name), own.tensor(name), err_msg=name)


def test_rows_of_a_quantised_fused_tensor_are_cut_like_those_of_a_plain_one(tmp_path: Path) -> None:
    with (
        open_checkpoint(write_twin(tmp_path / "m.gguf", kind=Kind.Q8_0)) as twin,
        open_checkpoint(GOLDEN / "phi3") as own,
    ):
        for name in ("layers.2.q", "layers.2.k", "layers.2.v", "layers.2.gate", "layers.2.up"):
            error = np.linalg.norm(twin.tensor(name) - own.tensor(name)) / np.linalg.norm(own.tensor(name))
            assert 0 < error < 1e-2  # 8 bits a value


def test_rope_factors_of_the_file_are_both_lists(tmp_path: Path) -> None:
    def scale(writer: GGUFWriter) -> None:
        writer.add_rope_scaling_attn_factors(1.25)

    with open_checkpoint(write_twin(tmp_path / "m.gguf", extra=FACTORS, edit=scale)) as checkpoint:
        rotary = checkpoint.spec.rotaries[0]
        assert (rotary.kind, rotary.attention_factor) == ("longrope", 1.25)
        assert rotary.for_capacity(64).inv_freq[0] == 1.0
        assert rotary.for_capacity(65).inv_freq[0] == 0.5
    with open_checkpoint(write_twin(tmp_path / "n.gguf", extra=FACTORS)) as checkpoint:
        assert checkpoint.spec.rotaries[0].attention_factor == pytest.approx((1 + np.log(4) / np.log(64)) ** 0.5)


def test_c10_one_list_alone_and_factors_of_another_family_are_refused(tmp_path: Path) -> None:
    (long, values), _ = FACTORS.items()
    with pytest.raises(CheckpointError, match="short_factor is missing"):
        open_checkpoint(write_twin(tmp_path / "m.gguf", extra={long: values}))
    with pytest.raises(CheckpointError, match=r"tensor rope_freqs\.weight is not part of the model"):
        open_checkpoint(write_twin(tmp_path / "n.gguf", extra={"rope_freqs.weight": values}))


def test_the_number_of_rotated_dims_is_read(tmp_path: Path) -> None:
    with open_checkpoint(write_twin(tmp_path / "m.gguf", rotated=12)) as checkpoint:
        assert (checkpoint.spec.head_dim, checkpoint.spec.rotaries[0].dim) == (16, 12)
    for impossible in (18, 11):
        with pytest.raises(CheckpointError, match=rf"phi3\.rope\.dimension_count = {impossible}, expected an even"):
            open_checkpoint(write_twin(tmp_path / f"{impossible}.gguf", rotated=impossible))


def test_c08_a_window_of_0_means_none_and_silence_is_refused(tmp_path: Path) -> None:
    for window, expected in ((0, None), (7, 7)):
        with open_checkpoint(write_twin(tmp_path / f"{window}.gguf", window=window)) as checkpoint:
            assert [layer.window for layer in checkpoint.spec.layers] == [expected] * 3
    with pytest.raises(CheckpointError, match=r"phi3\.attention\.sliding_window is missing; convert the model again"):
        open_checkpoint(write_twin(tmp_path / "m.gguf", window=None))


NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def rebuilt(architecture: str) -> Tokenizer:
    """Return the tokenizer of a GGUF file with markers and a few letters."""
    marked = {"<unk>": UNKNOWN, "<s>": CONTROL, "<|endoftext|>": CONTROL, "<|user|>": CONTROL, "<|end|>": CONTROL}
    letters = dict.fromkeys(("▁", "a", "b", "▁a", "\n"), NORMAL)
    kinds = marked | {f"<0x{byte:02X}>": BYTE for byte in range(256)} | letters
    metadata: dict[str, object] = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(kinds),
        "tokenizer.ggml.token_type": list(kinds.values()),
        "tokenizer.ggml.scores": [0.0] * len(kinds),
    }
    text = gguf_text_assets(metadata, "m.gguf")
    assert text is not None
    return Tokenizer.from_str(text.tokenizer_json.decode())


def test_white_space_behind_the_markers_of_phi_3_is_dropped() -> None:
    def tokens(architecture: str) -> list[str | None]:
        made = rebuilt(architecture)
        ids = made.encode("<s> a<|user|>\na<|end|>\n<|user|>\n", add_special_tokens=False).ids
        return [made.id_to_token(token) for token in ids]

    assert tokens("phi3") == ["<s>", "▁", "▁a", "<|user|>", "▁a", "<|end|>", "<|user|>"]
    assert tokens("llama").count("\n") == 3
