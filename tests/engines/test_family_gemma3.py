"""Gemma 3: local and global layers with a rotary table each, norms of 1 + w, a scaled embedding, absent keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import edge_engines
from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.embed_scale import original_type, round_scale
from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import LayerSpec, ModelSpec, tensor_shapes
from edge_engines.families import FAMILIES, describe_model
from edge_runtime import open_session
from edge_runtime.errors import CheckpointError
from engines.slow_twin import SlowTwin
from engines.tiny_files import GOLDEN, write_folder

# The golden logits were computed in float32, the twin's in float64; engines compute in float32.
TOLERANCE = 2e-4
MIN_GAP = 1e-3  # below it, rounding may choose another token
LOWERINGS = ("ort", pytest.param("native", marks=pytest.mark.native))

# The whole text_config of the official 4B model.
SPARSE_4B: dict[str, object] = {
    "model_type": "gemma3_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
SPARSE_1B: dict[str, object] = {
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "sliding_window": 512,
}


def describe(values: dict[str, object], family: str = "gemma3_text", **changes: object) -> ModelSpec:
    return describe_model(Config(file="config.json", values=values | changes), family)


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.window for layer in spec.layers]


def test_slow_twin_gives_the_logits_of_the_reference() -> None:
    expected = np.load(GOLDEN / "gemma3" / "expected.npz")
    with open_checkpoint(GOLDEN / "gemma3") as checkpoint:
        found = SlowTwin(checkpoint).logits(expected["input_ids"])
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=TOLERANCE)


def test_slow_twin_decodes_the_tokens_of_the_reference() -> None:
    expected = np.load(GOLDEN / "gemma3" / "expected.npz")
    with open_checkpoint(GOLDEN / "gemma3") as checkpoint:
        ids, gaps = SlowTwin(checkpoint).greedy(expected["prompt"].tolist(), len(expected["greedy"]))
    assert min(gaps) > MIN_GAP
    assert ids == expected["greedy"].tolist()


def test_c03_c04_absent_keys_of_the_official_configuration_mean_what_the_publisher_says() -> None:
    spec = describe(SPARSE_4B)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)  # not hidden / heads = 320
    assert [rotary.base for rotary in spec.rotaries] == [1e6, 1e4]
    assert (spec.vocab, spec.norm_eps, spec.max_positions) == (262208, 1e-6, 131072)
    assert (spec.scale, spec.tied_head, spec.activation) == (1 / 16, True, "gelu_tanh")
    assert windows(spec)[:12] == [1024] * 5 + [None] + [1024] * 5 + [None]
    assert (spec.norm_offset, spec.post_norms, spec.qk_norm) == (1.0, True, True)
    assert not any(name.endswith("_bias") for name, _ in tensor_shapes(spec))


def test_written_out_keys_describe_the_same_model_as_absent_ones() -> None:
    stated = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "attention_bias": False,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    }
    assert describe(SPARSE_4B, **stated) == describe(SPARSE_4B)


@pytest.mark.parametrize("key", ["hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window"])
def test_c08_a_key_without_a_meaning_when_absent_is_an_error_absent_and_null(key: str) -> None:
    """The window's class default of 4096 is that of no release."""
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        describe({name: value for name, value in SPARSE_4B.items() if name != key})
    with pytest.raises(CheckpointError, match=f"{key} is null"):
        describe(SPARSE_4B, **{key: None})


@pytest.mark.parametrize("head_dim", [0, -2, 7, "256", 2**20])
def test_an_impossible_head_size_is_refused(head_dim: object) -> None:
    with pytest.raises(CheckpointError, match="head_dim = "):
        describe(SPARSE_4B, head_dim=head_dim)


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_c07_five_local_layers_are_followed_by_a_global_one_under_either_name(key: str) -> None:
    spec = describe(SPARSE_1B, num_hidden_layers=12, **{key: 6})
    assert [i for i, layer in enumerate(spec.layers) if layer == LayerSpec(rotary=0, window=None)] == [5, 11]
    assert all(layer == LayerSpec(rotary=1, window=512) for i, layer in enumerate(spec.layers) if i not in (5, 11))
    assert windows(describe(SPARSE_1B, **{key: 2}))[:4] == [512, None, 512, None]


