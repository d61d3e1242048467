"""Run a smoothed model with a form for each unit: the model that is measured is the one that will be written.

Smoothing is folded in for every form. The one exception is a table that embedding and head share: it is smoothed for
the head only where it is in INT8, since otherwise one table could not serve both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from edge_engines.budget.forms import FLOATS, FormMultiply, Forms, round_rows
from edge_engines.checkpoint.spec import Float32, ModelSpec, Weights
from edge_engines.graph.head_padding import pad_heads
from edge_engines.graph.linear import Form
from edge_engines.sensitivity.blocks import EMBED, HEAD
from edge_engines.sensitivity.ends import Ends
from edge_engines.sensitivity.measure import list_units
from edge_engines.sensitivity.passes import Ids, Passes, Stream
from edge_engines.sensitivity.smoothing import FoldedWeights


class FormModel:
    """A model in memory, FP32, with the factors of smoothing folded in and heads as wide as the lowering wants them."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        factors: Mapping[str, Float32],
        scales: Mapping[str, float],
        lowering: str,
    ) -> None:
        """`scales` are those of each unit's input behind smoothing."""
        self.is_tied, self.factors, self.scales = spec.tied_head, factors, scales
        body = {unit: s for unit, s in factors.items() if unit != HEAD or not spec.tied_head}
        folded = FoldedWeights(spec, weights, body)
        self.spec, self._weights = pad_heads(folded.spec, folded) if lowering == "ort" else (folded.spec, folded)
        self.passes = Passes(self.spec, self._weights)
        self._plain = self._smoothed = self.passes.ends
        if spec.tied_head and HEAD in factors:
            all_folded = FoldedWeights(spec, weights, factors)
            self._smoothed = Ends(all_folded.spec, all_folded, all_folded.tied_by)
        for layer in range(self.passes.num_layers):
            self.passes.block(layer)

    @property
    def units(self) -> list[str]:
        """Return what is decided as one, in graph order; a tied table goes by the name of the head."""
        return [unit for unit in list_units(self.spec) if unit != EMBED or not self.is_tied]

    def width(self, unit: str) -> int:
        """Return the number of inputs of a unit's weights; of the embedding, that of a row."""
        return int(self.weight(unit).shape[1])

    def weight(self, unit: str) -> Float32:
        """Return the weight [out, in] of a unit, unsmoothed for a tied table."""
        if unit in (EMBED, HEAD):
            return self._plain.head
        _, layer, kind = unit.split(".")
        return self.passes.block(int(layer)).weights[kind]

    def ends(self, forms: Forms) -> Ends:
        """Return embedding and head as they are with these forms."""
        return self._smoothed if forms.get(HEAD) == "int8" else self._plain

    def multiply(self, forms: Forms) -> FormMultiply:
        """Return how the model multiplies with these forms."""
        return FormMultiply(forms, self.scales)

    def embed(self, ids: Ids, forms: Forms) -> Stream:
        """Return the residual streams before the first layer."""
        return [self.rows(row, forms) * np.float32(self.spec.embed_scale) for row in ids]

    def rows(self, row: Ids, forms: Forms) -> Float32:
        """Return rows of the embedding's table [S, hidden] in its form."""
        form = self.embedding_form(forms)
        ends = self.ends(forms)
        if form == "int8":
            return ends.rows(row, rounded=True)
        return round_rows(ends.rows(row), form)

    def embedding_form(self, forms: Forms) -> Form:
        """Return the form of the embedding, "fp32" where it is float."""
        return forms.get(HEAD if self.is_tied else EMBED, "fp32")

    def logits(self, stream: Stream, forms: Forms) -> Iterator[Float32]:
        """Yield the logits [S, V] of residual streams behind the last layer."""
        multiply, ends = self.multiply(forms), self.ends(forms)
        for x in stream:
            yield ends.logits(x, multiply)

    def run(self, ids: Ids, forms: Forms) -> Iterator[Float32]:
        """Yield the logits [S, V] of each sequence."""
        yield from self.logits(self.passes.finish(self.embed(ids, forms), self.multiply(forms)), forms)

    def entry(self, forms: Forms) -> int:
        """Return the first layer that these forms change, L for the head alone; 0 also where the embedding changes."""
        if self.embedding_form(forms) not in FLOATS:
            return 0
        changed = (int(u.split(".")[1]) for u, f in forms.items() if u not in (HEAD, EMBED) and f not in FLOATS)
        return min(changed, default=self.passes.num_layers)
