"""Measure how far a model's predictions are from its baseline's: token losses and the ratio of perplexities.

Axis letters: N sequences, S positions, V vocabulary. Logits and log-probabilities do equally well, in any float type;
sums are float64. A NaN stays a NaN, so that no comparison with a limit passes by accident.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Float64 = NDArray[np.float64]

NUM_RESAMPLES = 4000  # the Monte Carlo error of the standard error is 1 / sqrt(2 x 4000), about 1 %
_NORMAL_95 = 1.96  # two-sided 95 % quantile of the normal distribution
_CHUNK_ELEMENTS = 2**21  # 16 MiB of float64: 13 rows of a vocabulary of 150,000


@dataclass(frozen=True, slots=True)
class Ratio:
    """The perplexity of a model by that of its baseline on the same tokens."""

    ratio: float  # exp(mean difference of the losses)
    low: float  # 95 % interval, percentiles of the bootstrap
    high: float
    standard_error: float  # of the logarithm of the ratio, so about that of the ratio near 1

    @property
    def upper(self) -> float:
        """The bound that the gate holds against its limit: exp(mean + 1.96 standard errors)."""
        with np.errstate(over="ignore"):  # no bound at all is infinity
            return self.ratio * float(np.exp(_NORMAL_95 * self.standard_error))


def token_losses(logits: Floats, ids: NDArray[np.integer]) -> Float64:
    """Return -ln p of each next id: `logits` [S, V], `ids` [S] -> [S - 1]. The last row predicts nothing known."""
    if logits.ndim != 2 or ids.shape != logits.shape[:1] or len(ids) < 2:
        raise ValueError(f"logits {logits.shape} and ids {ids.shape}: [S, V] and [S] with S >= 2 are needed")
    losses = np.empty(len(ids) - 1)
    for rows in _chunks(len(losses), logits.shape[1]):
        losses[rows] = _losses(logits[rows], ids[1:][rows])
    return losses


def perplexity(losses: Float64) -> float:
    """Return exp(mean loss)."""
    return float(np.exp(losses.mean()))


def perplexity_ratio(base_losses: Float64, losses: Float64, seed: int) -> Ratio:
    """Compare paired losses [N, S - 1] of a baseline and a model on the same N >= 2 sequences.

    The interval is a block bootstrap whose block is a whole sequence: losses within a text depend on each other, and
    their differences differ by domain. Deviations are widened by sqrt(N / (N - 1)): the spread among N sequences is
    taken about their own mean and so is too small by that factor. The seed decides the resamples, nothing else.

    Source: B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993).
    """
    if base_losses.shape != losses.shape or losses.ndim != 2 or len(losses) < 2:
        raise ValueError(f"losses {base_losses.shape} and {losses.shape}: both [N, S - 1] with N >= 2 are needed")
    n = len(losses)
    with np.errstate(over="ignore", invalid="ignore"):  # a broken model may give infinite losses: inf and NaN are right
        differences = (losses - base_losses).mean(axis=1)  # [N]
        chosen = np.random.default_rng(seed).integers(n, size=(NUM_RESAMPLES, n))
        deviations = (differences[chosen].mean(axis=1) - differences.mean()) * math.sqrt(n / (n - 1))
        low, high = np.quantile(deviations, (0.025, 0.975))
        ratio, low, high = np.exp(differences.mean() + np.array([0.0, low, high]))
        return Ratio(float(ratio), float(low), float(high), float(deviations.std()))


def _chunks(num_rows: int, vocab: int) -> Iterator[slice]:
    """Yield slices of rows that stay small in float64 whatever the vocabulary."""
    step = max(1, _CHUNK_ELEMENTS // vocab)
    yield from (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _losses(logits: Floats, ids: NDArray[np.integer]) -> Float64:
    """Return -ln p of one id per row, from logits [rows, V]."""
    with np.errstate(invalid="ignore"):  # inf - inf is the NaN that is wanted
        shifted = np.subtract(logits, logits.max(axis=1, keepdims=True), dtype=np.float64)
        wanted: Float64 = shifted[np.arange(len(ids)), ids]
        np.exp(shifted, out=shifted)
        losses: Float64 = np.log(shifted.sum(axis=1)) - wanted
    return losses
