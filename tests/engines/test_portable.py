"""The portable lowering: operators that every runtime has, FP32 where it must be, a cache that is never written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.graph.builder import GRAPH_NAME, GraphOptions, WrittenGraph, write_graph
from edge_engines.graph.lowering import GraphShape
from edge_engines.graph.lowering_portable import PortableLowering
from edge_engines.graph.writer import open_writer
from support.tiny_engines import FAMILIES, GOLDEN

CAPACITY = 32
Half = NDArray[np.float16]
# Standard operators of opset 17 that TensorRT 10.3 and older ONNX Runtimes know.
PRIMITIVES = {
    "Add", "And", "Cast", "Concat", "Div", "Gather", "GatherND", "Greater", "Less", "LessOrEqual", "MatMul", "Mul",
    "Pow", "Range", "ReduceMean", "Reshape", "Shape", "Sigmoid", "Slice", "Softmax", "Split", "Sqrt", "Sub", "Tanh",
    "Tile", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


def write(folder: Path, name: str, precision: str = "fp32") -> WrittenGraph:
    with open_checkpoint(GOLDEN / name) as model:
        return write_graph(folder, model.spec, model, GraphOptions("portable", precision, CAPACITY))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_graph_is_valid_opset_17_and_of_primitive_operators(name: str, precision: str, tmp_path: Path) -> None:
    written = write(tmp_path, name, precision)
    onnx.checker.check_model(str(tmp_path / GRAPH_NAME), full_check=True)
    inferred = onnx.shape_inference.infer_shapes(written.model, strict_mode=True, data_prop=True)
    assert [(item.domain, item.version) for item in inferred.opset_import] == [("", 17)]
    assert {node.op_type for node in inferred.graph.node} <= PRIMITIVES
    assert {node.domain for node in inferred.graph.node} == {""}
    known = {value.name for value in inferred.graph.value_info}
    assert {f"layers.{i}.attention" for i in range(len(written.spec.layers))} <= known


def test_every_unit_has_a_node_of_its_name(tmp_path: Path) -> None:
    names = {node.name for node in write(tmp_path, "llama3-scaled").model.graph.node}
    units = ("qkv.q", "qkv.k", "qkv.v", "attention", "o", "gate_up.gate", "gate_up.up", "down")
    assert {f"layers.{i}.{unit}" for i in range(3) for unit in units} <= names


@pytest.mark.parametrize("name", FAMILIES)
def test_past_is_read_as_it_is_and_only_new_rows_come_out(name: str, tmp_path: Path) -> None:
    """Grouped heads share their keys: nothing but a product reads the cache, so it is never expanded or copied."""
    written = write(tmp_path, name)
    graph, spec = written.model.graph, written.spec
    readers = {kind: {n.op_type for n in graph.node for x in n.input if x.endswith(kind)} for kind in ("key", "value")}
    assert readers == {"key": {"Transpose"}, "value": {"MatMul"}}  # a transposed factor is fused into its product
    for value in graph.input:
        if value.name.startswith("past"):
            assert [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] == [
                "B", spec.num_kv_heads, CAPACITY, spec.head_dim,
            ]  # fmt: skip
    names = [value.name for value in graph.output if value.name != "logits"]
    assert names == [f"new.{i}.{kind}" for i in range(len(spec.layers)) for kind in ("key", "value")]
    for value in graph.output[:-1]:
        assert [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] == [
            "B", spec.num_kv_heads, "S", spec.head_dim,
        ]  # fmt: skip


def test_c28_norms_of_an_fp16_graph_compute_in_fp32(tmp_path: Path) -> None:
    inferred = onnx.shape_inference.infer_shapes(write(tmp_path, "qwen3", "fp16").model, strict_mode=True)
    types = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    squares = [node for node in inferred.graph.node if node.op_type in ("Pow", "ReduceMean", "Sqrt")]
    assert len(squares) == 3 * (3 * 4 + 1)
    assert {types[node.output[0]] for node in squares} == {onnx.TensorProto.FLOAT}


def test_c28_a_vector_of_300_is_normed_to_one(tmp_path: Path) -> None:
    """300² overflows FP16: computed there, the norm gives 0."""
    out = run_lowering(tmp_path, lambda low: low.norm("x", np.ones(8, np.float32), "y"), np.full((1, 8), 300.0))
    assert np.array_equal(out, np.ones((1, 8), np.float16))


def test_gelu_is_right_where_its_cube_overflows_fp16(tmp_path: Path) -> None:
    x = np.array([[-300.0, -50, -1, 0, 0.5, 2, 50, 300]])
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    out = run_lowering(tmp_path, lambda low: low.gelu("x", "y"), x)
    # FP16 keeps 11 bits and the share near 0 comes from a difference to 1: 5e-4 of the largest term, 1.
    assert np.abs(out - 0.5 * x * (1 + np.tanh(inner))).max() < 2e-3


def run_lowering(folder: Path, write_value: Callable[[PortableLowering], str], x: NDArray[np.floating]) -> Half:
    """Return what the FP16 lowering's words for a value "y" make of "x" [1, 8]."""
    with open_checkpoint(GOLDEN / "llama-tied") as model, open_writer(folder, "data") as g:
        for name, shape in (("input_ids", ["B", "S"]), ("starts", ["B"])):
            g.input(name, "int64", shape)
        g.input("x", "float16", ["B", 8])
        write_value(PortableLowering(g, model.spec, GraphShape(8, "float16")))
        g.output("y", "float16", ["B", 8])
        onnx.save_model(g.model("part", {"": 17}, {}), folder / GRAPH_NAME)
    session = ort.InferenceSession(str(folder / GRAPH_NAME), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": np.zeros((1, 1), np.int64), "starts": np.zeros(1, np.int64), "x": x.astype(np.float16)}
    found: Half = session.run(["y"], feeds)[0]
    return found


def test_c43_scores_of_a_family_that_overflows_stay_fp32(tmp_path: Path) -> None:
    inferred = onnx.shape_inference.infer_shapes(write(tmp_path, "qwen2", "fp16").model, strict_mode=True)
    types = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    for part in ("past_scores", "new_scores", "masked", "shares"):
        assert types[f"layers.1.attention.{part}"] == onnx.TensorProto.FLOAT
    assert types["layers.1.attention.past_mixed"] == onnx.TensorProto.FLOAT16


@pytest.mark.parametrize(
    ("start", "num_new", "window", "rows"),
    [
        (3, 2, None, [[1, 1, 1, 0, 0, 0, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0, 0, 0, 1, 1]]),  # C30: 8 past keys, then new
        (4, 1, None, [[1, 1, 1, 1, 0, 0, 0, 0, 1]]),
        (0, 1, None, [[0, 0, 0, 0, 0, 0, 0, 0, 1]]),  # C31: every query sees itself
        (4, 2, 4, [[0, 1, 1, 1, 0, 0, 0, 0, 1, 0], [0, 0, 1, 1, 0, 0, 0, 0, 1, 1]]),  # C08
        (4, 3, 2, [[0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0], [0] * 9 + [1, 1]]),
    ],
)
def test_c30_c08_mask_rows_are_anchored_at_the_position(
    start: int, num_new: int, window: int | None, rows: list[list[int]], tmp_path: Path
) -> None:
    with open_checkpoint(GOLDEN / "llama3-scaled") as model:
        layers = tuple(replace(layer, window=window) for layer in model.spec.layers)
        spec = replace(model.spec, layers=layers)
        written = write_graph(tmp_path, spec, model, GraphOptions("portable", "fp32", 8))
    mask = f"mask.{window or 'full'}"
    written.model.graph.output.append(onnx.helper.make_tensor_value_info(mask, onnx.TensorProto.BOOL, None))
    onnx.save_model(written.model, tmp_path / GRAPH_NAME)
    session = ort.InferenceSession(str(tmp_path / GRAPH_NAME), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": np.zeros((1, num_new), np.int64), "starts": np.array([start]), "logit_rows": np.array([[0]])}
    for value in session.get_inputs()[3:]:
        feeds[value.name] = np.zeros((1, *value.shape[1:]), np.float32)
    (found,) = session.run([mask], feeds)
    group = spec.num_heads // spec.num_kv_heads
    assert group > 1
    assert found[0, 0].astype(int).tolist() == rows * group  # once per head that shares the keys
