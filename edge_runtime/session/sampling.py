"""Choose the next token id from one row of logits. No text, no batch: one sampler belongs to one sequence."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import RequestError

MAX_SEED = 2**63 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)
# float32 logits leave an error near 1e-8 in each probability; without this slack a top_p that a set reaches exactly
# (0.5 + 0.25 with top_p 0.75) would keep one token more or less depending on rounding.
TOP_P_SLACK = 1e-7
FIRST_NUCLEUS = 128  # candidates sorted first for top_p; grown eightfold until they hold the mass

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Ids = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; the defaults are greedy."""

    temperature: float = 0.0  # finite, >= 0; 0 is greedy
    top_k: int = 0  # 0 and -1 are off; more than V is no limit
    top_p: float = 1.0  # 0..1; 0 keeps the best token only, 1 is off
    min_p: float = 0.0  # 0..1, relative to the best token's probability; 0 is off
    repetition_penalty: float = 1.0  # finite, > 0; 1 is off
    seed: int | None = None  # 0..2^63-1; None draws one
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # id -> added to its logit; -inf bans it

    def check(self, vocab: int) -> None:
        """Refuse values outside the ranges above; `vocab` is V, the exclusive limit of bias ids.

        Raises:
            RequestError: `invalid_request`, with `param` naming the field.
        """
        hot, penalty, seed = self.temperature, self.repetition_penalty, self.seed
        _require("temperature", hot, _is_finite(hot) and hot >= 0, "finite numbers >= 0")
        _require("top_k", self.top_k, _is_int(self.top_k) and self.top_k >= -1, "integers >= -1 (0 and -1 are off)")
        _require("top_p", self.top_p, _is_finite(self.top_p) and 0 <= self.top_p <= 1, "0 to 1")
        _require("min_p", self.min_p, _is_finite(self.min_p) and 0 <= self.min_p <= 1, "0 to 1")
        _require("repetition_penalty", penalty, _is_finite(penalty) and penalty > 0, "finite numbers > 0")
        _require("seed", seed, seed is None or (_is_int(seed) and 0 <= seed <= MAX_SEED), "0 to 2^63-1, or none")
        for token, bias in self.logit_bias.items():
            _require("logit_bias", token, _is_int(token) and 0 <= token < vocab, f"token ids 0 to {vocab - 1}")
            _require("logit_bias", bias, bias == -math.inf or _is_finite(bias), "finite numbers and -inf")


