"""Keep a checkpoint's weights in memory and answer with reference logits: the slow twin of the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import ModelSpec, Weights
from edge_engines.reference import Array, logits


class HasSpecAndWeights(Weights, Protocol):
    """An open checkpoint."""

    @property
    def spec(self) -> ModelSpec: ...


class SlowTwin:
    """A checkpoint that answers with logits; keeps the weights it has loaded, in float32."""

    def __init__(self, checkpoint: HasSpecAndWeights) -> None:
        self.spec = checkpoint.spec
        self._weights = _Cached(checkpoint)

    def logits(self, ids: Sequence[int]) -> Array:
        """Return the logits [S, V] of every position."""
        return logits(self.spec, self._weights, ids)

    def greedy(self, prompt: Sequence[int], num_new: int) -> tuple[list[int], list[float]]:
        """Return `num_new` ids chosen by the largest logit, and how far each was ahead of the second."""
        ids, gaps = list(prompt), []
        for _ in range(num_new):
            last = self.logits(ids)[-1]
            second, first = np.sort(last)[-2:]
            ids.append(int(last.argmax()))
            gaps.append(float(first - second))
        return ids[len(prompt) :], gaps


class _Cached:
    """Weights that are read from the file once."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._kept: dict[str, NDArray[np.float32]] = {}

    def tensor(self, name: str) -> NDArray[np.float32]:
        if name not in self._kept:
            self._kept[name] = self._weights.tensor(name)
        return self._kept[name]
