"""Score each unit: how far INT8 moves its own output, and how far that moves the model's answer.

Local errors come from one pass, the effect on the logits from one run per unit of the layers behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import Float32, ModelSpec
from edge_engines.sensitivity.blocks import BODY_UNITS, EMBED, HEAD, multiply_exactly, unit_name
from edge_engines.sensitivity.int8 import Int8Multiply
from edge_engines.sensitivity.journal import Journal
from edge_engines.sensitivity.passes import Ids, Passes, Stream

_ROWS_AT_ONCE = 64
_ROWS_CUT = 128


@dataclass(frozen=True, slots=True)
class LocalError:
    """Relative L2 error of a unit's output when that unit alone runs INT8: ‖y - ŷ‖ / ‖y‖.

    `pooled` takes the norm over all tokens at once, `per_token` is the mean over tokens: one token with massive
    activations dominates the first and hides the error of all others, a clipped spike is missed by the second.
    """

    pooled: float
    per_token: float
    worst_token: float

    @property
    def score(self) -> float:
        """What the threshold is held against: the larger of both means."""
        return max(self.pooled, self.per_token)


@dataclass(frozen=True, slots=True)
class Effect:
    """What INT8 of some units does to the logits on the ranking text."""

    kl: float  # mean Kullback-Leibler divergence per token from the FP32 distribution, in nats
    kl_p99: float  # of tokens
    kl_max: float
    same_top1: float  # share of tokens whose likeliest next token is the same


def list_units(spec: ModelSpec) -> list[str]:
    """Return the units that INT8 is chosen for, in graph order. In a tied model embedding and head decide together."""
    return [EMBED, *(unit_name(i, kind) for i in range(len(spec.layers)) for kind in BODY_UNITS), HEAD]


def measure_local(
    passes: Passes, ids: Ids, scales: Mapping[str, float], advance: Callable[[int], None]
) -> dict[str, LocalError]:
    """Return the local error of every unit on `ids`; `advance` is told of each layer."""
    sums = {EMBED: _Sums()}
    for row in ids:
        sums[EMBED].add(passes.ends.rows(row), passes.ends.rows(row, rounded=True))
    quantized = Int8Multiply(scales, scales)

    def compare(unit: str, x: Float32, weight: Float32) -> Float32:
        exact = multiply_exactly(unit, x, weight)
        sums.setdefault(unit, _Sums()).add(exact, quantized(unit, x, weight))
        return exact

    stream = passes.embed(ids)
    for _, after in passes.layers(stream, compare):
        stream = after
        advance(1)
    for _ in passes.logits(_cut(stream), compare):
        pass
    return {unit: found.result() for unit, found in sums.items()}


def find_baseline(passes: Passes, ids: Ids) -> list[Float32]:
    """Return the FP32 log-probabilities [S, V] of each sequence."""
    stream = passes.finish(passes.embed(ids), multiply_exactly)
    return [log_probabilities(x) for x in passes.logits(stream)]


class EffectMeter:
    """Measures what a set of INT8 units does to the logits, running only the layers from the first of them on."""

    def __init__(
        self,
        passes: Passes,
        ids: Ids,
        scales: Mapping[str, float],
        journal: Journal,
        baseline: Sequence[Float32] = (),
        *,
        keeps_baseline: bool = True,
    ) -> None:
        """`baseline` is that of the same ids; found with `passes` when it is needed and not given.

        Without `keeps_baseline` it is found again for each measurement, some rows at a time: long texts are large.
        """
        self._passes, self._ids, self._scales, self._journal = passes, ids, scales, journal
        self._base, self._keeps_baseline = baseline, keeps_baseline
        self._entries: list[Stream] = []  # residual streams before each layer and behind the last, as far as needed

    @property
    def base(self) -> Iterable[Float32]:
        """The FP32 log-probabilities [S, V] of each sequence."""
        if not self._keeps_baseline:
            behind = _cut(self._entry(self._passes.num_layers))
            return (log_probabilities(x) for x in self._passes.logits(behind))
        if not self._base:
            self._base = find_baseline(self._passes, self._ids)
        return self._base

    def of(self, units: Collection[str]) -> Effect:
        """Return the effect of `units`."""
        name = " ".join(["effect", *sorted(self._passes.all_of(units))])
        return self._journal.once(name, Effect, lambda: self._measure(units))

    def _measure(self, units: Collection[str]) -> Effect:
        first = self._first_layer(units)
        embedded = self._passes.is_embedded_in(units)
        multiply = Int8Multiply(self._scales, units)
        stream = self._passes.embed(self._ids, units) if embedded else self._entry(first)
        stream = self._passes.finish(stream, multiply, first)
        stream = stream if self._keeps_baseline else _cut(stream)
        divergences, agreements = [], []
        for base, logits in zip(self.base, self._passes.logits(stream, multiply), strict=True):
            divergence, agreement = compare_rows(base, logits)
            divergences.append(divergence)
            agreements.append(agreement)
        kl, same = np.concatenate(divergences), np.concatenate(agreements)
        return Effect(float(kl.mean()), float(np.quantile(kl, 0.99)), float(kl.max()), float(same.mean()))

    def _first_layer(self, units: Collection[str]) -> int:
        """Return the first layer that `units` change; L for the head alone."""
        if self._passes.is_embedded_in(units):
            return 0
        layers = (int(unit.split(".")[1]) for unit in units if unit != HEAD)
        return min(layers, default=self._passes.num_layers)

    def _entry(self, layer: int) -> Stream:
        """Return the FP32 streams before a layer; L: behind the last."""
        if not self._entries:
            self._entries.append(self._passes.embed(self._ids))
        start = len(self._entries) - 1
        if layer > start:
            self._entries += [after for _, after in self._passes.layers(self._entries[-1], multiply_exactly, start)]
        return self._entries[layer]


def log_probabilities(logits: Float32) -> Float32:
    """Return log softmax over the last axis of [S, V], in place; some rows at a time, since rows are long."""
    for rows in _some_rows(logits):
        np.subtract(rows, rows.max(axis=-1, keepdims=True), out=rows)
        total = np.exp(rows).sum(axis=-1, keepdims=True, dtype=np.float64)
        np.subtract(rows, np.log(total).astype(np.float32), out=rows)
    return logits


def compare_rows(base: Float32, logits: Float32) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return KL(base ‖ other) and whether the likeliest id is the same, per row; `base` [S, V]: log-probabilities."""
    other = log_probabilities(logits)
    same = base.argmax(axis=-1) == other.argmax(axis=-1)
    divergences = []
    for expected, found in zip(_some_rows(base), _some_rows(other), strict=True):
        np.subtract(expected, found, out=found)
        divergences.append(np.einsum("sv,sv->s", np.exp(expected), found, dtype=np.float64))
    return np.maximum(np.concatenate(divergences), 0.0), same


