"""An INT8 KV cache: scales from calibration, the simulator, the graph that is written, and that TensorRT builds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import edge_engines
from edge_engines.checkpoint.open import open_checkpoint
from edge_engines.compile.tensorrt import PLAN_NAME, CompileOptions
from edge_engines.graph.builder import GRAPH_NAME, GraphOptions, write_graph
from edge_engines.int8_build import Int8Options
from edge_engines.sensitivity.kv import MARGIN, RoundedKv, collect_kv_ranges, kv_scales
from edge_engines.sensitivity.measure import compare_rows, log_probabilities
from edge_engines.sensitivity.passes import Passes
from edge_engines.texts.sets import SetSize, TextSizes
from edge_runtime import open_session
from edge_runtime.errors import BuildError, UsageError
from edge_runtime.manifest import Manifest, read_manifest
from support.int8_kv import CAPACITY, build_int8_kv, relative, simulated
from support.tiny_engines import FAMILIES, GOLDEN, build_tiny, expected

# The same FP32 sums in another order: 7e-7 measured. A value on the edge between two codes may take the other one: that
# moves one channel by 1 of 127, and 2e-4 was measured for a single one.
SAME_CODES = 2e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_written_graph_computes_what_the_simulator_does(name: str, tmp_path: Path) -> None:
    ids = expected(name).ids
    engine = build_int8_kv(name, tmp_path / "engine")
    with engine.open(verify_rows=40) as session:
        found = session.verify(0, ids, 0).copy()
    rounded, exact = simulated(name, ids, engine.scales), simulated(name, ids, None)
    assert relative(found, rounded) < SAME_CODES
    assert relative(found, exact) > 10 * relative(found, rounded)  # the cache is INT8 indeed
    divergence, _ = compare_rows(log_probabilities(exact), found)
    assert divergence.mean() < 0.01  # nats; random weights, whose scores depend on every bit: 3e-6 to 2e-3 measured


@pytest.mark.parametrize("name", ["qwen2", "phi3"])
def test_fp16_graph_stays_close_to_the_simulator(name: str, tmp_path: Path) -> None:
    ids = expected(name).ids
    engine = build_int8_kv(name, tmp_path / "engine", "fp16")
    with engine.open(verify_rows=40) as session:
        assert relative(session.verify(0, ids, 0), simulated(name, ids, engine.scales)) < 0.05  # FP16: 0.013 measured


@pytest.mark.parametrize(("precision", "opset"), [("fp32", 17), ("fp16", 19)])  # 19: the first with FP16 scales
def test_graph_is_valid_and_its_cache_is_int8_with_zero_point_0(precision: str, opset: int, tmp_path: Path) -> None:
    build_int8_kv("llama3-scaled", tmp_path / "engine", precision)
    onnx.checker.check_model(str(tmp_path / "engine" / GRAPH_NAME), full_check=True)
    model = onnx.load(tmp_path / "engine" / GRAPH_NAME, load_external_data=False)
    assert [(item.domain, item.version) for item in model.opset_import] == [("", opset)]
    for value in [*model.graph.input[3:], *model.graph.output[:-1]]:
        assert value.type.tensor_type.elem_type == onnx.TensorProto.INT8, value.name
    constants = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.raw_data
    }
    converters = [node for node in model.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert len(converters) == 3 * 2 * 3  # of each layer's keys and values: round new, read new, read past
    for node in converters:
        assert constants[node.input[1]].size == 1  # a scale per tensor: TensorRT#4008
        assert constants[node.input[2]] == 0


def test_no_code_is_below_minus_127(tmp_path: Path) -> None:
    """Case C16: with scales of a tenth every other value is clipped, on both sides."""
    build_tiny("qwen2", tmp_path / "engine", lowering="portable", capacity=CAPACITY)
    engine = build_int8_kv("qwen2", tmp_path / "other")
    narrow = {
        layer: (keys / np.float32(10), values / np.float32(10)) for layer, (keys, values) in engine.scales.items()
    }
    with open_checkpoint(GOLDEN / "qwen2") as model:
        write_graph(engine.folder, model.spec, model, GraphOptions("portable", "fp32", CAPACITY, kv_scales=narrow))
    with engine.open() as session:
        session.prefill(0, expected("qwen2").ids)
        rows = np.concatenate([part.ravel() for part in session.save_rows(0, 0, 40)])
    assert (rows.min(), rows.max()) == (-127, 127)


def test_ranges_hold_the_largest_magnitude_of_each_channel_over_all_texts() -> None:
    with open_checkpoint(GOLDEN / "qwen3") as model:
        passes = Passes(model.spec, model)
        ids = np.random.default_rng(1).integers(0, model.spec.vocab, (3, 9))
        together = collect_kv_ranges(passes, ids, lambda _: None)
        alone = [collect_kv_ranges(passes, row[None], lambda _: None) for row in ids]
    assert set(together) == set(range(len(model.spec.layers)))
    for layer, kinds in together.items():
        for which, largest in enumerate(kinds):
            assert largest.shape == (model.spec.num_kv_heads, model.spec.head_dim)
            assert np.array_equal(largest, np.max([ranges[layer][which] for ranges in alone], axis=0))


def test_c17_a_dead_channel_gets_scale_1_and_others_leave_headroom() -> None:
    scales, _ = kv_scales({0: (np.array([[0.0, 127.0]], np.float32), np.ones((1, 2), np.float32))})[0]
    assert scales[0, 0] == 1
    assert scales[0, 1] == pytest.approx(MARGIN, rel=2**-11)  # stored as FP16
    rounded, _ = RoundedKv({0: (scales, scales)})(
        0, np.array([[[0.2, 139.0]]], np.float32), np.zeros((1, 1, 2), np.float32)
    )
    assert rounded[0, 0].tolist() == [0, pytest.approx(139.0, abs=MARGIN / 2)]  # 139 is below 127 * 1.1: not clipped


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_c18_ranges_that_are_not_finite_are_refused_by_name(value: float) -> None:
    fine = np.ones((1, 2), np.float32)
    with pytest.raises(BuildError, match="values of layer 3"):
        kv_scales({3: (fine, np.array([[1, value]], np.float32))})


@pytest.mark.parametrize("lowering", ["ort", "native"])
def test_other_lowerings_have_no_int8_cache(lowering: str, tmp_path: Path) -> None:
    with open_checkpoint(GOLDEN / "qwen2") as model, pytest.raises(BuildError, match="--lowering portable"):
        write_graph(tmp_path, model.spec, model, GraphOptions(lowering, "fp32", CAPACITY, kv_scales={}))


@pytest.fixture(scope="module")
def ids_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for gate, ranking and calibration; no tiny model has a tokenizer."""
    path = tmp_path_factory.mktemp("ids") / "prompts.npy"
    np.save(path, np.random.default_rng(9).integers(0, 320, (30, 48)))
    return path


