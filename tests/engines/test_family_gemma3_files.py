"""Gemma 3 as it is published: inside a multimodal checkpoint, as a GGUF file, with its tokenizer and template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.families import describe_model, find_family
from edge_engines.families.gemma3 import complete_gemma3_gguf
from edge_engines.text_files import write_text_files
from edge_runtime.errors import CheckpointError, RequestError
from edge_runtime.session.text import TextCodec
from engines.slow_twin import SlowTwin
from engines.tiny_files import GOLDEN, load_golden, write_folder, write_gguf, write_json

TOLERANCE = 2e-4  # the golden logits were computed in float32, the twin's in float64
TOKENIZER = GOLDEN.parent / "tokenizers" / "gemma3"


def golden_logits(path: Path) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
    """Return the twin's logits of a checkpoint and those of transformers for the golden model."""
    expected = np.load(GOLDEN / "gemma3" / "expected.npz")
    with open_checkpoint(path) as checkpoint:
        return SlowTwin(checkpoint).logits(expected["input_ids"]), expected["logits"]


def multimodal(
    folder: Path, rename: Callable[[str], str], extra: dict[str, NDArray[np.generic]], **config: object
) -> Path:
    """Write the golden model as the language part of a multimodal one."""
    text, tensors = load_golden("gemma3")
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 32}}
    return write_folder(folder, outer | config, {rename(name): tensor for name, tensor in tensors.items()} | extra)


@pytest.mark.parametrize(
    ("rename", "vision"),
    [
        (lambda name: f"language_model.{name}", ""),  # the official checkpoints
        (lambda name: name.replace("model.", "model.language_model.", 1), "model."),  # as written since 2025
        (lambda name: name, ""),
    ],
)
def test_the_language_model_is_taken_out_of_a_multimodal_checkpoint(
    tmp_path: Path, rename: Callable[[str], str], vision: str
) -> None:
    extra = {
        f"{vision}vision_tower.vision_model.embeddings.patch_embedding.weight": np.ones((4, 4), np.float32),
        f"{vision}multi_modal_projector.mm_soft_emb_norm.weight": np.ones(4, np.float32),
    }
    folder = multimodal(tmp_path, rename, extra)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.spec.family == "gemma3"
        told = "2 tensors of multi_modal_projector, vision_tower are not used: the engine takes text only"
        assert told in checkpoint.warnings
    found, wanted = golden_logits(folder)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


def test_c10_only_the_vision_part_may_be_left_over(tmp_path: Path) -> None:
    def official(name: str) -> str:
        return f"language_model.{name}"

    stray = {"language_model.model.layers.0.self_attn.q_proj.bias": np.ones(128, np.float32)}
    with pytest.raises(CheckpointError, match=r"tensor language_model\.model\.layers\.0\S+bias is not part"):
        open_checkpoint(multimodal(tmp_path / "a", official, stray))
    config, tensors = load_golden("gemma3")
    vision = {"vision_tower.patch.weight": np.ones((4, 4), np.float32)}
    with pytest.raises(CheckpointError, match=r"tensor vision_tower\.patch\.weight is not part"):
        open_checkpoint(write_folder(tmp_path / "b", config, tensors | vision))


def test_c05_a_head_beside_the_tied_table_must_be_its_copy(tmp_path: Path) -> None:
    def official(name: str) -> str:
        return f"language_model.{name}"

    embed = load_golden("gemma3")[1]["model.embed_tokens.weight"]
    open_checkpoint(multimodal(tmp_path / "a", official, {"language_model.lm_head.weight": embed.copy()})).close()
    with pytest.raises(
        CheckpointError, match=r"language_model\.lm_head\.weight is not a copy of language_model\.model"
    ):
        open_checkpoint(multimodal(tmp_path / "b", official, {"language_model.lm_head.weight": embed[::-1].copy()}))


def test_a_multimodal_configuration_without_its_text_part_is_refused(tmp_path: Path) -> None:
    for text, message in (
        (None, "text_config = null, expected an object"),
        ({"model_type": "llama"}, 'text_config: model_type = "llama", expected "gemma3_text"'),
        ({"model_type": "gemma3_text"}, "text_config: sliding_window is missing"),
    ):
        config = Config(file="config.json", values={"model_type": "gemma3", "text_config": text})
        assert find_family(config) == "gemma3"
        with pytest.raises(CheckpointError, match=message):
            describe_model(config, "gemma3")


def test_c56_end_ids_of_both_levels_of_the_configuration_count(tmp_path: Path) -> None:
    text, _ = load_golden("gemma3")
    folder = multimodal(tmp_path, lambda name: name, {}, eos_token_id=[1, 106], text_config=text | {"eos_token_id": 50})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.generation.eos_ids == (1, 50, 106)


def gguf_twin(path: Path, edit: Callable[[GGUFWriter], None] | None = None) -> Path:
    """Write the golden model as a converter does: 1 is added to norms, layer types and query scale are left out."""
    config, tensors = load_golden("gemma3")
    config["rope_parameters"] = config["rope_parameters"]["full_attention"]
    shifted = {name: t + 1 if name.endswith("norm.weight") else t for name, t in tensors.items()}
    plain: dict[str, NDArray[np.generic]] = {}
    extra: dict[str, NDArray[np.generic]] = {}
    for name, tensor in shifted.items():
        layer = name.split(".")[2]
        if name.endswith("post_attention_layernorm.weight"):
            extra[f"blk.{layer}.post_attention_norm.weight"] = tensor
        elif name.endswith("post_feedforward_layernorm.weight"):
            extra[f"blk.{layer}.post_ffw_norm.weight"] = tensor
        else:
            plain[name.replace("pre_feedforward_layernorm", "post_attention_layernorm")] = tensor
    return write_gguf(path, config, plain, architecture="gemma3", extra=extra, edit=edit)