def _cut(stream: Stream) -> Stream:
    """Return streams of fewer rows each, for what looks at rows alone."""
    return [x[start : start + _ROWS_CUT] for x in stream for start in range(0, len(x), _ROWS_CUT)]


def _some_rows(values: Float32) -> Iterator[Float32]:
    """Yield views of a few rows each."""
    yield from (values[start : start + _ROWS_AT_ONCE] for start in range(0, len(values), _ROWS_AT_ONCE))


class _Sums:
    """Running sums of one unit's errors: nothing of the outputs is kept."""

    def __init__(self) -> None:
        self._error = self._norm = self._relative = self._worst = 0.0
        self._tokens = 0

    def add(self, exact: Float32, rounded: Float32) -> None:
        """Add rows [S, out], some at a time: a head's are large in float64."""
        for parts in zip(_some_rows(exact), _some_rows(rounded), strict=True):
            self._add(*parts)

    def _add(self, exact: Float32, rounded: Float32) -> None:
        error = np.square(exact - rounded, dtype=np.float64).sum(axis=1)  # [S]
        norm = np.square(exact, dtype=np.float64).sum(axis=1)
        relative = np.sqrt(error / np.maximum(norm, np.finfo(np.float64).tiny))
        self._error += float(error.sum())
        self._norm += float(norm.sum())
        self._relative += float(relative.sum())
        self._worst = max(self._worst, float(relative.max()))
        self._tokens += len(relative)

    def result(self) -> LocalError:
        pooled = (self._error / self._norm) ** 0.5 if self._norm else 0.0
        return LocalError(pooled, self._relative / self._tokens, self._worst)
