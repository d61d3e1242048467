"""Hold what is assessed: the model, the texts, and under which names results are kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from edge_engines.checkpoint.spec import Float32, ModelSpec, Weights
from edge_engines.progress import Progress
from edge_engines.sensitivity.journal import Journal
from edge_engines.sensitivity.passes import Cost, Passes, collect_ranges
from edge_engines.texts.sets import TextSets


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is assessed, the texts, and where results and progress go."""

    spec: ModelSpec
    weights: Weights
    texts: TextSets
    journal: Journal  # of this checkpoint and spec
    progress: Progress
    cost: Cost = field(default_factory=Cost)

    def measured_ranges(self) -> dict[str, Float32]:
        """Return the largest magnitude [in] of each input channel of each unit on the calibration text."""
        self.progress.step("collecting ranges", len(self.spec.layers))

        def measure() -> dict[str, bytes]:
            passes = Passes(self.spec, self.weights)
            ranges = collect_ranges(passes, self.texts.calibration.ids, self.progress.advance)
            self.cost.layer_runs += passes.num_layer_runs
            return {unit: seen.astype("<f4", copy=False).tobytes() for unit, seen in ranges.items()}

        found = self.calibrated.once("ranges", dict[str, bytes], measure)
        return {unit: np.frombuffer(seen, "<f4") for unit, seen in found.items()}

    @property
    def calibrated(self) -> Journal:
        """The journal of what depends on the calibration text."""
        return self.journal.within("calibration", self.texts.calibration.digest)

    def ranking(self, alphas: Mapping[str, float]) -> Journal:
        """Return the journal of what is measured of a smoothed model on the ranking text."""
        return self._smoothed(alphas).within("ranking", self.texts.ranking.digest)

    def gate(self, alphas: Mapping[str, float]) -> Journal:
        """Return the journal of what is measured of a smoothed model on the gate's text."""
        return self._smoothed(alphas).within("gate", self.texts.gate.digest)

    def _smoothed(self, alphas: Mapping[str, float]) -> Journal:
        return self.calibrated.within("alphas", json.dumps(alphas, sort_keys=True))
