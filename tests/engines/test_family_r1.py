"""DeepSeek-R1-Distill: Qwen2 and Llama blocks told apart by model_type, own markers, a template that opens <think>."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import pre_tokenizers

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import ModelSpec, tensor_shapes
from edge_engines.families import describe_model, find_family
from edge_engines.text_files import write_text_files
from edge_runtime.errors import CheckpointError
from edge_runtime.session.text import TextCodec
from engines.slow_twin import SlowTwin
from engines.tiny_files import GOLDEN, load_golden, write_gguf

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
# Our own writing of what the published template does: BOS, bare system text, no closer behind the user's turn.
CLOSED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "{{ '<｜User｜>' + m.content }}{% else %}"
    "{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
OPENED = CLOSED.replace("{{ '<｜Assistant｜>' }}", "{{ '<｜Assistant｜><think>\\n' }}")  # since February 2025
TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

QWEN_1_5B: dict[str, object] = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "max_window_layers": 21,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "use_mrope": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
LLAMA_8B: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}


def describe(values: dict[str, object], **changes: object) -> ModelSpec:
    config = Config(file="config.json", values=values | changes)
    return describe_model(config, find_family(config))


def test_the_qwen_distill_keeps_its_own_base_and_head() -> None:
    spec = describe(QWEN_1_5B)
    assert (spec.family, spec.rotaries[0].base, spec.tied_head) == ("qwen2", 1e4, False)
    assert {name.split(".")[2] for name, _ in tensor_shapes(spec) if name.endswith("_bias")} == {
        "q_bias",
        "k_bias",
        "v_bias",
    }
    assert {layer.window for layer in spec.layers} == {None}
    assert spec.scores_fp32
    other = describe(QWEN_1_5B, rope_theta=1000000.0, tie_word_embeddings=True)
    assert (other.rotaries[0].base, other.tied_head) == (1e6, True)


def test_the_llama_distill_has_scaled_rotary_and_no_bias() -> None:
    spec = describe(LLAMA_8B)
    assert (spec.family, spec.rotaries[0].kind, spec.head_dim) == ("llama", "llama3", 128)
    assert not any(name.endswith("_bias") for name, _ in tensor_shapes(spec))


def test_c02_the_rope_scheme_of_the_later_qwen3_distill_is_refused() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attn_factor": 0.878}
    values = QWEN_1_5B | {"model_type": "qwen3", "head_dim": 128, "rope_scaling": yarn}
    with pytest.raises(CheckpointError, match='rope_type = "yarn", expected one of default, linear, llama3'):
        describe(values)


def vocabulary(*, thinks: bool = True) -> tuple[list[str], list[int]]:
    """Return tokens and kinds: bytes, the markers, the reasoning tags as plain added tokens, padding."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    marked = {EOS: 3, USER: 3, ASSISTANT: 3, BOS: 3} | ({"<think>": 4, "</think>": 4} if thinks else {})
    tokens = [*letters, "Hi", *marked]
    padding = [f"[PAD{i}]" for i in range(320 - len(tokens))]
    return tokens + padding, [1] * (len(letters) + 1) + list(marked.values()) + [5] * len(padding)


def r1_file(path: Path, *, base: str, template: str = OPENED, **options: Any) -> Path:
    """Write a distilled model as a converter does: golden weights, own markers, BOS asked for."""
    golden, architecture, pre = {
        "qwen": ("qwen2", "qwen2", "deepseek-r1-qwen"),
        "llama": ("llama-tied", "llama", "llama-bpe"),
    }[base]
    config, tensors = load_golden(golden)
    tokens, kinds = vocabulary(**options)

    def text(writer: GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(kinds)
        writer.add_token_merges(["H i"])
        writer.add_bos_token_id(tokens.index(BOS))
        writer.add_eos_token_id(tokens.index(EOS))
        writer.add_pad_token_id(tokens.index(EOS))
        writer.add_add_bos_token(True)
        writer.add_chat_template(template)

    return write_gguf(path, config, tensors, architecture=architecture, edit=text)


def codec_of(tmp_path: Path, **options: Any) -> TextCodec:
    """Take a distilled model through the reader and the text files of an engine folder."""
    folder = tmp_path / "engine"
    folder.mkdir()
    with open_checkpoint(r1_file(tmp_path / "m.gguf", **options)) as checkpoint:
        write_text_files(folder, checkpoint)
    return TextCodec.load(folder)


@pytest.mark.parametrize(("base", "golden"), [("qwen", "qwen2"), ("llama", "llama-tied")])
def test_a_gguf_distill_gives_the_logits_of_its_blocks(tmp_path: Path, base: str, golden: str) -> None:
    expected = np.load(GOLDEN / golden / "expected.npz")
    with open_checkpoint(r1_file(tmp_path / "m.gguf", base=base)) as checkpoint:
        found = SlowTwin(checkpoint).logits(expected["input_ids"])
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=2e-4)  # float32 reference


@pytest.mark.parametrize("base", ["qwen", "llama"])
def test_c55_bos_stands_once_in_chats_and_raw_prompts(tmp_path: Path, base: str) -> None:
    codec = codec_of(tmp_path, base=base)
    assert codec.bos_id == vocabulary()[0].index(BOS)
    for ids in (codec.encode_chat(TALK), codec.encode("Hi"), codec.encode(f"{BOS}Hi")):
        assert ids[0] == codec.bos_id
        assert ids.count(codec.bos_id) == 1


@pytest.mark.parametrize("base", ["qwen", "llama"])
def test_c56_the_end_of_the_sentence_ends_although_padding_is_the_same_token(tmp_path: Path, base: str) -> None:
    codec = codec_of(tmp_path, base=base)
    assert codec.eos_ids == {vocabulary()[0].index(EOS)}


@pytest.mark.parametrize("base", ["qwen", "llama"])
def test_c59_the_template_is_rendered_as_written_and_its_opener_is_told(tmp_path: Path, base: str) -> None:
    codec = codec_of(tmp_path, base=base)
    assert codec.render_chat(TALK) == f"{BOS}Be brief.{USER}Hi{ASSISTANT}<think>\n"
    assert codec.opens_reasoning(codec.encode_chat(TALK))
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x</think>b"}, TALK[1]]
    assert codec.render_chat(history) == f"{BOS}{USER}a{ASSISTANT}b{EOS}{USER}Hi{ASSISTANT}<think>\n"


@pytest.mark.parametrize("thinks", [True, False])
def test_c59_a_template_without_the_opener_opens_nothing(tmp_path: Path, thinks: bool) -> None:
    codec = codec_of(tmp_path, base="qwen", template=CLOSED, thinks=thinks)
    assert not codec.opens_reasoning(codec.encode_chat(TALK))


def test_markers_give_no_text_and_reasoning_tags_do(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, base="qwen")
    tokens, _ = vocabulary()
    shown = [tokens.index(token) for token in (BOS, "<think>", "Hi", "</think>", ASSISTANT, EOS)]
    assert codec.decode(shown) == "<think>Hi</think>"
