"""GGUF files hold the same model as their safetensors twin, and a broken one is refused before it is touched."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as Kind

from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import tensor_shapes
from edge_runtime.errors import CheckpointError
from engines.slow_twin import SlowTwin
from engines.tiny_files import GOLDEN, GOLDEN_MODELS, load_golden, write_folder, write_gguf

LOGITS_TOLERANCE = 2e-4  # the reference is float32
ARCHITECTURES = {"qwen2": "qwen2", "qwen3": "qwen3"}  # all else is stored as llama
FAMILIES = dict(zip(GOLDEN_MODELS, ("llama", "llama", "qwen2", "qwen3", "mistral"), strict=True))


def twin_of(name: str, path: Path, **options: object) -> Path:
    """Write the golden model as a GGUF file."""
    config, tensors = load_golden(name)
    return write_gguf(path, config, tensors, architecture=ARCHITECTURES.get(name, "llama"), **options)


def llama3_factors() -> np.ndarray:
    """Return what a converter stores as rope_freqs.weight for the golden llama3-scaled."""
    with open_checkpoint(GOLDEN / "llama3-scaled") as checkpoint:
        scaled = np.array(checkpoint.spec.rotaries[0].inv_freq)
    plain = 500000.0 ** (-np.arange(8) / 8)
    return (plain / scaled).astype(np.float32)


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_a_gguf_file_gives_the_logits_of_its_safetensors_twin(tmp_path: Path, name: str) -> None:
    extra = {"rope_freqs.weight": llama3_factors()} if name == "llama3-scaled" else None
    expected = np.load(GOLDEN / name / "expected.npz")
    with open_checkpoint(twin_of(name, tmp_path / "m.gguf", extra=extra)) as checkpoint:
        assert checkpoint.spec.family == FAMILIES[name]
        logits = SlowTwin(checkpoint).logits(expected["input_ids"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_a_gguf_file_describes_the_model_of_its_safetensors_twin(tmp_path: Path, name: str) -> None:
    extra = {"rope_freqs.weight": llama3_factors()} if name == "llama3-scaled" else None
    with (
        open_checkpoint(twin_of(name, tmp_path / "m.gguf", extra=extra)) as twin,
        open_checkpoint(GOLDEN / name) as own,
    ):
        assert twin.spec.rotaries[0].inv_freq == pytest.approx(own.spec.rotaries[0].inv_freq, rel=1e-6)  # stored as F32
        for field in ("norm_eps", "head_dim", "num_kv_heads", "tied_head", "qkv_bias", "qk_norm", "layers", "vocab"):
            assert getattr(twin.spec, field) == getattr(own.spec, field), field
        for tensor, _ in tensor_shapes(own.spec):
            np.testing.assert_array_equal(twin.tensor(tensor), own.tensor(tensor), err_msg=tensor)


def test_paired_rows_of_a_bias_are_restored_too(tmp_path: Path) -> None:
    config, tensors = load_golden("llama-tied")
    random_values = np.random.default_rng(0)
    for layer in range(3):
        for part, size in (("q", 64), ("k", 16), ("v", 16), ("o", 64)):
            name = f"model.layers.{layer}.self_attn.{part}_proj.bias"
            tensors[name] = random_values.normal(size=size).astype(np.float32)
    with (
        open_checkpoint(write_gguf(tmp_path / "m.gguf", config, tensors)) as twin,
        open_checkpoint(write_folder(tmp_path / "hf", config | {"attention_bias": True}, tensors)) as own,
    ):
        for tensor, _ in tensor_shapes(own.spec):
            np.testing.assert_array_equal(twin.tensor(tensor), own.tensor(tensor), err_msg=tensor)


# Largest relative L2 error of normally distributed weights, as the number of bits per value allows (measured: 0.3 %,
# 0.6 %, 4 %, 7 % and rounding of the 8-bit mantissa for BF16).
@pytest.mark.parametrize(
    ("kind", "bound"), [(Kind.F16, 1e-3), (Kind.BF16, 5e-3), (Kind.Q8_0, 1e-2), (Kind.Q5_1, 8e-2), (Kind.Q4_0, 0.15)]
)
def test_quantised_types_are_read_as_the_values_they_stand_for(tmp_path: Path, kind: Kind, bound: float) -> None:
    config, tensors = load_golden("qwen3")
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", config, tensors, architecture="qwen3", kind=kind)) as twin:
        for canonical, name in (("embed", "model.embed_tokens"), ("layers.2.q", "model.layers.2.self_attn.q_proj")):
            original = tensors[f"{name}.weight"]
            error = np.linalg.norm(twin.tensor(canonical) - original) / np.linalg.norm(original)
            assert 0 < error < bound


def test_c02_rope_factors_of_the_file_are_used(tmp_path: Path) -> None:
    with open_checkpoint(
        twin_of("llama3-scaled", tmp_path / "m.gguf", extra={"rope_freqs.weight": llama3_factors()})
    ) as checkpoint:
        assert checkpoint.spec.rotaries[0].kind == "llama3"
    with open_checkpoint(twin_of("llama3-scaled", tmp_path / "n.gguf")) as checkpoint:
        assert checkpoint.spec.rotaries[0].kind == "default"


def test_c02_an_unknown_scaling_type_names_the_metadata_key(tmp_path: Path) -> None:
    def yarn(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "yarn")

    with pytest.raises(CheckpointError, match=r'llama\.rope\.scaling: rope_type = "yarn", expected one of'):
        open_checkpoint(twin_of("llama-tied", tmp_path / "m.gguf", edit=yarn))


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    def linear(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 2.0)

    with open_checkpoint(twin_of("llama-tied", tmp_path / "m.gguf", edit=linear)) as checkpoint:
        assert checkpoint.spec.rotaries[0].inv_freq[0] == 0.5


def test_c05_an_identical_head_is_taken_as_tied(tmp_path: Path) -> None:
    config, tensors = load_golden("llama-tied")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", config, tensors)) as checkpoint:
        assert checkpoint.spec.tied_head
    tensors["lm_head.weight"][-1, -1] += 1
    with open_checkpoint(write_gguf(tmp_path / "n.gguf", config, tensors)) as checkpoint:
        assert not checkpoint.spec.tied_head
        np.testing.assert_array_equal(checkpoint.tensor("head"), tensors["lm_head.weight"])


def test_c10_an_unconsumed_tensor_fails_with_its_name(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.ones(128, np.float32)}
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_k\.bias \[64\] is missing"):
        open_checkpoint(twin_of("qwen3", tmp_path / "m.gguf", extra=extra))
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.secret\.weight is not part of the model"):
        open_checkpoint(twin_of("qwen3", tmp_path / "n.gguf", extra={"blk.0.secret.weight": np.ones(4, np.float32)}))


def test_an_unknown_architecture_lists_the_supported_ones(tmp_path: Path) -> None:
    config, tensors = load_golden("llama-tied")
    path = write_gguf(tmp_path / "m.gguf", config, tensors, architecture="gemma2")
    with pytest.raises(
        CheckpointError, match=r"general\.architecture = 'gemma2' .*supported: llama, qwen2, qwen3, gemma3, phi3"
    ):
        open_checkpoint(path)


def test_a_missing_key_is_named_as_the_file_would_name_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"qwen2\.\S+ is missing"):
        open_checkpoint(path)


def test_experts_and_split_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"llama\.expert_count = 8"):
        open_checkpoint(twin_of("llama-tied", tmp_path / "m.gguf", edit=lambda writer: writer.add_expert_count(8)))
    with pytest.raises(CheckpointError, match="one of 3 parts"):
        open_checkpoint(
            twin_of("llama-tied", tmp_path / "n.gguf", edit=lambda writer: writer.add_uint16("split.count", 3))
        )


@pytest.mark.parametrize("cut", [1, 5000, 300_000])
def test_c13_a_file_cut_in_the_tensors_names_file_tensor_and_both_sizes(tmp_path: Path, cut: int) -> None:
    whole = twin_of("llama-tied", tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:-cut])
    with pytest.raises(
        CheckpointError, match=rf"cut\.gguf is cut: tensor \S+ ends at byte \d+, the file has {len(whole) - cut} bytes"
    ):
        open_checkpoint(path)


def test_c13_a_file_cut_anywhere_in_the_header_is_refused(tmp_path: Path) -> None:
    whole = twin_of("llama-tied", tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(1, 3000, 37):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"<!DOCTYPE html><html><head></head></html>", r"is not a GGUF file: it begins with b'<!DOCTYPE html>"),
        (b"GGU", "is not a GGUF file"),
        (b"GGUF", "cut inside the version: expected at least 8 bytes, the file has 4"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(32), "GGUF version 1 is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(32), "GGUF version 50331648 is not supported"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensor count = 1152921504606846976 needs"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "key count = 1152921504606846976 needs"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(8), r"general\.architecture is missing"),
        (
            b"GGUF" + struct.pack("<IQQQ3sIIQ", 3, 0, 1, 3, b"key", 9, 4, 1 << 61) + bytes(64),
            "key = 2305843009213693952 needs at least",
        ),
        (b"GGUF" + struct.pack("<IQQQ3sI", 3, 0, 1, 3, b"key", 99) + bytes(64), "unknown value type 99"),
        (b"GGUF" + struct.pack("<IQQQ3sIIQ", 3, 0, 1, 3, b"key", 9, 9, 1) + bytes(64), "unknown value type 9"),
    ],
)
def test_c13_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "page.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_c13_damaged_headers_never_raise_anything_but_checkpoint_errors(tmp_path: Path) -> None:
    whole = bytearray(twin_of("llama-tied", tmp_path / "m.gguf").read_bytes())
    path, rng = tmp_path / "damaged.gguf", random.Random(1)
    refused = 0
    for _ in range(300):
        damaged = whole.copy()
        damaged[rng.randrange(4, 2600)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            open_checkpoint(path).close()
        except CheckpointError:
            refused += 1
    assert refused > 200