def build_int8(name: str, out: Path, ids_file: Path, *, gate: float = 1.5, **more: Any) -> Manifest:
    sizes = TextSizes(SetSize(20, 48), SetSize(2, 32), SetSize(8, 48))
    options = Int8Options(calibration=ids_file, gate=gate, sizes=sizes)
    chosen = {
        "precision": "fp32", "lowering": "portable", "kv": "int8", "capacity": CAPACITY, "int8_options": options, **more
    }  # fmt: skip
    return edge_engines.build(GOLDEN / name, out, **chosen)


def test_a_built_engine_has_an_int8_cache_that_passed_the_gate(ids_file: Path, tmp_path: Path) -> None:
    """Requirement A7: under the same gate as INT8 units."""
    made = build_int8("qwen2", tmp_path / "engine", ids_file)
    assert read_manifest(tmp_path / "engine") == made
    g = made.geometry
    assert (made.lowering, made.precision, made.kv_dtype, made.build.options["kv"]) == (
        "portable", "fp32", "int8", "int8",
    )  # fmt: skip
    assert made.kv_bytes == 2 * g.layers * g.kv_heads * g.head_dim * g.max_batch * g.capacity
    assert {value.dtype for value in made.inputs[3:]} == {"int8"}
    assert made.gate is not None
    assert made.gate.tokens == 8 * 47
    # Random weights; the engine agrees with the simulation but for single codes.
    assert made.gate.ratio == pytest.approx(made.gate.simulated_ratio, rel=1e-3)
    assert made.gate.upper <= 1.5
    assert made.gate.kl < 0.01
    with open_session(tmp_path / "engine", threads=1) as session:
        assert session.prefill(0, expected("qwen2").prompt).argmax() == expected("qwen2").greedy[0]


def test_an_engine_whose_int8_cache_fails_the_gate_is_not_kept(ids_file: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"fails the gate.*0\.9 is allowed.*--kv float"):
        build_int8("qwen2", tmp_path / "engine", ids_file, gate=0.9)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "text"),
    [({"lowering": "native"}, "--lowering portable"), ({"kv": "int4"}, "choose from: float, int8")],
)
def test_options_that_do_not_fit_are_refused_before_any_work(
    options: dict[str, Any], text: str, ids_file: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=text):
        build_int8("qwen2", tmp_path / "engine", ids_file, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["qwen2", "gemma3", "phi3"])  # FP32 scores; windows and GELU; heads rotated in part
@pytest.mark.parametrize("kv", ["float", "int8"])
def test_tensorrt_rtx_builds_the_portable_graph_in_fp16(name: str, kv: str, ids_file: Path, tmp_path: Path) -> None:
    made = build_int8(
        name,
        tmp_path / "engine",
        ids_file,
        kv=kv,
        target="tensorrt-rtx",
        precision="fp16",
        compile_options=CompileOptions(compute_capabilities=("8.6",)),
    )
    plan = next(entry for entry in made.files if entry.name == PLAN_NAME)
    assert plan.size > made.weight_bytes
    assert made.compiled is not None
    assert (made.lowering, made.kv_dtype) == ("portable", "int8" if kv == "int8" else "float16")
