"""Run whole models over sets of sequences, from any layer on, and collect what flows into each unit.

A pass takes all sequences through one layer before the next, short ones together. Residual streams are kept at each
layer's entry, so the effect of changing layer i is had by running layers i .. L - 1 only: bit for bit what a whole pass
gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import Float32, ModelSpec, Weights
from edge_engines.sensitivity.blocks import EMBED, HEAD, Block, Multiply, multiply_exactly
from edge_engines.sensitivity.ends import Ends

Ids = NDArray[np.int64]  # [N, S]: N sequences
Stream = list[Float32]  # residual stream of each sequence, [S, hidden]

MAX_ROWS, MAX_LOGIT_ROWS = 1024, 256  # that are multiplied at once: more is no faster, and takes memory


@dataclass
class Cost:
    """What has been run so far, over several models."""

    layer_runs: int = 0  # layers times sequences


class Passes:
    """A model whose blocks are read once and kept: as many bytes as its weights in FP32."""

    def __init__(self, spec: ModelSpec, weights: Weights, tied_by: Float32 | None = None) -> None:
        """`tied_by`: see Ends."""
        self.spec, self._weights = spec, weights
        self.ends = Ends(spec, weights, tied_by)
        self._blocks: dict[int, Block] = {}
        self.num_layer_runs = 0  # layers times sequences: the cost so far

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.spec.layers)

    def block(self, layer: int) -> Block:
        """Return a layer, reading it the first time."""
        if layer not in self._blocks:
            self._blocks[layer] = Block(self.spec, self._weights, layer)
        return self._blocks[layer]

    def embed(self, ids: Ids, int8: Container[str] = ()) -> Stream:
        """Return the residual streams before the first layer when the units in `int8` are in INT8."""
        return [self.ends.embed(row, rounded=self.is_embedded_in(int8)) for row in ids]

    def is_embedded_in(self, int8: Container[str]) -> bool:
        """Say whether the embedding reads an INT8 table: `embed` is among the units, or the head that it is tied to."""
        return EMBED in int8 or (self.ends.is_tied and HEAD in int8)

    def all_of(self, int8: Collection[str]) -> set[str]:
        """Return the units of a set, the embedding among them when a tied head is."""
        return {*int8, EMBED} if self.is_embedded_in(int8) else set(int8)

    def layers(self, stream: Stream, multiply: Multiply, start: int = 0) -> Iterator[tuple[int, Stream]]:
        """Run layers start .. L - 1; yield each layer's number with the streams behind it."""
        for layer in range(start, self.num_layers):
            block, entered, stream = self.block(layer), stream, []
            for part in _equal_parts(entered):
                behind = block.run(np.concatenate(part), multiply, num_sequences=len(part))
                stream += np.split(behind, len(part))
            self.num_layer_runs += len(stream)
            yield layer, stream

    def finish(self, stream: Stream, multiply: Multiply, start: int = 0) -> Stream:
        """Run layers start .. L - 1 and return the streams behind the last."""
        for _, after in self.layers(stream, multiply, start):
            stream = after
        return stream

    def logits(self, stream: Stream, multiply: Multiply = multiply_exactly) -> Iterator[Float32]:
        """Yield the logits [S, V] of each sequence."""
        for part in _equal_parts(stream, MAX_LOGIT_ROWS):
            yield from np.split(self.ends.logits(np.concatenate(part), multiply), len(part))


def _equal_parts(stream: Stream, max_rows: int = MAX_ROWS) -> Iterator[Stream]:
    """Yield neighbours of equal length together, up to so many rows: short sequences alone waste a multiplication."""
    part: Stream = []
    for x in stream:
        if part and (len(x) != len(part[0]) or len(x) * (len(part) + 1) > max_rows):
            yield part
            part = []
        part.append(x)
    if part:
        yield part


def collect_ranges(passes: Passes, ids: Ids, advance: Callable[[int], None]) -> dict[str, Float32]:
    """Return the largest magnitude [in] of each input channel of each unit over all tokens, from an FP32 pass.

    Memory does not depend on the number of sequences' ranges: only maxima are kept. `advance` is told of each layer.
    """
    ranges: dict[str, Float32] = {}

    def observe(unit: str, x: Float32, weight: Float32) -> Float32:
        seen = np.abs(x).max(axis=0)
        ranges[unit] = np.maximum(ranges[unit], seen) if unit in ranges else seen
        return multiply_exactly(unit, x, weight)

    stream = passes.embed(ids)
    for _, after in passes.layers(stream, observe):
        stream = after
        advance(1)
    for _ in passes.logits(stream, observe):
        pass
    return ranges
