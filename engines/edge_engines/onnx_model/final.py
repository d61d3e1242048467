"""Write the finished graph: its constants, wherever they lie, go to one data file beside it."""

from __future__ import annotations

from pathlib import Path

import onnx

from edge_engines.graph.builder import DATA_NAME, GRAPH_NAME
from edge_engines.onnx_model.data_file import DataFile
from edge_engines.onnx_model.rewrite import drop_unused


def write_final(model: onnx.ModelProto, sources: Path, folder: Path) -> tuple[onnx.ModelProto, int]:
    """Write model.onnx and model.onnx.data in `folder` from a graph whose data lies in `sources`.

    Returns the graph as written and the bytes of its data.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    drop_unused(made.graph)
    with (folder / DATA_NAME).open("wb") as data:
        file = DataFile(data, DATA_NAME)
        copies = [file.copy(tensor, sources) for tensor in made.graph.initializer]
        num_bytes = file.num_bytes
    made.graph.ClearField("initializer")
    made.graph.initializer.extend(copies)
    made.graph.ClearField("value_info")  # types of values have changed
    made.producer_name = "edge-runtime"
    onnx.save_model(made, folder / GRAPH_NAME)
    return made, num_bytes