class Sampler:
    """Sample one sequence: own generator, own memory of seen ids, never a trace of the batch neighbour.

    The steps in order: ids from `known_ids` on are left out, repetition penalty, logit bias, temperature, top_k, top_p,
    min_p, one uniform draw by inverse CDF. The same seed and the same logits give the same ids; greedy draws nothing.
    """

    def __init__(self, params: SamplingParams, known_ids: int, vocab: int) -> None:
        params.check(vocab)
        self.seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        self._params = params
        self._vocab = vocab
        self._num_ids = min(known_ids, vocab)  # rows of the head beyond these are padding
        self._top_k = params.top_k if 0 < params.top_k < self._num_ids else 0
        self._random = np.random.Generator(np.random.PCG64(self.seed))
        self._seen = np.zeros(vocab, dtype=np.bool_) if params.repetition_penalty != 1 else None
        biased = {token: bias for token, bias in params.logit_bias.items() if token < self._num_ids}
        self._bias_ids = np.fromiter(biased.keys(), dtype=np.intp, count=len(biased))
        self._bias = np.fromiter(biased.values(), dtype=np.float32, count=len(biased))

    def observe(self, ids: Iterable[int]) -> None:
        """Remember prompt or output ids (each in 0..V-1) for the repetition penalty."""
        if self._seen is not None:
            self._seen[np.fromiter(ids, dtype=np.intp)] = True

    def sample(self, logits: Float32) -> int:
        """Return the next id from `logits`, float32 [V], which are read and never changed.

        Raises:
            RequestError: `numeric_error` when a NaN or +inf is among them, or nothing but -inf.
        """
        scores = self._scores(logits)  # [known ids]
        best = int(scores.argmax())  # the first on ties; a NaN counts as the largest
        highest = float(scores[best])
        if not math.isfinite(highest):
            raise RequestError("numeric_error", f"the model returned no usable logits: the highest is {highest}")
        if self._params.temperature == 0:
            return best
        ids, weights = self._candidates(scores, highest)
        drawn = _draw(weights, self._random.random())
        return drawn if ids is None else int(ids[drawn])

    def _scores(self, logits: Float32) -> Float32:
        """Return the logits of known ids with penalty and bias: a view when neither applies, else a copy."""
        assert logits.shape == (self._vocab,), f"logits {logits.shape}, vocabulary {self._vocab}"
        known: Float32 = logits[: self._num_ids]
        if self._seen is None and not self._bias_ids.size:
            return known
        scores: Float32 = known.copy()
        if self._seen is not None:
            ids = np.flatnonzero(self._seen[: self._num_ids])
            penalty = np.float32(self._params.repetition_penalty)
            seen = scores[ids]
            # Source: Keskar et al. 2019 (CTRL) divide; a negative logit is multiplied, or it would be boosted.
            scores[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
        scores[self._bias_ids] += self._bias
        return scores

    def _candidates(self, scores: Float32, highest: float) -> tuple[Ids | None, Float64]:
        """Return candidate ids (None: all, in order) and their weights relative to the best token's 1."""
        p = self._params
        ids: Ids | None = None
        if self._top_k:
            ids = _best(scores, self._top_k)
            weights = self._weights(scores[ids], highest)
            mass = float(weights.sum())
        else:
            weights = self._weights(scores, highest)
            mass = float(weights.sum())
            if p.top_p < 1:
                ids, weights = self._nucleus(scores, weights, mass)
        if p.top_p < 1:
            weights = weights[: 1 + int(np.searchsorted(weights.cumsum(), (p.top_p - TOP_P_SLACK) * mass))]
        if p.min_p > 0:
            weights[weights < p.min_p] = 0.0
        return ids, weights

    def _weights(self, scores: Float32, highest: float) -> Float64:
        """Return exp((score - highest) / temperature): float64 in 0..1, never an overflow however small the divisor."""
        weights = scores.astype(np.float64)
        weights -= highest
        with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to -inf, weight 0
            weights /= self._params.temperature
        return np.exp(weights, out=weights)

    def _nucleus(self, scores: Float32, weights: Float64, mass: float) -> tuple[Ids, Float64]:
        """Return best ids and weights, sorted, surely holding `top_p`: a full sort of V costs milliseconds."""
        num = FIRST_NUCLEUS
        while True:
            ids = _best(scores, min(num, scores.size))
            kept = weights[ids]
            if ids.size == scores.size or float(kept.sum()) >= self._params.top_p * mass:
                return ids, kept
            num *= 8


def _best(scores: Float32, count: int) -> Ids:
    """Return the ids of the `count` highest scores, best first; on ties the lower id, on every processor."""
    if count < scores.size:
        floor = np.partition(scores, scores.size - count)[scores.size - count]
        ids = np.flatnonzero(scores >= floor)
    else:
        ids = np.arange(scores.size)
    return ids[np.argsort(-scores[ids], kind="stable")[:count]]


def _draw(weights: Float64, uniform: float) -> int:
    """Return an index with probability in proportion to its weight; `uniform` is in [0, 1)."""
    cumulative = weights.cumsum()
    index = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounding may put the product on the total itself: then the last index with a weight is meant.
    return min(index, int(np.searchsorted(cumulative, cumulative[-1])))


def _require(name: str, value: object, is_allowed: bool, allowed: str) -> None:
    if not is_allowed:
        raise RequestError("invalid_request", f"{name} is {value!r}: allowed are {allowed}", param=f"$.{name}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    """Tell whether a number is finite in float32, the type of the logits."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= MAX_FLOAT32
