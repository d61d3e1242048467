"""Safetensors files: every storage type and layout is read, every broken file refused before it is touched."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from edge_engines.checkpoint.open import open_checkpoint
from edge_runtime.errors import CheckpointError
from engines.slow_twin import SlowTwin
from engines.tiny_files import GOLDEN, load_golden, write_folder, write_json, write_shards


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_read_exactly(tmp_path: Path, dtype: type) -> None:
    config, tensors = load_golden("qwen2")
    halves = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    with open_checkpoint(write_folder(tmp_path, config, halves)) as checkpoint:
        for canonical, name in (("embed", "model.embed_tokens"), ("layers.1.down", "model.layers.1.mlp.down_proj")):
            expected = halves[f"{name}.weight"].astype(np.float32)
            np.testing.assert_array_equal(checkpoint.tensor(canonical), expected)


def test_shards_give_the_logits_of_the_single_file(tmp_path: Path) -> None:
    config, tensors = load_golden("qwen3")
    expected = np.load(GOLDEN / "qwen3" / "expected.npz")
    with open_checkpoint(write_shards(tmp_path / "m", config, tensors, 3)) as checkpoint:
        logits = SlowTwin(checkpoint).logits(expected["input_ids"])
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=2e-4)  # float32 reference


def test_a_missing_shard_is_named_with_a_tensor_it_holds(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "m", *load_golden("qwen3"), 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors is missing.*tensor model\."):
        open_checkpoint(folder)


def test_a_shard_without_a_promised_tensor_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "m", *load_golden("qwen3"), 2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    write_json(folder / "model.safetensors.index.json", index)
    with pytest.raises(CheckpointError, match=r"lacks tensor model\.extra\.weight"):
        open_checkpoint(folder)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 7])
def test_an_index_can_not_lead_out_of_the_folder(tmp_path: Path, shard: object) -> None:
    folder = write_shards(tmp_path / "m", *load_golden("qwen3"), 2)
    write_json(folder / "model.safetensors.index.json", {"weight_map": {"lm_head.weight": shard}})
    with pytest.raises(CheckpointError, match="expected the name of a file in the folder"):
        open_checkpoint(folder)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    config, _ = load_golden("qwen3")
    write_json(tmp_path / "config.json", config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kept", [-1, -4096, 200_000])
def test_c13_a_cut_file_names_file_tensor_and_both_sizes(tmp_path: Path, kept: int) -> None:
    folder = write_folder(tmp_path, *load_golden("qwen2"))
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    actual = len(whole[:kept])
    with pytest.raises(
        CheckpointError, match=rf"safetensors is cut: tensor model\.\S+ ends at byte \d+.* {actual} bytes"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"GGUF", "not a safetensors file"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "not a safetensors file"),
        (struct.pack("<Q", 5000) + b"{}", "cut inside its header: expected at least 5008 bytes, the file has 10"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 2) + b"{]", "not JSON"),
        (struct.pack("<Q", 8) + b'{"a": 1}', "header entry of tensor a is broken"),
    ],
)
def test_c13_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    folder = write_folder(tmp_path, *load_golden("qwen2"))
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_bytes_behind_the_last_tensor_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, *load_golden("qwen2"))
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="not a sound safetensors file"):
        open_checkpoint(folder)


def test_an_unreadable_storage_type_names_the_tensor(tmp_path: Path) -> None:
    config, tensors = load_golden("qwen2")
    tensors["model.norm.weight"] = np.zeros(64, np.int32)
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight is stored as I32, expected one of F32"):
        open_checkpoint(write_folder(tmp_path, config, tensors))
