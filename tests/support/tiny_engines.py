"""Build engines of the tiny golden models, and know what they must answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import edge_engines
from edge_engines.int8_build import Int8Options
from edge_engines.texts.sets import SetSize, TextSizes
from edge_runtime.session.session import Session

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
FAMILIES = ("llama-tied", "llama3-scaled", "qwen2", "qwen3", "mistral-window", "gemma3", "phi3")
# Absolute tolerance of FP32 logits against Hugging Face transformers: issue "First light", point 2; measured 2e-5.
FP32_TOLERANCE = 2e-4


@dataclass(frozen=True)
class Expected:
    """What transformers computes for a golden model."""

    ids: list[int]  # [40]
    logits: NDArray[np.float32]  # [40, V], at every position
    prompt: list[int]
    greedy: list[int]


def expected(name: str) -> Expected:
    with np.load(GOLDEN / name / "expected.npz") as data:
        return Expected(data["input_ids"].tolist(), data["logits"], data["prompt"].tolist(), data["greedy"].tolist())


def build_tiny(
    name: str,
    folder: Path,
    *,
    lowering: str = "ort",
    precision: str = "fp32",
    capacity: int = 64,
    max_batch: int = 2,
) -> Path:
    """Build the engine of a golden model into `folder`."""
    edge_engines.build(
        GOLDEN / name,
        folder,
        lowering=lowering,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        capacity=capacity,
        max_batch=max_batch,
    )
    return folder


def tiny_int8_options(folder: Path, **more: object) -> Int8Options:
    """Return how INT8 is chosen for a golden model: on random ids of its vocabulary, which stand in for text.

    Random text tells little about a random model, so the gate is wide.
    """
    path = folder / "ids.npy"
    np.save(path, np.random.default_rng(0).integers(0, 320, (40, 32)))
    sizes = TextSizes(SetSize(8, 32), SetSize(2, 32), SetSize(12, 32))
    return Int8Options(**{"calibration": path, "gate": 1.2, "sizes": sizes, **more})  # type: ignore[arg-type]


def greedy(session: Session, slot: int, prompt: Sequence[int], num_new: int) -> list[int]:
    """Decode `num_new` ids alone on one slot."""
    ids, logits = [], session.prefill(slot, prompt)
    for position in range(len(prompt), len(prompt) + num_new):
        ids.append(int(logits.argmax()))
        logits = session.decode([slot], [ids[-1]], [position])[0]
    return ids
