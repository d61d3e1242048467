"""Say which units of a graph run INT8, and what the graph needs to know of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_engines.checkpoint.spec import Float32


@dataclass(frozen=True, slots=True)
class Int8Units:
    """The INT8 units of a graph. Smoothing is folded into the weights that the graph is written from."""

    scales: Mapping[str, float]  # scale of the input of each unit that multiplies in INT8
    rounds_embedding: bool  # the embedding is INT8, one scale per row
    table_factors: Float32 | None = None  # [hidden] of a table that embedding and head share: what the head's smoothing
    # has multiplied its columns with; None: they share none