def test_a_gguf_file_gives_the_logits_of_its_safetensors_twin(tmp_path: Path) -> None:
    path = gguf_twin(tmp_path / "m.gguf")
    found, wanted = golden_logits(path)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)
    with open_checkpoint(path) as twin, open_checkpoint(GOLDEN / "gemma3") as own:
        assert (twin.spec.norm_offset, own.spec.norm_offset) == (0.0, 1.0)
        np.testing.assert_array_equal(twin.tensor("norm"), own.tensor("norm") + 1)
        for field in ("layers", "rotaries", "query_scale", "embed_scale", "tied_head", "post_norms", "activation"):
            assert getattr(twin.spec, field) == getattr(own.spec, field), field


def test_a_gguf_file_of_the_27b_model_has_its_own_query_scale() -> None:
    shape = {"hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128}
    for layers, scalar in ((62, 168), (48, 128)):
        config = Config(file="m.gguf", values={**shape, "num_hidden_layers": layers})
        assert complete_gemma3_gguf(config).values["query_pre_attn_scalar"] == scalar


def test_c07_linear_scaling_of_a_gguf_file_spares_local_layers(tmp_path: Path) -> None:
    def linear(writer: GGUFWriter) -> None:
        writer.add_string("gemma3.rope.scaling.type", "linear")
        writer.add_float32("gemma3.rope.scaling.factor", 8.0)
        writer.add_float32("gemma3.rope.freq_base_swa", 20000.0)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)

    with open_checkpoint(gguf_twin(tmp_path / "m.gguf", edit=linear)) as checkpoint:
        assert [rotary.inv_freq[0] for rotary in checkpoint.spec.rotaries] == [1 / 8, 1.0]
        assert checkpoint.spec.rotaries[1].base == 20000.0
        assert [layer.window for layer in checkpoint.spec.layers] == [16, 16, None, 16, 16, None, 16]


def test_settings_of_gemma_2_in_a_gguf_file_are_refused(tmp_path: Path) -> None:
    def capped(writer: GGUFWriter) -> None:
        writer.add_final_logit_softcapping(30.0)

    with pytest.raises(CheckpointError, match=r"gemma3\.final_logit_softcapping = 30.0, expected null"):
        open_checkpoint(gguf_twin(tmp_path / "m.gguf", edit=capped))


def real_shape() -> Tokenizer:
    """Return a tokenizer with the steps of the published one: an idle split at spaces, BOS, added plain tokens."""
    state = json.loads((TOKENIZER / "tokenizer.json").read_text())
    state["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    begin: dict[str, object] = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    text: dict[str, object] = {"Sequence": {"id": "A", "type_id": 0}}
    state["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
    }
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens(["\n\n", "▁▁", "<table>"])  # not special, as in the published file
    return tokenizer


@pytest.fixture
def codec(tmp_path: Path) -> TextCodec:
    """A folder with tokenizer and template, taken through the reader and the files of an engine folder."""
    config, tensors = load_golden("gemma3")
    config |= {"vocab_size": 600, "eos_token_id": 1}
    tensors["model.embed_tokens.weight"] = np.zeros((600, 64), np.float32)
    folder = write_folder(tmp_path / "model", config, tensors)
    (folder / "tokenizer.json").write_text(real_shape().to_str())
    (folder / "chat_template.jinja").write_text((TOKENIZER / "chat_template.jinja").read_text())
    write_json(folder / "tokenizer_config.json", {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True})
    write_json(folder / "generation_config.json", {"eos_token_id": [1, 106]})
    engine = tmp_path / "engine"
    engine.mkdir()
    with open_checkpoint(folder) as checkpoint:
        write_text_files(engine, checkpoint)
    return TextCodec.load(engine)


@pytest.mark.parametrize(
    "text", ["Hello world", "  the  fox\n\n\nquick", " leading", "歪🎉 é", "<table>x</table>", "▁"]
)
def test_text_survives_the_sentencepiece_steps_token_by_token(codec: TextCodec, text: str) -> None:
    ids = codec.encode(text)
    assert ids[0] == 2
    joined = b"".join(codec.token_bytes(token) for token in ids).decode()
    assert joined == codec.decode(ids) == text.replace("▁", " ")
    assert not codec.strips_first_space


def test_c55_bos_stands_once_for_chat_and_raw_prompts_and_in_no_stop(codec: TextCodec) -> None:
    for ids in (codec.encode("<bos>Hello"), codec.encode_chat([{"role": "user", "content": "<bos> Hello"}])):
        assert ids[0] == 2
        assert ids.count(2) == 1
    assert codec.stop_ids(["<end_of_turn>"]) == {106}


def test_c56_both_end_tokens_end(codec: TextCodec) -> None:
    assert codec.eos_ids == {1, 106}


@pytest.mark.parametrize("roles", ["system system user", "user user", "assistant"])
def test_c57_a_conversation_the_template_refuses_is_a_client_error(codec: TextCodec, roles: str) -> None:
    messages = [{"role": role, "content": "x"} for role in roles.split()]
    with pytest.raises(RequestError, match="alternate"):
        codec.encode_chat(messages)
    one_system = codec.render_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert one_system.endswith("Hi<end_of_turn>\n<start_of_turn>model\n")
