"""Simulated forms: they compute what ONNX Runtime computes, of one operator and of a whole written graph."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from edge_engines.budget.forms import FormMultiply, offered_forms, round_rows
from edge_engines.budget.model import FormModel
from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.checkpoint.spec import Float32
from edge_engines.graph.builder import GRAPH_NAME, GraphOptions, WrittenGraph, write_graph
from edge_engines.graph.int8_units import Int8Units
from edge_engines.graph.linear import BLOCK_BITS, Form, block_size, matmul_blocks, quantize_blocks, store_blocks
from edge_engines.graph.writer import open_writer
from edge_engines.sensitivity.int8 import activation_scale
from edge_engines.sensitivity.measure import compare_rows, log_probabilities
from edge_engines.sensitivity.passes import Ids, Passes, collect_ranges
from edge_engines.sensitivity.smoothing import FoldedWeights, Smoothing
from edge_runtime.errors import BuildError
from support.tiny_engines import FAMILIES, GOLDEN

CAPACITY = 64
ALPHAS = {"qkv": 0.65, "o": 0.65, "gate_up": 0.65, "down": 0.8, "head": 0.65}
CYCLE: tuple[Form, ...] = ("w4", "int8", "w8", "fp32", "w4")  # given to the units of the body in turn


def opened_session(folder: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(str(folder / GRAPH_NAME), options, providers=["CPUExecutionProvider"])


def run_block_product(folder: Path, x: Float32, weight: Float32, form: Form) -> Float32:
    """Return x times the transpose of a weight in `form`, by ONNX Runtime."""
    bits = BLOCK_BITS[form]
    size = block_size(weight.shape[1], bits)
    assert size is not None
    with open_writer(folder, "data") as g:
        g.input("x", "float32", ["S", weight.shape[1]])
        matmul_blocks(g, "x", store_blocks(g, quantize_blocks(weight, size, bits), "weight"), "y")
        g.output("y", "float32", ["S", weight.shape[0]])
        model = g.model("product", {"": 23, "com.microsoft": 1}, {})
    onnx.save_model(model, folder / GRAPH_NAME)
    found: Float32 = opened_session(folder).run(["y"], {"x": x})[0]
    return found


@pytest.mark.parametrize("rows", [1, 7])  # decode and prefill take different kernels
@pytest.mark.parametrize("width", [576, 96, 48])  # blocks of 64, 32 and 16 in w8
@pytest.mark.parametrize("form", ["w8", "w4"])
def test_simulated_product_is_that_of_onnx_runtime(form: Form, width: int, rows: int, tmp_path: Path) -> None:
    """FP32 sums in another order: 7e-7 measured. Activations that are left unrounded would differ by 0.01."""
    rng = np.random.default_rng(width)
    x = rng.normal(size=(rows, width)).astype(np.float32)
    x[:, 5] *= 30
    x[0, : width // 3] = 0  # a block of zeros and more
    weight = rng.normal(size=(40, width)).astype(np.float32)
    found = run_block_product(tmp_path, x, weight, form)
    simulated = FormMultiply({"u": form}, {})("u", x, weight)
    assert np.linalg.norm(found - simulated) < 3e-6 * np.linalg.norm(simulated)


def test_four_bits_take_all_sixteen_codes_and_keep_zeros() -> None:
    weight = np.random.default_rng(1).normal(size=(6, 128)).astype(np.float32)
    weight[2, 64:] = 0
    rounded = quantize_blocks(weight, 32, 4)
    assert (rounded.codes.min(), rounded.codes.max()) == (0, 15)
    assert rounded.packed.shape == (6, 4, 16)
    assert (rounded.restored[2, 64:] == 0).all()
    assert np.isfinite(rounded.scales).all()
    assert (rounded.scales != 0).all()  # case C17; a negative scale is one whose largest value was positive
    scales = np.abs(rounded.scales).repeat(32, axis=1)
    inner = rounded.codes.reshape(6, 128) < 15  # a value beyond the uppermost code is clipped, by a code at most
    assert (np.abs(rounded.restored - weight)[inner] <= scales[inner] / 2 * 1.0001).all()
    assert (np.abs(rounded.restored - weight) <= scales * 1.0001).all()


def test_four_bits_err_less_than_a_symmetric_range_would() -> None:
    weight = np.random.default_rng(2).normal(size=(64, 256)).astype(np.float32)
    blocks = weight.reshape(64, -1, 32)
    scales = np.abs(blocks).max(axis=2, keepdims=True) / 7
    symmetric = (np.rint(blocks / scales) * scales).reshape(weight.shape)
    ours = quantize_blocks(weight, 32, 4).restored
    assert np.linalg.norm(ours - weight) < 0.92 * np.linalg.norm(symmetric - weight)  # 0.88 measured


def test_blocks_of_32_are_the_smallest_storage_for_their_error() -> None:
    """Of a normal distribution: 16 errs a ninth less for a fifth more bytes, 64 a ninth more for a tenth less."""
    weight = np.random.default_rng(2).normal(size=(64, 512)).astype(np.float32)
    errors = {size: float(np.linalg.norm(quantize_blocks(weight, size, 4).restored - weight)) for size in (16, 32, 64)}
    assert errors[16] < errors[32] < errors[64]
    assert [block_size(width, 4) for width in (576, 64, 48, 24)] == [32, 32, 16, None]


@pytest.mark.parametrize(
    ("lowering", "width", "forms"),
    [
        ("ort", 64, ("fp32", "w8", "int8", "w4")),
        ("ort", 24, ("fp32", "int8")),  # no block size divides it
        ("native", 64, ("fp16", "int8")),
        ("portable", 64, ("fp16", "int8")),
    ],
)
def test_offered_forms_are_those_the_lowering_can_write(lowering: str, width: int, forms: tuple[Form, ...]) -> None:
    assert offered_forms(lowering, width) == forms


@dataclass(frozen=True)
class Case:
    """A golden model whose units have different forms: as a written graph, and as it is simulated."""

    written: WrittenGraph
    folder: Path
    model: FormModel
    forms: dict[str, Form]

    def simulate(self, ids: NDArray[np.int64]) -> Float32:
        return next(self.model.run(ids[None], self.forms))

    def run(self, ids: NDArray[np.int64]) -> Float32:
        session = opened_session(self.folder)
        feed = {"input_ids": ids[None], "starts": np.zeros(1, np.int64), "logit_rows": np.arange(len(ids))[None]}
        for value in session.get_inputs():
            if value.name.startswith("past"):
                feed[value.name] = np.zeros([1, *value.shape[1:]], np.float32)
        found: Float32 = session.run(["logits"], feed)[0][0]
        return found


def text(num: int) -> Ids:
    return np.random.default_rng(3).integers(0, 320, (num, 32))


def write(folder: Path, name: str, ends: Form, body: tuple[Form, ...] = CYCLE) -> Case:
    """Write a golden model: embedding and head in the form `ends`, the units of the body in turn in those of `body`."""
    with open_checkpoint(GOLDEN / name) as opened:
        checkpoint = opened.for_capacity(CAPACITY)
        spec = checkpoint.spec
        ranges = collect_ranges(Passes(spec, checkpoint), text(5), lambda n: None)
        factors = Smoothing(ALPHAS).factors(spec, checkpoint, ranges)
        one = np.float32(1)
        scales = {u: activation_scale(float((r / factors.get(u, one)).max()), u) for u, r in ranges.items()}
        model = FormModel(spec, checkpoint, factors, scales, "ort")
        units = ["embed", *(u for u in model.units if u not in ("embed", "head")), "head"]
        forms = {u: ends if u in ("embed", "head") else body[i % len(body)] for i, u in enumerate(units)}
        if spec.tied_head and ends != "int8":
            del factors["head"]  # one table serves both ends
        folded = FoldedWeights(spec, checkpoint, factors)
        table_factors = factors["head"] if spec.tied_head and ends == "int8" else None
        int8 = {u: scales[u] for u, form in forms.items() if form == "int8" and u != "embed"}
        described = Int8Units(int8, ends == "int8", table_factors)
        options = GraphOptions("ort", "auto", CAPACITY, described, None, forms)
        written = write_graph(folder, folded.spec, folded, options)
    onnx.checker.check_model(str(folder / GRAPH_NAME), full_check=True)
    return Case(written, folder, model, forms)


@pytest.mark.parametrize("ends", ["w4", "w8", "int8", "fp32"])
@pytest.mark.parametrize("name", FAMILIES)
def test_graph_of_mixed_forms_computes_what_was_simulated(name: str, ends: Form, tmp_path: Path) -> None:
    """Nearly every row agrees to rounding. A sum that differs in its last bit may put a value on the other side of a
    rounding border; the rows behind such a token differ by a few codes, as the mean allows. Heads that the lowering
    widens with zeros (mistral-window) have the same blocks in the simulation.
    """
    case = write(tmp_path, name, ends)
    rows = [compare_rows(log_probabilities(case.simulate(ids)), case.run(ids))[0] for ids in text(6)]
    divergence = np.concatenate(rows)
    assert np.median(divergence) < 1e-6  # quantization.md, section 7, 6
    assert divergence.mean() < 2e-3


@pytest.mark.parametrize(("ends", "bytes_each"), [("w4", 0.5), ("w8", 1.0), ("int8", 1.0), ("fp32", 4.0)])
def test_c19_a_tied_table_is_stored_once_in_every_form(ends: Form, bytes_each: float, tmp_path: Path) -> None:
    case = write(tmp_path, "llama-tied", ends)
    vocab, hidden = case.written.spec.vocab, case.written.spec.hidden
    tables = [t for t in case.written.model.graph.initializer if vocab in t.dims and np.prod(t.dims) > 4 * vocab]
    assert len(tables) == 1
    length = next(int(entry.value) for entry in tables[0].external_data if entry.key == "length")
    assert length == bytes_each * vocab * hidden


@pytest.mark.parametrize("name", ["llama-tied", "qwen3"])
def test_embedding_in_four_bits_looks_up_the_rounded_rows(name: str, tmp_path: Path) -> None:
    case = write(tmp_path, name, "w4", ("fp32",))
    graph = onnx.load(tmp_path / GRAPH_NAME)
    graph.graph.output.append(onnx.helper.make_tensor_value_info("embed", onnx.TensorProto.FLOAT, None))
    onnx.save_model(graph, tmp_path / GRAPH_NAME, save_as_external_data=False)
    session = opened_session(tmp_path)
    ids = np.array([[0, 7, 319]])
    feed = {"input_ids": ids, "starts": np.zeros(1, np.int64), "logit_rows": np.array([[0]])}
    for value in session.get_inputs():
        if value.name.startswith("past"):
            feed[value.name] = np.zeros([1, *value.shape[1:]], np.float32)
    (found,) = session.run(["embed"], feed)
    with open_checkpoint(GOLDEN / name) as model:
        table = model.tensor("embed")
    assert np.array_equal(found[0], round_rows(table, "w4")[ids[0]])
    assert np.array_equal(found[0], case.model.rows(ids[0], {"embed": "w4", "head": "w4"}))


def test_weights_by_block_have_no_form_outside_onnx_runtime(tmp_path: Path) -> None:
    with open_checkpoint(GOLDEN / "qwen2") as model:
        forms: dict[str, Form] = {"layers.0.qkv": "w4"}
        options = GraphOptions("native", "auto", 32, Int8Units({}, False), None, forms)
        with pytest.raises(BuildError, match=r"w4.*lowering ort"):
            write_graph(tmp_path, model.spec, model, options)


def test_ort_graph_of_mixed_forms_leaves_nothing_for_onnx_runtime_to_optimise(tmp_path: Path) -> None:
    case = write(tmp_path, "llama-tied", "w4")
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    ort.InferenceSession(str(tmp_path / GRAPH_NAME), options, providers=["CPUExecutionProvider"])
    optimised = onnx.load(tmp_path / "optimised.onnx", load_external_data=False)
    assert len(optimised.graph.node) == len(case.written.model.graph.node)
