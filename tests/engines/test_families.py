"""Each family entry says what its keys mean: present, null and absent are three cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import ModelSpec, tensor_shapes
from edge_engines.families import FAMILIES, describe_model, find_family
from edge_runtime.errors import CheckpointError
from engines.slow_twin import SlowTwin
from engines.tiny_files import GOLDEN, load_golden, write_folder

BASE: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_theta": 1e6,
    "sliding_window": None,
}


def describe(family: str, without: tuple[str, ...] = (), **changes: object) -> ModelSpec:
    values = {key: value for key, value in (BASE | changes).items() if key not in without}
    return describe_model(Config(file="config.json", values=values), family)


@pytest.mark.parametrize("model_type", ["gpt2", "gemma2", "phi", "Llama", "mixtral", "../llama"])
def test_an_unknown_model_type_is_refused_with_the_supported_ones(model_type: str) -> None:
    with pytest.raises(CheckpointError, match="supported: llama, qwen2, qwen3, mistral, gemma3_text, gemma3, phi3"):
        find_family(Config(file="config.json", values={"model_type": model_type}))


@pytest.mark.parametrize("family", FAMILIES.keys() - {"gemma3_text", "gemma3"})  # these give most absent keys a meaning
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "rms_norm_eps"])
def test_a_missing_dimension_is_an_error_that_names_the_key(family: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        describe(family, without=(key,))
    with pytest.raises(CheckpointError, match=f"{key} is null"):
        describe(family, **{key: None})


@pytest.mark.parametrize("value", [0, -1, 2.5, "64", True, 2**31, 10**30])
def test_an_impossible_dimension_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match=r"num_hidden_layers = .*expected a whole number"):
        describe("llama", num_hidden_layers=value)


def test_kv_heads_must_divide_query_heads() -> None:
    assert describe("llama", num_attention_heads=9, num_key_value_heads=3).num_kv_heads == 3
    with pytest.raises(CheckpointError, match="num_key_value_heads = 3, expected a divisor of the 4"):
        describe("llama", num_key_value_heads=3)


def test_absent_kv_heads_mean_no_grouping_for_llama_and_phi3_and_nothing_for_others() -> None:
    for family in ("llama", "phi3"):
        assert describe(family, without=("num_key_value_heads",)).num_kv_heads == 4
        assert describe(family, num_key_value_heads=None).num_kv_heads == 4
    for family in ("qwen2", "qwen3", "mistral"):
        with pytest.raises(CheckpointError, match="num_key_value_heads is missing"):
            describe(family, without=("num_key_value_heads",))


def test_another_activation_is_refused() -> None:
    with pytest.raises(CheckpointError, match="hidden_act"):
        describe("llama", hidden_act="gelu")


def test_c03_an_absent_base_means_1e4_for_llama_2_only() -> None:
    assert describe("llama", without=("rope_theta",)).rotaries[0].base == 1e4
    assert describe("mistral", without=("rope_theta",)).rotaries[0].base == 1e4
    for family, changes in (("llama", {"vocab_size": 128256}), ("qwen2", {}), ("qwen3", {})):
        with pytest.raises(CheckpointError, match="rope_theta is missing"):
            describe(family, without=("rope_theta",), **changes)


@pytest.mark.parametrize(
    ("hidden", "heads", "q_shape", "o_shape"),
    [(1024, 16, (2048, 1024), (1024, 2048)), (2560, 32, (4096, 2560), (2560, 4096))],
)
def test_c04_head_dim_comes_from_the_config(
    hidden: int, heads: int, q_shape: tuple[int, int], o_shape: tuple[int, int]
) -> None:
    spec = describe("qwen3", hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=8, head_dim=128)
    shapes = dict(tensor_shapes(spec))
    assert (shapes["layers.0.q"], shapes["layers.0.o"]) == (q_shape, o_shape)
    assert shapes["layers.0.k"] == (8 * 128, hidden)


def test_c04_an_absent_head_dim_follows_from_hidden_except_for_qwen3() -> None:
    for family in ("llama", "qwen2", "mistral"):
        assert describe(family, without=("head_dim",), hidden_size=96).head_dim == 24
        assert describe(family, head_dim=None, hidden_size=96).head_dim == 24
    with pytest.raises(CheckpointError, match="head_dim is missing"):
        describe("qwen3", without=("head_dim",))
    with pytest.raises(CheckpointError, match="hidden_size = 66, expected a multiple of the 4 heads"):
        describe("llama", without=("head_dim",), hidden_size=66)


def head_model(tmp_path: Path, *, tied: bool, head: str) -> Path:
    """A tiny model with the head tensor "absent", a "copy" of the embedding, or "other" than it."""
    config, tensors = load_golden("llama-tied")
    config["tie_word_embeddings"] = tied
    embed = tensors["model.embed_tokens.weight"]
    if head != "absent":
        tensors["lm_head.weight"] = embed.copy() if head == "copy" else embed[::-1].copy()
    return write_folder(tmp_path, config, tensors)


@pytest.mark.parametrize("head", ["absent", "copy"])
def test_c05_a_tied_head_is_the_embedding(tmp_path: Path, head: str) -> None:
    expected = np.load(GOLDEN / "llama-tied" / "expected.npz")
    with open_checkpoint(head_model(tmp_path, tied=True, head=head)) as checkpoint:
        assert "head" not in dict(tensor_shapes(checkpoint.spec))
        logits = SlowTwin(checkpoint).logits(expected["input_ids"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-4)  # float32 reference


def test_c05_an_untied_head_is_its_own_tensor(tmp_path: Path) -> None:
    with open_checkpoint(head_model(tmp_path, tied=False, head="other")) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensor("head"), checkpoint.tensor("embed")[::-1])


def test_c05_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight \[320, 64\] is missing; tie_word_embeddings is false"):
        open_checkpoint(head_model(tmp_path, tied=False, head="absent"))


def test_c05_a_tied_flag_with_another_head_names_both(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is not a copy of model\.embed_tokens\.weight"):
        open_checkpoint(head_model(tmp_path, tied=True, head="other"))


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.window for layer in spec.layers]


def test_c08_mistral_window_is_used_null_means_none_and_absence_is_refused() -> None:
    assert windows(describe("mistral", sliding_window=4096)) == [4096] * 4
    assert windows(describe("mistral", sliding_window=None)) == [None] * 4
    with pytest.raises(CheckpointError, match="sliding_window is missing"):
        describe("mistral", without=("sliding_window",))


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_c08_a_window_that_is_turned_off_is_not_used(family: str) -> None:
    off = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 2}
    assert windows(describe(family, **off)) == [None] * 4
    assert windows(describe(family, without=("use_sliding_window",), sliding_window=4096)) == [None] * 4


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_c08_a_window_that_is_turned_on_spares_the_first_layers(family: str) -> None:
    on = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}
    assert windows(describe(family, **on)) == [None, None, None, 8]
    listed = on | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    assert windows(describe(family, **listed)) == [8, None, 8, None]
    with pytest.raises(CheckpointError, match="sliding_window"):
        describe(family, **(on | {"sliding_window": None}))
    with pytest.raises(CheckpointError, match="layer_types"):
        describe(family, **(on | {"layer_types": ["chunked_attention"] * 4}))


def test_c08_llama_has_no_window() -> None:
    assert windows(describe("llama", sliding_window=4096)) == [None] * 4


def test_c10_biases_are_those_of_the_family() -> None:
    def has_bias(spec: ModelSpec) -> set[str]:
        return {name.split(".")[2] for name, _ in tensor_shapes(spec) if name.endswith("_bias")}

    assert has_bias(describe("qwen2")) == {"q_bias", "k_bias", "v_bias"}
    assert has_bias(describe("qwen3", attention_bias=False)) == set()
    assert has_bias(describe("mistral")) == set()
    assert has_bias(describe("llama")) == set()
    assert has_bias(describe("llama", attention_bias=True)) == {"q_bias", "k_bias", "v_bias", "o_bias"}
    assert has_bias(describe("llama", mlp_bias=True)) == {"gate_bias", "up_bias", "down_bias"}


def test_c10_dropped_bias_changes_the_answer(tmp_path: Path) -> None:
    """The golden Qwen2 has non-zero biases: without them its logits are others, so the golden test sees them."""
    config, tensors = load_golden("qwen2")
    for name in tensors:
        if name.endswith(".bias"):
            assert np.abs(tensors[name]).max() > 0
            tensors[name] = np.zeros_like(tensors[name])
    expected = np.load(GOLDEN / "qwen2" / "expected.npz")
    with open_checkpoint(write_folder(tmp_path, config, tensors)) as checkpoint:
        assert np.abs(SlowTwin(checkpoint).logits(expected["input_ids"]) - expected["logits"]).max() > 0.1


@pytest.mark.parametrize(
    ("model", "extra"),
    [("qwen2", "model.layers.0.self_attn.o_proj.bias"), ("qwen3", "model.layers.0.self_attn.q_proj.bias")],
)
def test_c10_an_unconsumed_tensor_fails_with_its_name(tmp_path: Path, model: str, extra: str) -> None:
    config, tensors = load_golden(model)
    tensors[extra] = np.ones(64, np.float32)
    with pytest.raises(CheckpointError, match=rf"tensor {extra} is not part of the model"):
        open_checkpoint(write_folder(tmp_path, config, tensors))


@pytest.mark.parametrize("missing", ["model.layers.2.self_attn.k_proj.bias", "model.norm.weight"])
def test_c10_a_missing_tensor_fails_with_its_name(tmp_path: Path, missing: str) -> None:
    config, tensors = load_golden("qwen2")
    del tensors[missing]
    with pytest.raises(CheckpointError, match=rf"tensor {missing} \[.*\] is missing"):
        open_checkpoint(write_folder(tmp_path, config, tensors))


def test_a_wrong_shape_names_tensor_and_both_shapes(tmp_path: Path) -> None:
    config, tensors = load_golden("qwen2")
    config["vocab_size"] = 321
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight has shape \[320, 64\], expected \[321, 64\]"):
        open_checkpoint(write_folder(tmp_path, config, tensors))


def test_saved_rotary_tables_are_known_and_harmless(tmp_path: Path) -> None:
    config, tensors = load_golden("llama-tied")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    with open_checkpoint(write_folder(tmp_path, config, tensors)) as checkpoint:
        assert checkpoint.spec.family == "llama"


def test_c43_qwen2_keeps_scores_in_fp32() -> None:
    assert describe("qwen2").scores_fp32
    assert not describe("llama").scores_fp32
