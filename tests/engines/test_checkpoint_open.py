"""An opened checkpoint is the model its publisher meant, and nothing of it is taken on trust."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import tensor_shapes
from edge_engines.reference import causal_mask
from edge_runtime.errors import CheckpointError
from engines.slow_twin import SlowTwin
from engines.tiny_files import GOLDEN, GOLDEN_MODELS, load_golden, write_folder

# The reference was computed in float32, the twin computes in float64: they differ by the reference's rounding.
LOGITS_TOLERANCE = 2e-4
MIN_GAP = 1e-3  # below it, rounding may choose another token


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_slow_twin_gives_the_logits_of_the_reference(name: str) -> None:
    expected = np.load(GOLDEN / name / "expected.npz")
    with open_checkpoint(GOLDEN / name) as checkpoint:
        actual = SlowTwin(checkpoint).logits(expected["input_ids"])
    np.testing.assert_allclose(actual, expected["logits"], rtol=0, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_slow_twin_decodes_the_tokens_of_the_reference(name: str) -> None:
    expected = np.load(GOLDEN / name / "expected.npz")
    with open_checkpoint(GOLDEN / name) as checkpoint:
        ids, gaps = SlowTwin(checkpoint).greedy(expected["prompt"].tolist(), len(expected["greedy"]))
    assert min(gaps) > MIN_GAP
    assert ids == expected["greedy"].tolist()


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_every_canonical_tensor_has_its_shape(name: str) -> None:
    with open_checkpoint(GOLDEN / name) as checkpoint:
        for tensor, shape in tensor_shapes(checkpoint.spec):
            values = checkpoint.tensor(tensor)
            assert (values.shape, values.dtype) == (shape, np.float32)


def test_a_tensor_belongs_to_the_caller() -> None:
    with open_checkpoint(GOLDEN / "qwen2") as checkpoint:
        checkpoint.tensor("norm")[:] = 0
        assert checkpoint.tensor("norm").any()


def test_c08_mask_lets_the_window_count_the_query_itself() -> None:
    mask = causal_mask(6, window=4)[4:].astype(int)
    padded = np.pad(mask, ((0, 0), (0, 2)))  # capacity 8, 6 valid keys
    assert padded.tolist() == [[0, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0]]


def test_weight_bytes_counts_the_tensors_as_stored() -> None:
    with open_checkpoint(GOLDEN / "llama-tied") as checkpoint:
        assert checkpoint.weight_bytes == sum(4 * int(np.prod(shape)) for _, shape in tensor_shapes(checkpoint.spec))


def test_digest_does_not_depend_on_the_place_but_on_the_content(tmp_path: Path) -> None:
    config, tensors = load_golden("llama-tied")
    first = open_checkpoint(write_folder(tmp_path / "a", config, tensors)).digest
    assert open_checkpoint(write_folder(tmp_path / "b", config, tensors)).digest == first
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * np.float32(1.5)
    assert open_checkpoint(write_folder(tmp_path / "a", config, tensors)).digest != first
    assert len(first) == 64


def test_digest_reports_progress_to_the_last_byte() -> None:
    seen: list[tuple[int, int]] = []
    with open_checkpoint(GOLDEN / "qwen3", on_digest=lambda done, total: seen.append((done, total))) as checkpoint:
        assert seen == []
        assert checkpoint.digest
    assert seen[-1][0] == seen[-1][1] > checkpoint.weight_bytes


def test_a_model_without_a_tokenizer_opens_with_a_warning() -> None:
    with open_checkpoint(GOLDEN / "qwen2") as checkpoint:
        assert checkpoint.text is None
        assert "tokenizer.json" in checkpoint.warnings[0]


def test_a_path_that_is_no_model_is_refused_with_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    for path in (tmp_path / "nowhere", tmp_path / "weights.bin", tmp_path):
        with pytest.raises(CheckpointError, match=r"\.gguf file") as caught:
            open_checkpoint(path)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_config_is_refused_with_its_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(tmp_path)


def test_an_already_quantised_folder_is_refused(tmp_path: Path) -> None:
    config, tensors = load_golden("llama-tied")
    config["quantization_config"] = {"quant_method": "gptq"}
    with pytest.raises(CheckpointError, match="quantization_config"):
        open_checkpoint(write_folder(tmp_path, config, tensors))


def test_unread_weights_stay_out_of_memory(tmp_path: Path) -> None:
    """64 MB of embedding are mapped, not read: the bound leaves room for the allocator."""
    config, tensors = load_golden("llama-tied")
    config["vocab_size"] = 262_144
    tensors["model.embed_tokens.weight"] = np.zeros((262_144, 64), np.float32)
    folder = write_folder(tmp_path, config, tensors)
    del tensors
    before = _resident_bytes()
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.weight_bytes > 64_000_000
        assert _resident_bytes() - before < 16_000_000


@pytest.mark.model
def test_smollm2_ids_and_first_logits_equal_the_reference(smollm2_gguf: Path) -> None:
    """Tolerance 2e-3: the reference's top 5 are float32 values printed with four decimals."""
    golden = json.loads((GOLDEN / "smollm2-135m-instruct.json").read_text())
    with open_checkpoint(smollm2_gguf) as checkpoint:
        assert checkpoint.digest == golden["gguf_sha256"]
        assert checkpoint.digest == hashlib.sha256(smollm2_gguf.read_bytes()).hexdigest()
        assert checkpoint.text is not None
        assert checkpoint.generation.eos_ids == (2,)
        tokenizer = Tokenizer.from_str(checkpoint.text.tokenizer_json.decode())
        twin = SlowTwin(checkpoint)
        for case in golden["cases"]:
            ids = tokenizer.encode(case["rendered"] or case["text"], add_special_tokens=False).ids
            assert ids == case["prompt_ids"]
            last = twin.logits(ids)[-1]
            top_ids, top_logits = zip(*case["first_top5"], strict=True)
            assert np.argsort(-last)[:5].tolist() == list(top_ids)
            np.testing.assert_allclose(last[list(top_ids)], top_logits, rtol=0, atol=2e-3)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
