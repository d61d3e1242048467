"""What the graph builder writes: valid ONNX, stable names, weights once, FP32 where it must be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import ModelSpec, Weights
from edge_engines.graph.builder import DATA_NAME, GRAPH_NAME, GraphOptions, WrittenGraph, write_graph
from edge_engines.graph.head_padding import pad_heads
from edge_engines.graph.linear import block_size, quantize_blocks
from edge_engines.graph.lowering import write_norm
from edge_engines.graph.writer import open_writer
from edge_engines.reference import causal_mask, logits
from edge_runtime.errors import BuildError, CheckpointError
from support.tiny_engines import FAMILIES, GOLDEN

FORMS = [
    ("ort", "fp32"),
    ("ort", "fp16"),
    ("ort", "w8"),
    pytest.param("native", "fp32", marks=pytest.mark.native),
    pytest.param("native", "fp16", marks=pytest.mark.native),
]


def write(folder: Path, name: str, lowering: str = "ort", precision: str = "fp32") -> WrittenGraph:
    with open_checkpoint(GOLDEN / name) as model:
        return write_graph(folder, model.spec, model, GraphOptions(lowering, precision, 32))  # type: ignore[arg-type]


def kinds(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize(("lowering", "precision"), FORMS)
@pytest.mark.parametrize("name", FAMILIES)
def test_graph_passes_the_onnx_checker_and_shape_inference(
    name: str, lowering: str, precision: str, tmp_path: Path
) -> None:
    written = write(tmp_path, name, lowering, precision)
    onnx.checker.check_model(str(tmp_path / GRAPH_NAME), full_check=True)
    inferred = onnx.shape_inference.infer_shapes(written.model, strict_mode=True, data_prop=True)
    known = {value.name for value in inferred.graph.value_info} | {value.name for value in inferred.graph.output}
    ends = [name for node in inferred.graph.node for name in node.output if name]
    assert {f"layers.{i}.attention" for i in range(len(written.spec.layers))} <= known
    assert "logits" in ends


@pytest.mark.parametrize(("lowering", "precision"), FORMS)
def test_every_unit_has_a_node_of_its_name(lowering: str, precision: str, tmp_path: Path) -> None:
    names = {node.name for node in write(tmp_path, "llama3-scaled", lowering, precision).model.graph.node}
    units = ["qkv", "attention", "o", "gate_up", "down"]
    if lowering == "native":  # whose runtimes fuse siblings; a stacked weight would stand twice in a plan
        units = ["qkv.q", "qkv.k", "qkv.v", "attention", "o", "gate_up.gate", "gate_up.up", "down"]
    assert {f"layers.{i}.{unit}" for i in range(3) for unit in units} <= names
    assert "embed" in names


@pytest.mark.parametrize("precision", ["fp32", "w8"])
def test_ort_graph_leaves_nothing_for_onnx_runtime_to_optimise(precision: str, tmp_path: Path) -> None:
    """So an engine can be loaded with optimisations off: start-up does not repeat them."""
    for name in FAMILIES:
        folder = tmp_path / name
        folder.mkdir()
        written = write(folder, name, "ort", precision)
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(folder / "optimised.onnx")
        options.log_severity_level = 3  # it warns that the stored file fits this machine
        ort.InferenceSession(str(folder / GRAPH_NAME), options, providers=["CPUExecutionProvider"])
        optimised = onnx.load(folder / "optimised.onnx", load_external_data=False)
        assert kinds(optimised) == kinds(written.model)


@pytest.mark.parametrize(("precision", "bytes_each"), [("fp32", 4), ("w8", 1 + 4 / 64)])
def test_c19_a_tied_table_is_stored_once(precision: str, bytes_each: float, tmp_path: Path) -> None:
    table = 320 * 64
    data_bytes = write(tmp_path, "llama-tied", "ort", precision).data_bytes
    with open_checkpoint(GOLDEN / "llama-tied") as model:
        parameters = sum(model.tensor(name).size for name in ("embed", "norm")) + 3 * 29_312
    assert parameters > table
    # Page alignment and rotary tables add some KB per tensor; a second table would add all its bytes.
    assert data_bytes < parameters * 4 + 64 * 4096 if precision == "fp32" else data_bytes < 64 * 4096
    graph = onnx.load(tmp_path / GRAPH_NAME, load_external_data=False).graph
    tables = [t.name for t in graph.initializer if np.prod(t.dims) == table]
    assert len(tables) == 1


def test_c28_norms_of_an_fp16_graph_compute_in_fp32(tmp_path: Path) -> None:
    graph = write(tmp_path, "qwen3", "ort", "fp16").model.graph
    producer = {out: node for node in graph.node for out in node.output}
    norms = [node for node in graph.node if node.op_type == "RMSNormalization"]
    assert len(norms) == 3 * 4 + 1
    for norm in norms:
        before = producer[norm.input[0]]
        assert before.op_type == "Cast"
        assert before.attribute[0].i == onnx.TensorProto.FLOAT


def test_c28_a_vector_of_300_is_normed_to_one(tmp_path: Path) -> None:
    """300² overflows FP16: computed there, the norm gives 0."""
    with open_writer(tmp_path, DATA_NAME) as g:
        g.input("x", "float16", ["B", 8])
        write_norm(g, "x", np.ones(8, np.float32), 1e-6, "float16", "y")
        g.output("y", "float16", ["B", 8])
        model = g.model("norm", {"": 23}, {})
    onnx.save_model(model, tmp_path / GRAPH_NAME)
    session = ort.InferenceSession(str(tmp_path / GRAPH_NAME), providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {"x": np.full((1, 8), 300, np.float16)})
    assert np.array_equal(out, np.ones((1, 8), np.float16))


@pytest.mark.native
def test_c43_scores_of_a_family_that_overflows_stay_fp32(tmp_path: Path) -> None:
    """Attention is written out then: TensorRT has no attention kernel for FP32."""
    model = onnx.shape_inference.infer_shapes(write(tmp_path, "qwen2", "native", "fp16").model)
    kind = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    scores = [node for node in model.graph.node if node.name.endswith(".scores")]
    assert len(scores) == 3
    assert {kind[name] for node in scores for name in (*node.input, *node.output)} == {onnx.TensorProto.FLOAT}
    assert "Attention" not in kinds(model)


@pytest.mark.parametrize(
    ("starts", "ids", "window", "rows"),
    [
        ([3], [[0, 0]], None, [[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]]),  # C30
        ([4], [[0]], None, [[1, 1, 1, 1, 1, 0, 0, 0]]),
        ([4], [[0, 0]], 4, [[0, 1, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 0, 0]]),  # C08
    ],
)
@pytest.mark.native
def test_c30_c08_mask_rows_are_anchored_at_the_position(
    starts: list[int], ids: list[list[int]], window: int | None, rows: list[list[int]], tmp_path: Path
) -> None:
    from dataclasses import replace

    with open_checkpoint(GOLDEN / "llama-tied") as model:
        layers = tuple(replace(layer, window=window) for layer in model.spec.layers)
        spec = replace(model.spec, layers=layers)
        written = write_graph(tmp_path, spec, model, GraphOptions("native", "fp32", 8))
    mask = f"mask.{window or 'full'}"
    written.model.graph.output.append(onnx.helper.make_tensor_value_info(mask, onnx.TensorProto.BOOL, None))
    onnx.save_model(written.model, tmp_path / GRAPH_NAME)
    session = ort.InferenceSession(str(tmp_path / GRAPH_NAME), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": np.array(ids), "starts": np.array(starts), "logit_rows": np.array([[0]])}
    for value in session.get_inputs()[3:]:
        feeds[value.name] = np.zeros((1, *value.shape[1:]), np.float32)
    (found,) = session.run([mask], feeds)
    assert found[0, 0].astype(int).tolist() == rows
    if window is None and len(rows) == 2:
        assert causal_mask(5, None)[3:].astype(int).tolist() == [row[:5] for row in rows]


def test_padded_heads_compute_the_same_logits() -> None:
    ids = [5, 17, 99, 3, 64]
    with open_checkpoint(GOLDEN / "mistral-window") as model:
        spec, weights = pad_heads(model.spec, model)
        assert (model.spec.head_dim, spec.head_dim) == (24, 32)
        # Zeros add nothing: only the order of float64 sums may differ.
        assert np.abs(logits(spec, weights, ids) - logits(model.spec, model, ids)).max() < 1e-12


def test_heads_that_can_not_be_padded_are_refused() -> None:
    from dataclasses import replace

    with open_checkpoint(GOLDEN / "qwen3") as model, pytest.raises(BuildError, match="lowering native"):
        pad_heads(replace(model.spec, head_dim=24), model)


def test_blocks_round_to_the_nearest_code_and_keep_zeros() -> None:
    weight = np.random.default_rng(1).normal(size=(6, 128)).astype(np.float32)
    weight[2, 64:] = 0
    quantized = quantize_blocks(weight, 64)
    restored = (quantized.codes.astype(np.float32) - 128) * quantized.scales[:, :, None]
    assert np.abs(restored.reshape(6, 128) - weight).max() <= quantized.scales.max() / 2 * 1.0001  # half a code
    assert (restored.reshape(6, 128)[2, 64:] == 0).all()
    assert (quantized.scales > 0).all()  # case C17
    assert quantized.codes.min() >= 1  # symmetric: -127..127


@pytest.mark.parametrize(("width", "size"), [(576, 64), (96, 32), (112, 16), (24, None)])
def test_block_size_divides_the_width(width: int, size: int | None) -> None:
    assert block_size(width) == size


class Spoiled:
    """Weights of which one holds a bad value."""

    def __init__(self, weights: Weights, name: str, value: float) -> None:
        self._weights, self._name, self._value = weights, name, value

    def tensor(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        tensor = self._weights.tensor(name)
        if name == self._name:
            tensor.flat[3] = self._value
        return tensor


@pytest.mark.parametrize(
    ("value", "precision", "text"),
    [(np.nan, "fp32", "NaN"), (np.inf, "w8", "infinity"), (7e4, "fp16", "FP16 ends at 65504")],
)
def test_weights_that_can_not_be_stored_are_refused_by_name(
    value: float, precision: str, text: str, tmp_path: Path
) -> None:
    with open_checkpoint(GOLDEN / "qwen2") as model:
        weights = Spoiled(model, "layers.1.down", value)
        with pytest.raises(CheckpointError, match=text) as refused:
            write_graph(tmp_path, model.spec, weights, GraphOptions("ort", precision, 32))  # type: ignore[arg-type]
    assert "layers.1.down" in str(refused.value)


def test_w8_has_no_native_form_yet(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="lowering ort"):
        write(tmp_path, "qwen2", "native", "w8")


def test_description_has_room_for_four_norms_scaled_embedding_and_two_rotary_tables(tmp_path: Path) -> None:
    """What Gemma 3 will need, on weights made here: the graph agrees with the plain reference."""
    spec, weights = gemma_like()
    ids = np.random.default_rng(3).integers(0, spec.vocab, 20)
    written = write_graph(tmp_path, spec, weights, GraphOptions("ort", "fp32", 32))
    session = ort.InferenceSession(str(tmp_path / GRAPH_NAME), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": ids[None], "starts": np.array([0]), "logit_rows": np.arange(20)[None]}
    for value in written.model.graph.input[3:]:
        feeds[value.name] = np.zeros((1, spec.num_kv_heads, 32, spec.head_dim), np.float32)
    found = session.run(["logits"], feeds)[0][0]
    assert np.abs(found - logits(spec, weights, ids.tolist())).max() < 2e-4  # FP32 against float64, as for the golden


def gemma_like() -> tuple[ModelSpec, Weights]:
    from dataclasses import replace

    from edge_engines.checkpoint.spec import LayerSpec, Rotary, tensor_shapes

    with open_checkpoint(GOLDEN / "llama-tied") as model:
        base = model.spec
    local = Rotary(1e4, "default", tuple(float(1e4 ** (-i / 8)) for i in range(8)))
    spec = replace(
        base,
        layers=(LayerSpec(0, 6), LayerSpec(1), LayerSpec(0, 6)),
        rotaries=(local, base.rotaries[0]),
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        norm_offset=1.0,
        embed_scale=8.0,
        query_scale=0.2,
    )
    rng = np.random.default_rng(5)
    made = {name: rng.normal(0, 0.08, shape).astype(np.float32) for name, shape in tensor_shapes(spec)}

    class Made:
        def tensor(self, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
            return made[name]

    return spec, Made()


def test_a_scalar_constant_stays_a_scalar(tmp_path: Path) -> None:
    """One scale for a whole tensor is a scalar in ONNX; a vector of one would be a scale per channel."""
    with open_writer(tmp_path, DATA_NAME) as g:
        g.constant("scale", np.array(0.5, np.float32))
        graph = g.model("g", {"": 23}, {}).graph
    assert list(graph.initializer[0].dims) == []
