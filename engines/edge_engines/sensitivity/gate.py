"""Hold sets of INT8 units against the baseline: the ratio of perplexities on the gate's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import Float32
from edge_engines.perplexity import Ratio, perplexity, perplexity_ratio, token_losses
from edge_engines.progress import Progress
from edge_engines.sensitivity.blocks import Multiply
from edge_engines.sensitivity.int8 import Int8Multiply
from edge_engines.sensitivity.journal import Journal
from edge_engines.sensitivity.passes import Ids, Passes
from edge_engines.texts.sets import TextSet

BOOTSTRAP_SEED = 0
_ROWS_AT_ONCE = 128  # of logits
Losses = NDArray[np.float64]  # [N, S - 1]


@dataclass(frozen=True, slots=True)
class Check:
    """One set on the gate's text."""

    int8: frozenset[str]
    ratio: Ratio
    excess: tuple[float, ...]  # of each sequence: mean loss above the baseline's, nats
    by_domain: Mapping[str, float]  # ratio of each domain of the text


class Judge:
    """The gate of one model: call it with a set of units to have the upper 95 % bound of its perplexity ratio."""

    def __init__(
        self, passes: Passes, text: TextSet, scales: Mapping[str, float], journal: Journal, progress: Progress
    ) -> None:
        self._passes, self._text, self._scales = passes, text, scales
        self._journal, self._progress = journal, progress
        self.checks: dict[frozenset[str], Check] = {}  # by the set, in the order in which they were asked for

    def release(self) -> Judge:
        """Let go of the model, keeping its baseline's losses: from here on only `check` is asked."""
        self.base_losses  # noqa: B018  # found while there is a model
        del self._passes
        return self

    @property
    def ids(self) -> Ids:
        """The gate's text."""
        return self._text.ids

    @cached_property
    def base_losses(self) -> Losses:
        """The baseline's loss of each judged token."""
        raw = self._journal.once(
            "baseline", bytes, lambda: self._losses(self._passes, self._scales, frozenset()).astype("<f8").tobytes()
        )
        return np.frombuffer(raw, "<f8").reshape(len(self._text.ids), -1)

    @property
    def base_perplexity(self) -> float:
        """The baseline's perplexity."""
        return perplexity(self.base_losses)

    def __call__(self, int8: frozenset[str]) -> float:
        """Return the upper 95 % bound of a set's ratio."""
        check = self.check(self._passes, self._scales, int8, "check")
        self.checks[int8] = check
        self._progress.note(
            f"{len(int8)} units in INT8: perplexity x {check.ratio.ratio:.4f}, at most {check.ratio.upper:.4f}"
        )
        return check.ratio.upper

    def check(self, passes: Passes, scales: Mapping[str, float], int8: frozenset[str], name: str) -> Check:
        """Hold a set against the baseline; `passes` may be smoothed in another way, which `name` must tell."""

        def measure() -> Check:
            losses = self._losses(passes, scales, int8)
            excess = losses - self.base_losses
            return Check(
                int8,
                perplexity_ratio(self.base_losses, losses, seed=BOOTSTRAP_SEED),
                tuple(excess.mean(axis=1).tolist()),
                _by_domain(excess, self._text.domains),
            )

        return self._journal.once(" ".join([name, *sorted(passes.all_of(int8))]), Check, measure)

    def _losses(self, passes: Passes, scales: Mapping[str, float], int8: frozenset[str]) -> Losses:
        multiply, ids = Int8Multiply(scales, int8), self._text.ids
        stream = passes.finish(passes.embed(ids, int8), multiply)
        return np.array([_sequence_losses(passes, x, row, multiply) for x, row in zip(stream, ids, strict=True)])


def _sequence_losses(passes: Passes, x: Float32, ids: Ids, multiply: Multiply) -> NDArray[np.float64]:
    """Return the losses [S - 1] of one sequence, the logits of some rows at a time: each row predicts the next id."""
    starts = range(0, len(ids) - 1, _ROWS_AT_ONCE)
    parts = [slice(start, start + _ROWS_AT_ONCE + 1) for start in starts]
    return np.concatenate([token_losses(passes.ends.logits(x[part], multiply), ids[part]) for part in parts])


def _by_domain(excess: Losses, domains: Sequence[str]) -> dict[str, float]:
    """Return the ratio of perplexities of each domain."""
    names = np.array(domains)
    return {name: float(np.exp(excess[names == name].mean())) for name in dict.fromkeys(domains)}