def test_c07_listed_layer_types_come_before_the_pattern() -> None:
    listed = ["full_attention", "sliding_attention"] * 13
    assert windows(describe(SPARSE_1B, layer_types=listed))[:2] == [None, 512]
    assert windows(describe(SPARSE_1B, layer_types=None)) == windows(describe(SPARSE_1B))
    with pytest.raises(CheckpointError, match="layer_types"):
        describe(SPARSE_1B, layer_types=listed[1:])
    with pytest.raises(CheckpointError, match="sliding_window_pattern and _sliding_window_pattern disagree"):
        describe(SPARSE_1B, sliding_window_pattern=6, _sliding_window_pattern=4)


def test_c07_scaling_belongs_to_the_global_table_alone() -> None:
    plain, scaled = describe(SPARSE_1B, head_dim=64), describe(SPARSE_4B, head_dim=64)
    whole, local = scaled.rotaries
    assert (whole.kind, local.kind) == ("linear", "default")
    assert whole.inv_freq[:2] == (1 / 8, pytest.approx(1e6 ** (-1 / 32) / 8, rel=1e-12))
    assert local.inv_freq[:2] == (1.0, pytest.approx(1e4 ** (-1 / 32), rel=1e-12))
    assert local == plain.rotaries[1]
    assert plain.rotaries[0].inv_freq == tuple(8 * f for f in whole.inv_freq)


def by_layer_type(whole: dict[str, object], local: dict[str, object]) -> dict[str, object]:
    return {"full_attention": whole, "sliding_attention": local}


def test_c07_tables_are_found_in_the_layout_by_layer_type() -> None:
    without = {key: value for key, value in SPARSE_4B.items() if key != "rope_scaling"}
    scaled = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
    nested = by_layer_type(scaled, {"rope_theta": 1e4, "rope_type": "default"})
    assert describe(without, rope_parameters=nested) == describe(SPARSE_4B)
    other = by_layer_type(scaled | {"rope_theta": 2e6}, {"rope_theta": 2e4, "rope_type": "default"})
    assert [rotary.base for rotary in describe(without, rope_parameters=other).rotaries] == [2e6, 2e4]
    assert describe(without, rope_parameters=by_layer_type(scaled, {})) == describe(SPARSE_4B)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "expected full_attention and sliding_attention"),
        (
            {"rope_parameters": by_layer_type({}, {"rope_type": "linear", "factor": 8.0})},
            "local layers have linear rope scaling",
        ),
        ({"rope_local_base_freq": -1}, "rope_local_base_freq = -1, expected a finite number above 0"),
        (
            {"rope_local_base_freq": 2e4, "rope_parameters": by_layer_type({}, {"rope_theta": 1e4})},
            "disagree",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, 'rope_type = "yarn", expected one of default, linear'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5, expected 1"),
        ({"rope_parameters": by_layer_type({"partial_rotary_factor": 0.5}, {})}, "partial_rotary_factor = 0.5"),
    ],
)
def test_c02_rotary_settings_that_are_not_understood_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        describe(SPARSE_1B, **changes)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("final_logit_softcapping", 30.0, "final_logit_softcapping = 30.0, expected null in this family"),
        ("attn_logit_softcapping", 50.0, "attn_logit_softcapping = 50.0, expected null in this family"),
        ("hidden_activation", "gelu", 'hidden_activation = "gelu", expected "gelu_pytorch_tanh"'),
        ("use_bidirectional_attention", True, "use_bidirectional_attention = true, expected false"),
        ("query_pre_attn_scalar", 0, "query_pre_attn_scalar = 0, expected a finite number above 0"),
    ],
)
def test_settings_of_other_gemmas_are_refused(key: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        describe(SPARSE_1B, **{key: value})


def test_queries_of_27b_are_scaled_by_hidden_over_heads() -> None:
    spec = describe(SPARSE_4B, head_dim=128, query_pre_attn_scalar=168)
    assert spec.scale == pytest.approx(168**-0.5, rel=1e-12)


# Values of the design document, recomputed there.
@pytest.mark.parametrize(("hidden", "scale"), [(640, 25.25), (1152, 34.0), (2560, 50.5), (3840, 62.0), (5376, 73.5)])
def test_embedding_scale_is_rounded_to_bf16(hidden: int, scale: float) -> None:
    assert round_scale(hidden**0.5, "BF16") == scale == float(ml_dtypes.bfloat16(np.float32(hidden**0.5)))


def test_bf16_rounding_agrees_with_a_second_implementation() -> None:
    for hidden in range(1, 8193):
        assert round_scale(hidden**0.5, "BF16") == float(ml_dtypes.bfloat16(np.float32(hidden**0.5)))


@pytest.mark.parametrize(("stored", "original"), [("F32", "F32"), ("BF16", "BF16"), ("F16", "BF16"), ("Q4_K", "BF16")])
def test_a_gguf_file_is_taken_as_made_from_bf16_unless_it_holds_all_bits(stored: str, original: str) -> None:
    assert original_type(stored) == original


def tiny(num_layers: int = 12, **changes: object) -> tuple[dict[str, Any], dict[str, NDArray[np.generic]]]:
    """Return configuration and random weights of a small model whose embedding scale is no round number."""
    config: dict[str, Any] = {
        "model_type": "gemma3_text",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 12,
        "sliding_window": 8,
        "vocab_size": 96,
        "max_position_embeddings": 512,
    }
    config |= changes
    spec = describe(config)
    sources = FAMILIES["gemma3_text"].sources(spec, ())
    rng = np.random.default_rng(11)
    return config, {
        sources[name].name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in tensor_shapes(spec)
    }


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [(np.float32, np.sqrt(np.float32(48))), (np.float16, np.float16(48**0.5)), (ml_dtypes.bfloat16, 6.9375)],
)
def test_embedding_scale_follows_the_type_of_the_weights(tmp_path: Path, dtype: type, scale: float) -> None:
    config, tensors = tiny(num_layers=1)
    halves = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    with open_checkpoint(write_folder(tmp_path, config, halves)) as checkpoint:
        assert checkpoint.spec.embed_scale == float(scale)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 8.0}])
