"""Try a set of units in INT8: write the graph, run it, hold it against the original. ONNX Runtime is the simulator."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from edge_engines.onnx_model.baseline import Baseline
from edge_engines.onnx_model.code_file import StoredWeight
from edge_engines.onnx_model.outputs import Agreement
from edge_engines.onnx_model.rewrite import Form, quantise
from edge_engines.onnx_model.session import Session
from edge_engines.onnx_model.units import Unit

_TRIAL_NAME = "trial.onnx"


@dataclass(frozen=True, slots=True)
class Trials:
    """The float graph with all that is needed to put any of its units into INT8."""

    model: onnx.ModelProto  # in FP32
    half: onnx.ModelProto | None  # the same in FP16, when that is what will be written
    folder: Path  # holds the data of the graphs and of the codes
    units: Sequence[Unit]
    scales: Mapping[str, float]  # of each unit's input, by the unit's name
    stored: Mapping[str, StoredWeight]  # by the product's node
    form: Form

    def graph(self, int8: Collection[str]) -> onnx.ModelProto:
        """Return the graph to write, with these units in INT8."""
        if self.half is None:
            return self.fp32_graph(int8, self.form)
        return quantise(self.half, self._chosen(int8), self.scales, self.stored, self.form, np.float16)

    def fp32_graph(self, int8: Collection[str], form: Form) -> onnx.ModelProto:
        """Return the graph with these units in INT8 in some form, the rest in FP32."""
        return quantise(self.model, self._chosen(int8), self.scales, self.stored, form)

    def agree(self, int8: Collection[str], baseline: Baseline) -> Agreement:
        """Run what would be written and return how it agrees with the original."""
        return self._run(self.graph(int8), baseline)

    def effect(self, unit: str, baseline: Baseline) -> Agreement:
        """Run the graph with one unit in INT8 and the rest in FP32: the effect of INT8 alone."""
        return self._run(self.fp32_graph([unit], self.form), baseline)

    def _chosen(self, int8: Collection[str]) -> list[Unit]:
        return [unit for unit in self.units if unit.name in int8]

    def _run(self, graph: onnx.ModelProto, baseline: Baseline) -> Agreement:
        file = self.folder / _TRIAL_NAME
        onnx.save_model(graph, file)
        session = Session(file)
        found = baseline.agree(lambda batch: session.run(batch.feeds))
        file.unlink()
        return found
