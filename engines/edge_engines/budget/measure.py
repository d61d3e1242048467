"""Measure what each form does to each unit: its own error, and the effect on the logits.

Effects of INT8 and w4 are measured unit by unit, running only the layers from that unit on. w8 does so little that its
effect is measured once for all units together, and shared out: a divergence grows with the square of the error it stems
from, so a unit's share is its effect in w4 times (error in w8 / error in w4)^2. The gate sees every choice as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_engines.budget.forms import FLOATS, Forms, offered_forms
from edge_engines.budget.model import FormModel
from edge_engines.checkpoint.spec import Float32
from edge_engines.graph.linear import Form
from edge_engines.progress import Progress
from edge_engines.sensitivity.blocks import EMBED, HEAD, multiply_exactly
from edge_engines.sensitivity.journal import Journal
from edge_engines.sensitivity.measure import Effect, LocalError, compare_rows, log_probabilities
from edge_engines.sensitivity.passes import Ids, Stream

SHARED: Form = "w8"  # whose effect is measured jointly
LIKE: Form = "w4"  # whose effects it is shared out like


@dataclass(frozen=True, slots=True)
class Measured:
    """What one form does to one unit when that unit alone has it."""

    local: LocalError  # of a tied table: of its worse end
    kl: float  # nats per token
    is_shared_out: bool  # kl is a share of what was measured for all units together


class FormMeter:
    """Measures what forms do to the logits of a text."""

    def __init__(self, model: FormModel, ids: Ids, journal: Journal, base: Sequence[Float32] | None = None) -> None:
        """`base` is that of a meter of the same FP32 model on the same ids: it need not be run again."""
        self.model, self.ids, self.journal, self._base = model, ids, journal, base
        self._entries: list[Stream] = []  # residual streams before each layer and behind the last

    @property
    def base(self) -> Sequence[Float32]:
        """The FP32 log-probabilities [S, V] of each sequence."""
        if self._base is None:
            self._base = [log_probabilities(x) for x in self.model.logits(self._entry(-1), {})]
        return self._base

    def of(self, forms: Forms) -> Effect:
        """Return the effect of these forms."""
        return self.journal.once(f"effect {spelled(forms)}", Effect, lambda: self._measure(forms))

    def _measure(self, forms: Forms) -> Effect:
        model, first = self.model, self.model.entry(forms)
        stream = model.embed(self.ids, forms) if first == 0 else self._entry(first)
        stream = model.passes.finish(stream, model.multiply(forms), first)
        rows = [compare_rows(b, x) for b, x in zip(self.base, model.logits(stream, forms), strict=True)]
        kl, same = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        return Effect(float(kl.mean()), float(np.quantile(kl, 0.99)), float(kl.max()), float(same.mean()))

    def _entry(self, layer: int) -> Stream:
        if not self._entries:
            self._entries.append(self.model.embed(self.ids, {}))
            self._entries += [s for _, s in self.model.passes.layers(self._entries[0], multiply_exactly)]
        return self._entries[layer]


def spelled(forms: Forms) -> str:
    """Return forms as one word of a journal: the same for the same forms."""
    return " ".join(f"{unit}:{form}" for unit, form in sorted(forms.items()) if form not in FLOATS)


def measure_forms(meter: FormMeter, lowering: str, progress: Progress) -> dict[str, dict[Form, Measured]]:
    """Return what each form that is offered does to each unit, in graph order; float does nothing and is left out."""
    model = meter.model
    offered = {unit: offered_forms(lowering, model.width(unit))[1:] for unit in model.units}
    progress.step("measuring each unit's own error", model.passes.num_layers)
    local = measure_local_errors(model, offered, meter.ids, meter.journal, progress.advance)
    alone = [(unit, form) for unit, forms in offered.items() for form in forms if form != SHARED]
    progress.step("measuring each unit's effect on the logits", len(alone))
    effects: dict[tuple[str, Form], float] = {}
    for unit, form in alone:
        effects[unit, form] = meter.of({unit: form}).kl
        progress.advance(1)
    together = [unit for unit, forms in offered.items() if SHARED in forms]
    if together:
        joint = meter.of(dict.fromkeys(together, SHARED)).kl
        likes = {unit: effects[unit, LIKE] * _squared(local[unit, SHARED], local[unit, LIKE]) for unit in together}
        total = math.fsum(likes.values())
        effects |= {(unit, SHARED): joint * like / total if total else 0.0 for unit, like in likes.items()}
    return {
        unit: {form: Measured(local[unit, form], effects[unit, form], form == SHARED) for form in forms}
        for unit, forms in offered.items()
    }


def measure_local_errors(
    model: FormModel,
    offered: Mapping[str, Sequence[Form]],
    ids: Ids,
    journal: Journal,
    advance: Callable[[int], None],
) -> dict[tuple[str, Form], LocalError]:
    """Return the relative error of each unit's output in each form; of a tied table, that of its worse end."""

    def measure() -> dict[str, LocalError]:
        errors = _Errors(model, offered)
        stream = model.embed(ids, {})
        for row in ids:
            errors.compare_rows(row)
        for _, after in model.passes.layers(stream, errors.compare):
            stream = after
            advance(1)
        for x in stream:
            model.ends({}).logits(x, errors.compare)
            if model.ends({HEAD: "int8"}) is not model.ends({}):
                model.ends({HEAD: "int8"}).logits(x, errors.compare_smoothed_head)
        return errors.results()

    found = journal.once("local", dict[str, LocalError], measure)
    return {(unit, form): found[f"{unit}:{form}"] for unit, forms in offered.items() for form in forms}


