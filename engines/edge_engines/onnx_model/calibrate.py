"""Run the float graph over the calibration samples and collect the range of every unit's input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from edge_engines.onnx_model.ranges import Histogram, check_alive, without_padding
from edge_engines.onnx_model.samples import Batch
from edge_engines.onnx_model.session import Session
from edge_engines.onnx_model.units import Unit
from edge_engines.progress import Progress

_CALIBRATION_NAME = "calibration.onnx"


def collect_ranges(
    model: onnx.ModelProto, folder: Path, units: Sequence[Unit], batches: Iterable[Batch], progress: Progress
) -> dict[str, Histogram]:
    """Return the histogram of each tensor that feeds a unit; padded positions are left out.

    `model` is the float graph, whose data lies in `folder`. One batch of activations is in memory at a time. Raises
    BuildError naming a tensor that is infinite, or never finite (case C18).
    """
    tensors = [unit.tensor for unit in units]
    fed = {value.name for value in model.graph.input}
    made = onnx.ModelProto()
    made.CopyFrom(model)
    made.graph.ClearField("output")
    made.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in tensors if name not in fed
    )
    if not made.graph.output:
        made.graph.output.extend(model.graph.output)  # a graph needs one
    onnx.save_model(made, folder / _CALIBRATION_NAME)
    session = Session(folder / _CALIBRATION_NAME)
    histograms = {name: Histogram(name) for name in tensors}
    for batch in batches:
        values = {**session.run(batch.feeds), **batch.feeds}
        for name, histogram in histograms.items():
            histogram.add(without_padding(values[name], batch.valid))
        progress.advance(batch.count)
    check_alive(histograms)
    (folder / _CALIBRATION_NAME).unlink()
    return histograms