def test_c07_engines_agree_with_the_reference_beyond_the_window(
    tmp_path: Path, lowering: Any, scaling: dict[str, object] | None
) -> None:
    """12 layers, window 8, 40 positions: layers 5 and 11 see everything, with the scaled table."""
    folder = write_folder(tmp_path / "model", *tiny(rope_scaling=scaling))
    ids = np.random.default_rng(2).integers(0, 96, 40).tolist()
    with open_checkpoint(folder) as checkpoint:
        wanted = SlowTwin(checkpoint).logits(ids)
    edge_engines.build(folder, tmp_path / "engine", lowering=lowering, precision="fp32", capacity=64)
    with open_session(tmp_path / "engine", threads=1, verify_rows=40) as session:
        assert np.abs(session.verify(0, ids, 0) - wanted).max() < TOLERANCE
        session.prefill(1, ids[:10])
        for position in range(10, 40):  # the window slides over what decoding has written
            logits = session.decode([1], [ids[position]], [position])[0]
            assert np.abs(logits - wanted[position]).max() < TOLERANCE


@pytest.mark.parametrize(
    "confused",
    [
        {"rope_local_base_freq": 1e6},  # one table for all layers
        {"rope_scaling": None},  # the factor ignored
        {"rope_theta": 1e4},  # the global base read as Llama's
        {"sliding_window_pattern": 1},  # all layers global
        {"sliding_window": 9},
        {"query_pre_attn_scalar": 16},  # the head size
    ],
)
def test_c07_a_confused_reading_would_be_seen(tmp_path: Path, confused: dict[str, object]) -> None:
    config, tensors = tiny(rope_scaling={"rope_type": "linear", "factor": 8.0})
    ids = np.random.default_rng(2).integers(0, 96, 40).tolist()
    logits = []
    for name, changes in (("right", {}), ("wrong", confused)):
        with open_checkpoint(write_folder(tmp_path / name, config | changes, tensors)) as checkpoint:
            logits.append(SlowTwin(checkpoint).logits(ids))
    assert np.abs(logits[0] - logits[1]).max() > 100 * TOLERANCE


def test_the_sparse_text_part_is_read_as_the_text_model() -> None:
    assert describe({"text_config": SPARSE_4B}, "gemma3") == describe(SPARSE_4B)
    untied = describe({"text_config": SPARSE_4B, "tie_word_embeddings": False}, "gemma3")
    assert not untied.tied_head
