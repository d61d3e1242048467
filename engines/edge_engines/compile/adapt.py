"""Rewrite the native graph where TensorRT wants another form; what it computes stays the same.

Runs before the graph is checked and verified, so both see what will be compiled. Weights are copied one at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import onnx
from onnx import numpy_helper

from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.compile.fp32_attention import write_out_attention
from edge_engines.compile.projections import Stacked, find_stacked, write_apart
from edge_engines.graph.builder import DATA_NAME, GRAPH_NAME, WrittenGraph
from edge_engines.graph.writer import GraphWriter

FLOAT = onnx.TensorProto.FLOAT
_NEW = ".new"


def adapt_graph(folder: Path, written: WrittenGraph) -> WrittenGraph:
    """Rewrite model.onnx and model.onnx.data in `folder`; return what stands there now."""
    model = onnx.ModelProto()
    model.CopyFrom(written.model)
    new_data = folder / (DATA_NAME + _NEW)
    with new_data.open("wb") as data:
        g = GraphWriter(data, DATA_NAME)
        stacked = find_stacked(model.graph)
        _copy_weights(g, model.graph, stacked, folder)
        nodes = _rewrite(g, model.graph, stacked, written.spec)
        made = g.model(model.graph.name, {"": 24}, {}).graph
        model.graph.ClearField("node")
        model.graph.node.extend(nodes)
        model.graph.ClearField("initializer")
        model.graph.initializer.extend(made.initializer)
        data_bytes = g.data_bytes
    new_data.replace(folder / DATA_NAME)
    onnx.save_model(model, folder / GRAPH_NAME)
    return dataclasses.replace(written, model=model, data_bytes=data_bytes)


def _copy_weights(g: GraphWriter, graph: onnx.GraphProto, stacked: Mapping[str, Stacked], folder: Path) -> None:
    """Copy every constant but those of stacked projections, which are stored in parts."""
    taken = {name for item in stacked.values() for name in item.constants}
    by_name = {tensor.name: tensor for tensor in graph.initializer}
    for tensor in graph.initializer:
        if tensor.name not in taken:
            g.constant(tensor.name, numpy_helper.to_array(tensor, base_dir=str(folder)))
    for item in stacked.values():
        for name in item.constants:
            item.store(g, name, numpy_helper.to_array(by_name[name], base_dir=str(folder)))


def _rewrite(
    g: GraphWriter, graph: onnx.GraphProto, stacked: Mapping[str, Stacked], spec: ModelSpec
) -> list[onnx.NodeProto]:
    """Return the nodes of the new graph, in order."""
    gone = {name for item in stacked.values() for name in item.nodes}
    fp32 = _fp32_values(graph)
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.name in stacked:
            nodes += write_apart(stacked[node.name])
        elif node.op_type == "Attention" and node.input[0] in fp32:
            nodes += write_out_attention(g, node, spec)
        elif node.name not in gone:
            nodes.append(node)
    return nodes


def _fp32_values(graph: onnx.GraphProto) -> set[str]:
    """Return the values that were cast to FP32."""
    return {
        node.output[0]
        for node in graph.node
        if node.op_type == "Cast" and onnx.helper.get_node_attr_value(node, "to") == FLOAT
    }