def _squared(error: LocalError, other: LocalError) -> float:
    return (error.score / other.score) ** 2 if other.score else 1.0


class _Errors:
    """Errors of each token, by what was compared: three numbers of each are kept, nothing of the outputs."""

    def __init__(self, model: FormModel, offered: Mapping[str, Sequence[Form]]) -> None:
        self._model, self._offered = model, offered
        self._in_form = {form: model.multiply(dict.fromkeys(offered, form)) for f in offered.values() for form in f}
        self._smooths_head = model.ends({HEAD: "int8"}) is not model.ends({})
        self._found: dict[tuple[str, str], list[NDArray[np.float64]]] = {}  # (unit:form, end) -> [2, S] squares

    def compare(self, unit: str, x: Float32, weight: Float32) -> Float32:
        """Multiply exactly, noting what each form would make of it."""
        exact = multiply_exactly(unit, x, weight)
        for form in self._offered[unit]:
            if not (unit == HEAD and form == "int8" and self._smooths_head):
                self._add(unit, form, "product", exact, self._in_form[form](unit, x, weight))
        return exact

    def compare_smoothed_head(self, unit: str, x: Float32, weight: Float32) -> Float32:
        """Do the same for a tied head in INT8, which is smoothed then."""
        exact = multiply_exactly(unit, x, weight)
        self._add(unit, "int8", "product", exact, self._in_form["int8"](unit, x, weight))
        return exact

    def compare_rows(self, row: Ids) -> None:
        """Note what each form makes of the embedding's rows."""
        unit = HEAD if self._model.is_tied else EMBED
        exact = self._model.rows(row, {})
        for form in self._offered[unit]:
            rounded = self._model.rows(row, {unit: form})
            self._add(unit, form, "rows", exact, rounded)

    def results(self) -> dict[str, LocalError]:
        """Return the errors by "unit:form"."""
        worst: dict[str, LocalError] = {}
        for (name, _), parts in self._found.items():
            error, norm = np.concatenate(parts, axis=1)
            relative = np.sqrt(error / np.maximum(norm, np.finfo(np.float64).tiny))
            pooled = math.sqrt(error.sum() / norm.sum()) if norm.any() else 0.0
            found = LocalError(pooled, float(relative.mean()), float(relative.max()))
            worst[name] = max(worst.get(name, found), found, key=lambda e: e.score)
        return worst

    def _add(self, unit: str, form: Form, end: str, exact: Float32, rounded: Float32) -> None:
        squares = [np.square(part, dtype=np.float64).sum(axis=1) for part in (exact - rounded, exact)]
        self._found.setdefault((f"{unit}:{form}", end), []).append(np.array(squares))
