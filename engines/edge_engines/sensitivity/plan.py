"""Hold what a build needs to know to write a model in INT8: which units, and the numbers that go with them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from edge_engines.checkpoint.spec import Float32


@dataclass(frozen=True, slots=True)
class Int8Plan:
    """The choice for one checkpoint. Units are `embed`, `layers.i.` + `qkv`, `o`, `gate_up`, `down`, and `head`.

    In a tied model `embed` and `head` are one table and stand in `int8` both or neither. Its codes are those of
    embed * s per row, s the factors of `head` (1 without): the embedding is codes[id] * scale[id] / s.
    """

    int8: frozenset[str]
    scales: Mapping[str, float]  # of each unit's input behind smoothing; `embed` has none
    factors: Mapping[str, Float32]  # unit -> s [in], for FoldedWeights(spec, weights, factors)

    @property
    def digest(self) -> str:
        """SHA-256 in hex over all of it: the same for the same plan on any machine."""
        sha = hashlib.sha256()
        for unit in sorted(self.int8):
            sha.update(f"{unit}\n".encode())
        for unit, scale in sorted(self.scales.items()):
            sha.update(f"{unit} {scale!r}\n".encode())
        for unit, factors in sorted(self.factors.items()):
            sha.update(f"{unit} {factors.shape}\n".encode() + factors.astype("<f4", copy=False).tobytes())
        return sha.hexdigest()
