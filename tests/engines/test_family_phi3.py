"""Phi-3: fused projections, two lists of frequencies of which the capacity chooses one, a part of each head rotated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import edge_engines
from edge_engines.checkpoint.config import Config
from edge_engines.checkpoint.longrope import attention_factor
from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import ModelSpec, tensor_shapes
from edge_engines.families import describe_model
from edge_engines.graph.builder import GraphOptions, write_graph
from edge_engines.reference import logits
from edge_runtime import open_session
from edge_runtime.errors import BuildError, CheckpointError
from edge_runtime.manifest import Manifest
from engines.slow_twin import SlowTwin
from engines.tiny_files import GOLDEN, load_golden, write_folder

# The golden logits were computed in float32, the twin's in float64; engines compute in float32.
TOLERANCE = 2e-4
MIN_GAP = 1e-3  # below it, rounding may choose another token
LOWERINGS = ("ort", pytest.param("native", marks=pytest.mark.native))
SHORT, LONG = [1.0 + 0.1 * i for i in range(8)], [1.5 + 2.0 * i for i in range(8)]

BASE: dict[str, object] = {
    "model_type": "phi3",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
STRETCHED: dict[str, object] = {
    "original_max_position_embeddings": 32,
    "rope_scaling": {"type": "longrope", "short_factor": SHORT, "long_factor": LONG},
}


def describe(without: tuple[str, ...] = (), **changes: object) -> ModelSpec:
    values = {key: value for key, value in (BASE | changes).items() if key not in without}
    return describe_model(Config(file="config.json", values=values), "phi3")


def tiny(folder: Path, **changes: object) -> Path:
    """Write a small model with random weights."""
    config = BASE | changes
    spec, rng = describe(**changes), np.random.default_rng(17)

    def made(*shape: int) -> NDArray[np.float32]:
        return rng.normal(0, 0.25, shape).astype(np.float32)

    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    tensors = {
        "model.embed_tokens.weight": made(spec.vocab, spec.hidden),
        "model.norm.weight": made(spec.hidden),
        "lm_head.weight": made(spec.vocab, spec.hidden),
    }
    for i in range(len(spec.layers)):
        parts = {
            "input_layernorm": (spec.hidden,),
            "post_attention_layernorm": (spec.hidden,),
            "self_attn.qkv_proj": (qkv, spec.hidden),
            "self_attn.o_proj": (spec.hidden, spec.num_heads * spec.head_dim),
            "mlp.gate_up_proj": (2 * spec.ffn, spec.hidden),
            "mlp.down_proj": (spec.hidden, spec.ffn),
        }
        tensors |= {f"model.layers.{i}.{part}.weight": made(*shape) for part, shape in parts.items()}
    return write_folder(folder, config, tensors)


def reference(folder: Path, ids: list[int], capacity: int) -> NDArray[np.float64]:
    with open_checkpoint(folder) as checkpoint:
        return logits(checkpoint.spec.for_capacity(capacity), checkpoint, ids)


def assert_engine_agrees(tmp_path: Path, folder: Path, lowering: Any, capacity: int, num_ids: int) -> Manifest:
    """Build, and compare one pass and single steps with the reference at every position; return the manifest."""
    ids = np.random.default_rng(3).integers(0, 96, num_ids).tolist()
    wanted = reference(folder, ids, capacity)
    out = tmp_path / f"engine-{capacity}"
    manifest = edge_engines.build(folder, out, lowering=lowering, precision="fp32", capacity=capacity)
    with open_session(out, threads=1, verify_rows=num_ids) as session:
        assert np.abs(session.verify(0, ids, 0) - wanted).max() < TOLERANCE
        session.prefill(1, ids[:5])
        for position in range(5, num_ids):
            found = session.decode([1], [ids[position]], [position])[0]
            assert np.abs(found - wanted[position]).max() < TOLERANCE
    return manifest


def test_slow_twin_gives_the_logits_and_tokens_of_the_reference() -> None:
    expected = np.load(GOLDEN / "phi3" / "expected.npz")
    with open_checkpoint(GOLDEN / "phi3") as checkpoint:
        twin = SlowTwin(checkpoint)
        found = twin.logits(expected["input_ids"])
        ids, gaps = twin.greedy(expected["prompt"].tolist(), len(expected["greedy"]))
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=TOLERANCE)
    assert min(gaps) > MIN_GAP
    assert ids == expected["greedy"].tolist()


def test_fused_tensors_are_cut_into_q_k_v_and_gate_up() -> None:
    _, tensors = load_golden("phi3")
    fused, gated = (tensors[f"model.layers.1.{part}.weight"] for part in ("self_attn.qkv_proj", "mlp.gate_up_proj"))
    with open_checkpoint(GOLDEN / "phi3") as checkpoint:
        cuts = {name: checkpoint.tensor(f"layers.1.{name}") for name in ("q", "k", "v", "gate", "up")}
        for name, shape in tensor_shapes(checkpoint.spec):
            assert checkpoint.tensor(name).shape == shape
    np.testing.assert_array_equal(np.concatenate([cuts["q"], cuts["k"], cuts["v"]]), fused)
    np.testing.assert_array_equal(np.concatenate([cuts["gate"], cuts["up"]]), gated)
    assert cuts["q"].shape == (64, 64)
    assert cuts["gate"].shape == (112, 64)


def test_a_fused_tensor_with_rows_left_over_is_refused(tmp_path: Path) -> None:
    config, tensors = load_golden("phi3")
    name = "model.layers.0.self_attn.qkv_proj.weight"
    tensors[name] = np.concatenate([tensors[name], tensors[name][:16]])
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight has 144 rows, but the configuration describes 128"):
        open_checkpoint(write_folder(tmp_path, config, tensors))


def test_c04_sizes_of_phi_3_mini_follow_from_its_heads() -> None:
    spec = describe(without=("num_key_value_heads",), hidden_size=3072, num_attention_heads=32)
    assert (spec.head_dim, spec.num_kv_heads, spec.rotaries[0].dim) == (96, 32, 96)


def test_c08_window_is_used_when_present_and_null_or_absent_means_none() -> None:
    assert [layer.window for layer in describe(sliding_window=2047).layers] == [2047, 2047]
    assert [layer.window for layer in describe(sliding_window=None).layers] == [None, None]
    assert [layer.window for layer in describe().layers] == [None, None]
    with pytest.raises(CheckpointError, match="sliding_window = 0"):
        describe(sliding_window=0)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_c02_longrope_is_known_by_all_its_names(key: str, kind: str) -> None:
    spec = describe(
        original_max_position_embeddings=32,
        rope_scaling={key: kind, "short_factor": SHORT, "long_factor": LONG},
    )
    assert spec == describe(**STRETCHED)
    assert spec.rotaries[0].kind == "longrope"


def test_longrope_is_found_in_the_newer_layout() -> None:
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 32,
        "short_factor": SHORT,
        "long_factor": LONG,
    }
    assert describe(without=("rope_theta",), rope_parameters=parameters) == describe(**STRETCHED)


def test_capacity_chooses_the_list_at_the_original_context() -> None:
    rotary = describe(**STRETCHED).rotaries[0]
    plain = 10000.0 ** (-np.arange(8) / 8)
    for capacity, kind, factors in ((8, "short", SHORT), (32, "short", SHORT), (33, "long", LONG), (256, "long", LONG)):
        chosen = rotary.for_capacity(capacity)
        assert chosen.kind == f"longrope-{kind}"
        np.testing.assert_allclose(chosen.inv_freq, plain / factors, rtol=1e-12)
        assert chosen.attention_factor == rotary.attention_factor  # the same for both lists
        assert chosen.for_capacity(8) == chosen  # the choice is made once
    assert describe().for_capacity(8) == describe()


def test_attention_factor_follows_from_the_stretch_unless_stated() -> None:
    assert attention_factor(131072, 4096) == pytest.approx(1.190238, abs=5e-7)  # value of the design document
    assert attention_factor(4096, 4096) == 1.0
    assert describe(**STRETCHED).rotaries[0].attention_factor == math.sqrt(1 + math.log(8) / math.log(32))
    section = STRETCHED["rope_scaling"] | {"attention_factor": 1.25}  # type: ignore[operator]
    stated = describe(**(STRETCHED | {"rope_scaling": section}))
    assert stated.rotaries[0].attention_factor == 1.25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "linear", "factor": 2.0}, 'type = "linear", expected one of default, longrope, su, yarn'),
        ({"type": "llama3"}, 'type = "llama3", expected one of'),
        ({"short_factor": SHORT[1:]}, "short_factor = .*expected 8 numbers above 0"),
        ({"long_factor": [*LONG[1:], 0.0]}, "long_factor = .*expected 8 numbers above 0"),
        ({"long_factor": "x"}, "long_factor = "),
        ({"attention_factor": -1.0}, "attention_factor = -1.0"),
        ({"rope_type": "default"}, "rope_type and type disagree"),
        ({"original_max_position_embeddings": 64}, "original_max_position_embeddings = 32, expected 64"),
    ],
)
def test_c02_a_scaling_that_is_not_understood_is_refused(changes: dict[str, object], message: str) -> None:
    section = STRETCHED["rope_scaling"] | changes  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message):
        describe(**(STRETCHED | {"rope_scaling": section}))


@pytest.mark.parametrize("key", ["short_factor", "long_factor"])
def test_a_missing_list_or_original_context_is_named(key: str) -> None:
    section = {name: value for name, value in STRETCHED["rope_scaling"].items() if name != key}  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=f"{key} is missing"):
        describe(**(STRETCHED | {"rope_scaling": section}))
    with pytest.raises(CheckpointError, match="original_max_position_embeddings is missing"):
        describe(rope_scaling=STRETCHED["rope_scaling"])


def test_a_part_of_each_head_is_rotated_where_the_configuration_says_so() -> None:
    mini = {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8}  # Phi-4-mini
    for changes in (
        {"partial_rotary_factor": 0.75},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ):
        spec = describe(**mini, **changes)
        assert (spec.head_dim, spec.rotaries[0].dim) == (128, 96)
        assert spec.rotaries[0].inv_freq[1] == pytest.approx(10000.0 ** (-2 / 96), rel=1e-12)
    assert describe(partial_rotary_factor=None).rotaries[0].dim == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 0.19}, "partial_rotary_factor = 0.19, expected a share"),  # 3 of 16
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor = 1.5, expected a share"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor = 0, expected a finite number above 0"),
        (
            {"partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}},
            "partial_rotary_factor = 0.5, expected 0.25",
        ),
    ],
)
def test_an_impossible_part_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        describe(**changes)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize(("capacity", "kind"), [(32, "longrope-short"), (64, "longrope-long")])
def test_an_engine_keeps_to_the_list_of_its_capacity(tmp_path: Path, lowering: str, capacity: int, kind: str) -> None:
    """24 ids fit the original context of 32: the engine of 64 rows uses the long list all the same."""
    folder = tiny(tmp_path / "model", **STRETCHED)
    manifest = assert_engine_agrees(tmp_path, folder, lowering, capacity, num_ids=24)
    assert manifest.model.rotary[0]["kind"] == kind


def test_the_two_lists_and_the_factor_give_other_logits(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "model", **STRETCHED)
    ids = list(range(24))
    short, long = reference(folder, ids, 32), reference(folder, ids, 64)
    plain = reference(tiny(tmp_path / "plain"), ids, 32)
    for first, second in ((short, long), (short, plain), (long, plain)):
        assert np.abs(first - second).max() > 100 * TOLERANCE


def test_the_reference_alone_takes_its_own_length_as_the_capacity(tmp_path: Path) -> None:
    """As transformers does, which chooses by the length of what it is given."""
    folder, ids = tiny(tmp_path / "model", **STRETCHED), list(range(40))
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(logits(checkpoint.spec, checkpoint, ids), reference(folder, ids, 64))
        np.testing.assert_array_equal(logits(checkpoint.spec, checkpoint, ids[:32]), reference(folder, ids[:32], 32))


SHAPES = {
    "phi-3-mini heads": {"hidden_size": 288, "num_attention_heads": 3, "num_key_value_heads": 3},  # D = 96
    "phi-4-mini heads": {
        "hidden_size": 384,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "partial_rotary_factor": 0.75,
    },  # 96 of D = 128
    "a third of D": {"hidden_size": 192, "partial_rotary_factor": 1 / 3},  # 16 of D = 48
    "narrow window": {"sliding_window": 6},
}


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_engines_agree_with_the_reference(tmp_path: Path, shape: str, lowering: str) -> None:
    folder = tiny(tmp_path / "model", **SHAPES[shape])
    assert_engine_agrees(tmp_path, folder, lowering, capacity=32, num_ids=20)


def test_rotating_whole_heads_or_seeing_everything_would_be_seen(tmp_path: Path) -> None:
    for shape, key in (("phi-4-mini heads", "partial_rotary_factor"), ("narrow window", "sliding_window")):
        folder = tiny(tmp_path / shape, **SHAPES[shape])
        whole = {name: value for name, value in SHAPES[shape].items() if name != key}
        ids = list(range(20))
        right, wrong = reference(folder, ids, 32), reference(tiny(tmp_path / f"{shape}-whole", **whole), ids, 32)
        assert np.abs(right - wrong).max() > 100 * TOLERANCE


@pytest.mark.native
@pytest.mark.parametrize(("hidden", "rotated"), [(96, 12), (64, 8)])  # 12 of D = 24, 8 of D = 16
def test_a_part_that_is_no_multiple_of_16_needs_the_native_lowering(tmp_path: Path, hidden: int, rotated: int) -> None:
    folder = tiny(tmp_path / "model", hidden_size=hidden, partial_rotary_factor=0.5)
    assert_engine_agrees(tmp_path, folder, "native", capacity=32, num_ids=20)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.spec.rotaries[0].dim == rotated
        with pytest.raises(BuildError, match=r"not a multiple of 16.*use --lowering native"):
            write_graph(tmp_path, checkpoint.spec, checkpoint, GraphOptions("ort", "fp32", 32))
