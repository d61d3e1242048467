"""Hold choices of forms against the baseline: the ratio of perplexities on the gate's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from edge_engines.budget.forms import FLOATS, Forms
from edge_engines.budget.measure import spelled
from edge_engines.budget.model import FormModel
from edge_engines.perplexity import Ratio, perplexity_ratio, token_losses
from edge_engines.sensitivity.gate import BOOTSTRAP_SEED, Losses
from edge_engines.sensitivity.journal import Journal
from edge_engines.texts.sets import TextSet


@dataclass(frozen=True, slots=True)
class Verdict:
    """One choice on the gate's text."""

    ratio: Ratio
    by_domain: dict[str, float]  # ratio of each domain of the text


class FormJudge:
    """The gate of one model."""

    def __init__(self, model: FormModel, text: TextSet, journal: Journal) -> None:
        self._model, self._text, self._journal = model, text, journal

    @cached_property
    def base_losses(self) -> Losses:
        """The baseline's loss of each judged token."""
        raw = self._journal.once("baseline of forms", bytes, lambda: self._losses({}).astype("<f8").tobytes())
        return np.frombuffer(raw, "<f8").reshape(len(self._text.ids), -1)

    def judge(self, forms: Forms) -> Verdict:
        """Hold a choice against the baseline."""
        return self._journal.once(f"judge {spelled(forms)}", Verdict, lambda: self._judge(forms))

    def _judge(self, forms: Forms) -> Verdict:
        is_float = all(form in FLOATS for form in forms.values())
        losses = self.base_losses if is_float else self._losses(forms)
        ratio = perplexity_ratio(self.base_losses, losses, seed=BOOTSTRAP_SEED)
        return Verdict(ratio, _by_domain(losses - self.base_losses, self._text.domains))

    def _losses(self, forms: Forms) -> Losses:
        rows = zip(self._model.run(self._text.ids, forms), self._text.ids, strict=True)
        return np.array([token_losses(logits, row) for logits, row in rows])


def _by_domain(excess: Losses, domains: Sequence[str]) -> dict[str, float]:
    """Return the ratio of perplexities of each domain."""
    names = np.array(domains)
    return {name: float(np.exp(excess[names == name].mean())) for name in dict.fromkeys(domains)}
