"""Compute what stands before and behind the blocks: embedding, final norm, head.

Where the model ties the head to the embedding both read one table, in INT8 too: its codes are those of the rows times
the factors that smooth the head, and the embedding divides by the factors again.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import Float32, ModelSpec, Weights
from edge_engines.sensitivity.blocks import EMBED, HEAD, Multiply, rms_norm
from edge_engines.sensitivity.int8 import round_weight


class Ends:
    """Embedding, final norm and head with their weights in memory, float32."""

    def __init__(self, spec: ModelSpec, weights: Weights, tied_by: Float32 | None = None) -> None:
        """`tied_by` [hidden]: factors between embedding and head of a tied model whose smoothed head looks untied."""
        self._spec, self._weights = spec, weights
        self.head = weights.tensor(EMBED if spec.tied_head else HEAD)
        self._table = weights.tensor(EMBED) if not spec.tied_head and tied_by is None else self.head
        self._rows: dict[int, Float32] = {}  # of the embedding that a smoothed head came from: those asked for
        self._norm = weights.tensor("norm") + np.float32(spec.norm_offset)
        self.is_tied = spec.tied_head or tied_by is not None
        self._tied_by = tied_by

    def embed(self, ids: NDArray[np.int64], *, rounded: bool = False) -> Float32:
        """Return the residual stream [S, hidden] of a sequence, from the INT8 table if `rounded`."""
        stream: Float32 = self.rows(ids, rounded=rounded) * np.float32(self._spec.embed_scale)
        return stream

    def rows(self, ids: NDArray[np.int64], *, rounded: bool = False) -> Float32:
        """Return rows of the table [S, hidden]. In INT8 each row has its own scale, so that only these are rounded."""
        is_unsmoothed = self._tied_by is not None and not rounded
        rows: Float32 = self._unsmoothed_rows(ids) if is_unsmoothed else self._table[ids]
        if rounded:
            rows = round_weight(rows)
        if rounded and self._tied_by is not None:
            rows *= np.float32(1) / self._tied_by
        return rows

    def _unsmoothed_rows(self, ids: NDArray[np.int64]) -> Float32:
        """Return rows of the embedding; the table is read when a new one is needed, and not kept beside the head."""
        wanted = ids.tolist()
        missing = set(wanted) - self._rows.keys()
        if missing:
            table = self._weights.tensor(EMBED)
            self._rows |= {row: table[row].copy() for row in missing}
        return np.stack([self._rows[row] for row in wanted])

    def logits(self, x: Float32, multiply: Multiply) -> Float32:
        """Return the logits [S, V] of a residual stream."""
        return multiply(HEAD, rms_norm(x, self._norm, self._spec.norm_eps), self.head)
