"""Compare the outputs of a graph with those of the float original, sample by sample, and bound the mean error.

The error of a sample is the relative L2 error of its worst output; of an output of whole numbers or truth values, the
share that differs; 1 where the shape differs. Padded positions are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_engines.onnx_model.ranges import without_padding
from edge_engines.onnx_model.samples import Array, Batch
from edge_runtime.errors import BuildError

Outputs = Mapping[str, Array]

_CLASSES = re.compile(r"logit|prob|class|score|softmax|label", re.IGNORECASE)
_Z = 1.96  # 95 % of a normal distribution, both sides
_SUM_TOLERANCE = 1e-3  # of probabilities that were exported as FP32


@dataclass(frozen=True, slots=True)
class SampleErrors:
    """One number per sample; arrays are [N]."""

    relative: NDArray[np.float64]
    cosine: NDArray[np.float64]  # least over rows and outputs
    same_top1: NDArray[np.bool_] | None  # None: no output looks like classes


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a graph's outputs agree with the original's over a set of samples."""

    samples: int
    error: float  # mean over samples
    upper: float  # 95 % bound of the mean
    worst: float
    cosine: float  # mean over samples of the least cosine of a row
    least_cosine: float
    same_top1: float | None  # share of samples; None without classes


def compare(wanted: Outputs, found: Outputs, batch: Batch) -> SampleErrors:
    """Return the errors of one batch."""
    parts = [_compare_one(wanted[name], found[name], batch) for name in wanted]
    classes = [_same_top1(wanted[name], found[name], batch.count) for name in wanted if has_classes(name, wanted[name])]
    return SampleErrors(
        np.max([error for error, _ in parts], axis=0),
        np.min([cosine for _, cosine in parts], axis=0),
        np.all(classes, axis=0) if classes else None,
    )


def agreement(errors: Sequence[SampleErrors]) -> Agreement:
    """Join the errors of all batches."""
    relative, cosine = (np.concatenate([getattr(e, key) for e in errors]) for key in ("relative", "cosine"))
    same = [e.same_top1 for e in errors if e.same_top1 is not None]
    is_finite = bool(np.isfinite(relative).all())
    spread = float(relative.std(ddof=1)) / len(relative) ** 0.5 if is_finite and len(relative) > 1 else 0.0
    return Agreement(
        samples=len(relative),
        error=float(relative.mean()),
        upper=float(relative.mean()) + _Z * spread,
        worst=float(relative.max()),
        cosine=float(cosine.mean()),
        least_cosine=float(cosine.min()),
        same_top1=float(np.concatenate(same).mean()) if same else None,
    )


def has_classes(name: str, values: Array) -> bool:
    """Say whether an output [B, C] looks like the scores of classes: by its name, or because rows are probabilities."""
    if values.ndim != 2 or values.shape[1] < 2 or values.dtype.kind != "f":
        return False
    sums = values.sum(axis=1)
    return bool(_CLASSES.search(name)) or bool((values >= 0).all() and np.allclose(sums, 1, atol=_SUM_TOLERANCE))


def check_finite(outputs: Outputs) -> None:
    """Raise BuildError when the original itself gives NaN or infinity."""
    for name, values in outputs.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise BuildError(
                f"the model's own output {name!r} holds NaN or infinity", remedy="the model or the samples are broken"
            )


def _compare_one(wanted: Array, found: Array, batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return relative error and least cosine [B] of one output."""
    errors, cosines = np.ones(batch.count), np.zeros(batch.count)
    if wanted.shape != found.shape:
        return errors, cosines
    for i in range(batch.count):
        one, other = (_sample(values, i, batch) for values in (wanted, found))
        if one.dtype.kind != "f":
            errors[i] = float((one != other).mean()) if one.size else 0.0
            cosines[i] = 1 - errors[i]
        else:
            errors[i], cosines[i] = _relative(one, other), _least_cosine(one, other)
    return errors, cosines


def _sample(values: Array, i: int, batch: Batch) -> Array:
    """Return what belongs to one sample, without padded positions."""
    valid = batch.valid
    if batch.count > 1:
        values, valid = values[i : i + 1], valid[i : i + 1] if valid is not None else None
    return without_padding(values, valid)


def _relative(wanted: Array, found: Array) -> float:
    norm = float(np.linalg.norm(wanted.astype(np.float64)))
    difference = float(np.linalg.norm(found.astype(np.float64) - wanted))
    if norm == 0:
        return 0.0 if difference == 0 else 1.0
    return difference / norm if np.isfinite(difference) else float("inf")


def _least_cosine(wanted: Array, found: Array) -> float:
    """Return the least cosine of a row (last axis) with its original; 1 without rows of some length."""
    rows, others = (v.reshape(-1, v.shape[-1] if v.ndim else 1).astype(np.float64) for v in (wanted, found))
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(others, axis=1)
    alive = norms > 0
    if not alive.any():
        return 1.0
    cosines = (rows * others).sum(axis=1)[alive] / norms[alive]
    return float(cosines.min()) if np.isfinite(cosines).all() else -1.0


def _same_top1(wanted: Array, found: Array, count: int) -> NDArray[np.bool_]:
    if wanted.shape != found.shape:
        return np.zeros(count, bool)
    same: NDArray[np.bool_] = wanted.argmax(axis=1) == found.argmax(axis=1)
    return same if len(same) == count else np.full(count, bool(same.all()))
