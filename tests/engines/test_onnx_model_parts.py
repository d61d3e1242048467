"""The steps of a build from an ONNX model, each by itself: ranges, local errors, Q/DQ graphs, FP16, agreement."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_engines.onnx_model.assess import best_rule, bound, candidate_scales
from edge_engines.onnx_model.baseline import Baseline, keep_baseline
from edge_engines.onnx_model.calibrate import collect_ranges
from edge_engines.onnx_model.code_file import store_codes
from edge_engines.onnx_model.half import to_half, value_types
from edge_engines.onnx_model.local import LocalError, measure_local
from edge_engines.onnx_model.magnitudes import too_large_for_half
from edge_engines.onnx_model.outputs import Agreement, agreement, compare, has_classes
from edge_engines.onnx_model.ranges import BINS, Histogram
from edge_engines.onnx_model.samples import Batch, Samples
from edge_engines.onnx_model.session import Session
from edge_engines.onnx_model.trial import Trials
from edge_engines.onnx_model.units import Unit, find_units
from edge_engines.onnx_model.verify import verify_graph
from edge_engines.progress import NoProgress
from edge_engines.qdq.codes import from_codes, quantise_weight, to_codes
from edge_engines.qdq.lint import lint
from edge_runtime.errors import BuildError
from engines.onnx_nets import Net, conv_net, random_encoder, sentences

K = 64


def batch_of(**feeds: np.ndarray) -> Batch:
    count = len(next(iter(feeds.values())))
    mask = feeds.get("attention_mask")
    return Batch(feeds, count, mask != 0 if mask is not None else None)


def one_product(weight: np.ndarray) -> onnx.ModelProto:
    net = Net()
    net.op("MatMul", ["x", net.const("weight", weight)], "y")
    return net.model({"x": (TensorProto.FLOAT, ["n", K])}, {"y": ["n", weight.shape[1]]})


def prepare(model: onnx.ModelProto, folder: Path) -> tuple[onnx.ModelProto, list[Unit]]:
    model = onnx.shape_inference.infer_shapes(model)
    onnx.save_model(model, folder / "model.onnx")
    return model, find_units(model, folder)


def types_of(model: onnx.ModelProto) -> dict[str, int]:
    types = value_types(model)
    assert types is not None
    return types


def local_errors(folder: Path, x: np.ndarray, scales: dict[str, float]) -> dict[str, LocalError]:
    weight = np.random.default_rng(0).normal(size=(K, 32)).astype(np.float32)
    model, units = prepare(one_product(weight), folder)
    stored = store_codes(model, folder, units, NoProgress())
    return measure_local(model, folder, units, {"y": scales}, stored, [batch_of(x=x)], NoProgress())["y"]


def test_c18_ranges_know_finite_values_only() -> None:
    histogram = Histogram("x")
    histogram.add(np.array([np.nan, 1, -2, 3, np.nan], np.float32))
    assert histogram.absmax == 3
    assert histogram.counts.sum() == 3
    with pytest.raises(BuildError, match="activations of x are infinite"):
        histogram.add(np.array([np.inf], np.float32))


def test_a_histogram_does_not_depend_on_the_order_of_small_and_large_values() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=1000).astype(np.float32) * s for s in (0.01, 1, 30)]
    up, down = Histogram("x"), Histogram("x")
    for part in parts:
        up.add(part)
    for part in reversed(parts):
        down.add(part)
    assert up.absmax == down.absmax
    assert up.counts.sum() == down.counts.sum() == 3000
    # edges differ by at most one doubling, so a percentile by at most a bin of the coarser one
    assert abs(up.clips()["99.9 %"] - down.clips()["99.9 %"]) <= 2 * max(up.top, down.top) / BINS


def test_clipping_points_of_a_tensor_with_a_lone_spike_are_far_below_it() -> None:
    values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    values[7] = 1000
    histogram = Histogram("x")
    histogram.add(values)
    clips = histogram.clips()
    assert clips["absmax"] == 1000
    assert 3 < clips["99.99 %"] < 6  # a normal distribution's is 3.9


def test_c17_a_tensor_of_zeros_has_one_clipping_point_and_scale_1() -> None:
    histogram = Histogram("x")
    histogram.add(np.zeros(10, np.float32))
    assert candidate_scales(histogram) == {"absmax": 1.0}


def test_c20_calibration_memory_does_not_grow_with_the_number_of_samples(tmp_path: Path) -> None:
    model, units = prepare(one_product(np.eye(K, dtype=np.float32)), tmp_path)
    x = np.random.default_rng(0).normal(size=(64, K)).astype(np.float32)

    def peak(num_batches: int) -> int:
        tracemalloc.start()
        collect_ranges(model, tmp_path, units, (batch_of(x=x) for _ in range(num_batches)), NoProgress())
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(1)  # imports
    assert peak(400) < peak(4) + 10 * x.nbytes  # of 396 more


def test_padded_positions_are_left_out_of_ranges(tmp_path: Path) -> None:
    net = Net()
    net.op("Gather", [net.const("table", [[0.0] * K, [1.0] * K, [900.0] * K]), "ids"], "words")
    net.op("MatMul", ["words", net.const("weight", np.eye(K))], "y")
    model, units = prepare(net.model({"ids": (TensorProto.INT64, ["n", 3])}, {"y": ["n", 3, K]}), tmp_path)
    ids = np.array([[1, 1, 2], [1, 2, 2]])
    batch = Batch({"ids": ids}, 2, ids != 2)  # id 2 is the padding
    assert collect_ranges(model, tmp_path, units, [batch], NoProgress())["words"].absmax == 1


def test_local_errors_are_those_of_a_plain_computation(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, K)).astype(np.float32)
    weight = np.random.default_rng(0).normal(size=(K, 32)).astype(np.float32)
    scale = float(np.float16(0.03))
    found = local_errors(tmp_path, x, {"absmax": scale})["absmax"]
    codes, scales = quantise_weight(weight, 1, np.float16)
    wanted = x @ weight
    difference = (to_codes(x, scale) * np.float32(scale)) @ from_codes(codes, scales, 1) - wanted
    # ONNX Runtime adds integers, this adds FP32: 1e-4 of an error of a hundredth
    assert found.pooled == pytest.approx(np.linalg.norm(difference) / np.linalg.norm(wanted), rel=1e-4)
    rows = np.linalg.norm(difference, axis=1) / np.linalg.norm(wanted, axis=1)
    assert found.per_row == pytest.approx(rows.mean(), rel=1e-4)
    assert found.worst_row == pytest.approx(rows.max(), rel=1e-4)


def test_a_massive_row_is_flagged_by_the_error_per_row(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(50, K)).astype(np.float32)
    x[0] *= 1000
    found = local_errors(tmp_path, x, {"absmax": float(np.abs(x).max() / 127)})["absmax"]
    assert found.pooled < 0.1 < found.per_row
    assert found.judged == found.per_row


def test_a_clipped_spike_is_flagged_by_the_pooled_error(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(50, K)).astype(np.float32)
    x[0] *= 30
    found = local_errors(tmp_path, x, {"clip": 4 / 127})["clip"]
    assert found.per_row < 0.1 < found.pooled


def test_the_rule_with_the_least_local_error_wins_and_the_whole_range_on_a_tie() -> None:
    errors = {"absmax": LocalError(0.2, 0.1, 1), "mse": LocalError(0.05, 0.1, 1), "99.9 %": LocalError(0.3, 0.01, 1)}
    assert best_rule(errors) == "mse"
    assert best_rule(dict.fromkeys(("99.9 %", "absmax"), LocalError(0.1, 0.1, 0.1))) == "absmax"


def test_the_graph_of_a_unit_computes_what_the_codes_say(tmp_path: Path) -> None:
    """Gemm with a transposed weight and a bias: MatMul of codes and a float sum."""
    rng = np.random.default_rng(2)
    weight, bias = rng.normal(size=(32, K)).astype(np.float32), rng.normal(size=32).astype(np.float32)
    net = Net()
    net.op("Gemm", ["x", net.const("w", weight), net.const("b", bias)], "y", transB=1)
    model, units = prepare(net.model({"x": (TensorProto.FLOAT, ["n", K])}, {"y": ["n", 32]}), tmp_path)
    stored = store_codes(model, tmp_path, units, NoProgress())
    scale = float(np.float16(0.02))
    trials = Trials(model, None, tmp_path, units, {"y": scale}, stored, "qdq")
    onnx.save_model(trials.graph(["y"]), tmp_path / "int8.onnx")
    x = rng.uniform(-2.5, 2.5, (5, K)).astype(np.float32)  # beyond 127 codes, Quantize goes to -128
    codes, scales = quantise_weight(weight, 0, np.float16)
    wanted = (to_codes(x, scale) * np.float32(scale)) @ from_codes(codes, scales, 0).T + bias
    # both add exact products of small integers; only the scaling rounds
    np.testing.assert_allclose(Session(tmp_path / "int8.onnx").run({"x": x})["y"], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "image", "shape", "attributes"),
    [
        ("Conv", (8, 12, 12), (32, 8, 3, 3), {"pads": [1, 1, 1, 1]}),
        ("Conv", (32, 9, 9), (64, 8, 3, 3), {"group": 4, "strides": [2, 2]}),
        ("Conv", (64, 20), (32, 64, 3), {}),
        ("Conv", (128, 6, 6), (128, 1, 3, 3), {"group": 128}),
        ("ConvTranspose", (16, 5, 5), (16, 32, 2, 2), {"strides": [2, 2]}),
    ],
)
def test_every_kind_of_convolution_has_a_scale_per_output_channel(
    kind: str, image: tuple[int, ...], shape: tuple[int, ...], attributes: dict[str, object], tmp_path: Path
) -> None:
    """Held against the float convolution of the same codes, whose sums are exact integers but for the scaling."""
    rng = np.random.default_rng(6)
    weight = (rng.normal(size=shape) * rng.uniform(0.1, 10, shape[0])[(...,) + (None,) * (len(shape) - 1)]).astype("f4")
    axis = 0 if kind == "Conv" else 1
    codes, scales = quantise_weight(weight, axis, np.float16)

    def net(values: np.ndarray) -> onnx.ModelProto:
        made = Net()
        made.op(kind, ["x", made.const("w", values)], "y", **attributes)
        free = ["n", "c", "h", "w"][: len(shape)]
        return made.model({"x": (TensorProto.FLOAT, ["n", *image])}, {"y": free})

    model, units = prepare(net(weight), tmp_path)
    stored = store_codes(model, tmp_path, units, NoProgress())
    scale = float(np.float16(0.02))
    int8 = Trials(model, None, tmp_path, units, {"y": scale}, stored, "qdq").graph(["y"])
    assert lint(int8, tmp_path) == []
    onnx.save_model(int8, tmp_path / "int8.onnx")
    onnx.save_model(net(from_codes(codes, scales, axis)), tmp_path / "rounded.onnx")
    x = rng.uniform(-2.5, 2.5, (3, *image)).astype(np.float32)
    found = Session(tmp_path / "int8.onnx").run({"x": x})["y"]
    wanted = Session(tmp_path / "rounded.onnx").run({"x": to_codes(x, scale) * np.float32(scale)})["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
    errors = measure_local(model, tmp_path, units, {"y": {"a": scale}}, stored, [batch_of(x=x)], NoProgress())["y"]["a"]
    plain = Session(tmp_path / "model.onnx").run({"x": x})["y"]
    assert errors.pooled == pytest.approx(np.linalg.norm(found - plain) / np.linalg.norm(plain), rel=1e-3)


def test_c19_generated_names_avoid_those_of_the_model(tmp_path: Path) -> None:
    net = Net()
    net.op("Relu", ["x"], "x.q")
    net.op("Sigmoid", ["x.q"], "x.dq")
    net.op("MatMul", ["x", net.const("weight", np.ones((K, 32)))], "m")
    net.op("Concat", ["m", "x.dq", net.const("qdq.zero", np.ones((2, 1)))], "y", axis=1)
    model, units = prepare(net.model({"x": (TensorProto.FLOAT, [2, K])}, {"y": [2, 32 + K + 1]}), tmp_path)
    stored = store_codes(model, tmp_path, units, NoProgress())
    onnx.save_model(
        Trials(model, None, tmp_path, units, {"m": 0.1}, stored, "qdq").graph(["m"]), tmp_path / "int8.onnx"
    )
    x = np.full((2, K), 0.5, np.float32)
    found = Session(tmp_path / "int8.onnx").run({"x": x})["y"]
    np.testing.assert_allclose(found[:, :32], 32, rtol=0.01)  # 0.5 is a code of scale 0.1
    np.testing.assert_allclose(found[:, -1], 1)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    weight = np.ones((K, 32))
    weight[3, 4] = np.nan
    model, units = prepare(one_product(weight), tmp_path)
    with pytest.raises(BuildError, match="the weights 'weight' of y hold NaN"):
        store_codes(model, tmp_path, units, NoProgress())


@pytest.mark.parametrize("kind", ["MatMul", "Gemm"])
def test_both_forms_of_int8_compute_the_same(kind: str, tmp_path: Path) -> None:
    net = Net()
    rng = np.random.default_rng(5)
    for name, width in (("a", 32), ("b", 16)):
        shape = (K, width) if kind == "MatMul" else (width, K)
        inputs = ["x", net.const(f"{name}.w", rng.normal(size=shape))]
        if kind == "MatMul":
            net.op("MatMul", inputs, name)
        else:
            net.op("Gemm", [*inputs, net.const(f"{name}.bias", rng.normal(size=width))], name, transB=1)
    outputs = {"a": ["n", 32], "b": ["n", 16]}
    model, units = prepare(net.model({"x": (TensorProto.FLOAT, ["n", K])}, outputs), tmp_path)
    assert [len(unit.products) for unit in units] == [2]
    trials = Trials(model, None, tmp_path, units, {"a": 0.02}, store_codes(model, tmp_path, units, NoProgress()), "qdq")
    found, x = {}, rng.normal(size=(3, K)).astype(np.float32)
    for form in ("qdq", "ort"):
        graph = trials.fp32_graph(["a"], form)
        assert sum(node.op_type == "QuantizeLinear" for node in graph.graph.node) == 1
        onnx.save_model(graph, tmp_path / f"{form}.onnx")
        found[form] = Session(tmp_path / f"{form}.onnx").run({"x": x})
    for name in outputs:  # sums of integers are exact, scaling rounds
        np.testing.assert_allclose(found["ort"][name], found["qdq"][name], rtol=1e-5, atol=1e-5)


def test_c28_a_norm_that_is_written_out_stays_in_fp32(tmp_path: Path) -> None:
    """Values of 300: their squares sum to more than FP16 holds; in FP16 throughout the result would be 0."""
    net = Net()
    net.op("Mul", ["x", "x"], "square")
    net.op("ReduceMean", ["square"], "mean", axes=[-1])
    net.op("Add", ["mean", net.const("eps", 1e-12)], "safe")
    net.op("Sqrt", ["safe"], "root")
    net.op("Div", ["x", "root"], "normed")
    net.op("MatMul", ["normed", net.const("w", np.eye(K))], "y")
    model, _ = prepare(net.model({"x": (TensorProto.FLOAT, ["n", K])}, {"y": ["n", K]}), tmp_path)
    half = to_half(model, tmp_path, types_of(model))
    onnx.save_model(half, tmp_path / "half.onnx")
    found = Session(tmp_path / "half.onnx").run({"x": np.full((1, K), 300, np.float32)})["y"]
    np.testing.assert_allclose(found, 1, rtol=1e-3)  # one rounding to FP16
    kinds = {t.name: t.data_type for t in half.graph.initializer}
    assert kinds["eps"] == TensorProto.FLOAT
    assert kinds["w.cast"] == TensorProto.FLOAT16


def test_nodes_that_fp16_can_not_hold_are_found_by_running_the_graph_but_a_mask_is_not_one(tmp_path: Path) -> None:
    net = Net()
    net.op("MatMul", ["x", net.const("a", np.eye(K) * 1000)], "large")  # 1000 x 40 is beyond half of 65504
    net.op("MatMul", ["x", net.const("b", np.eye(K) * 1e5)], "weight")
    net.op("MatMul", ["x", net.const("c", np.eye(K))], "fine")
    net.op("Mul", ["fine", net.const("far", -1e35)], "hidden")
    net.op("Add", ["fine", "hidden"], "masked")
    net.op("Softmax", ["masked"], "shares")
    net.op("Sum", ["large", "weight", "shares"], "y")
    model, _ = prepare(net.model({"x": (TensorProto.FLOAT, ["n", K])}, {"y": ["n", K]}), tmp_path)
    batch = batch_of(x=np.full((2, K), 40, np.float32))
    found = too_large_for_half(model, tmp_path, types_of(model), [batch], NoProgress())
    assert found == {"large", "weight", "y"}


@pytest.mark.parametrize("net", ["encoder", "convolutions"])
def test_fp16_keeps_inputs_and_outputs_and_is_close(net: str, tmp_path: Path) -> None:
    model, _ = prepare(random_encoder() if net == "encoder" else conv_net(), tmp_path)
    half = to_half(model, tmp_path, types_of(model))
    onnx.save_model(half, tmp_path / "half.onnx")
    onnx.checker.check_model(str(tmp_path / "half.onnx"), full_check=True)
    assert list(half.graph.input) == list(model.graph.input)
    rng = np.random.default_rng(0)
    feeds = sentences(4) if net == "encoder" else {"image": rng.normal(size=(4, 3, 16, 16)).astype(np.float32)}
    (found,), (wanted,) = (Session(tmp_path / n).run(feeds).values() for n in ("half.onnx", "model.onnx"))
    # 1000 stands beside ordinary values in the planted channel: FP16 knows it to 0.5
    assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)


def test_a_graph_with_graphs_inside_stays_in_fp32(tmp_path: Path) -> None:
    branch = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["z"])], "b", [], [helper.make_tensor_value_info("z", 1, None)]
    )
    node = helper.make_node("If", ["flag"], ["y"], name="if", then_branch=branch, else_branch=branch)
    graph = helper.make_graph(
        [node],
        "net",
        [helper.make_tensor_value_info("x", 1, [2]), helper.make_tensor_value_info("flag", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", 1, [2])],
    )
    assert value_types(helper.make_model(graph)) is None


def test_sizes_are_computed_in_fp32(tmp_path: Path) -> None:
    """A length of 2049 is not a number in FP16."""
    net = Net()
    net.op("Shape", ["x"], "shape")
    net.op("Cast", ["shape"], "sizes", to=TensorProto.FLOAT)
    net.op("Mul", ["sizes", net.const("two", 2.0)], "twice")
    net.op("Add", ["twice", net.const("w", [1.0, 1.0])], "y")
    model, _ = prepare(net.model({"x": (TensorProto.FLOAT, ["n", "m"])}, {"y": [2]}), tmp_path)
    half = to_half(model, tmp_path, types_of(model))
    onnx.save_model(half, tmp_path / "half.onnx")
    assert Session(tmp_path / "half.onnx").run({"x": np.zeros((1, 2049), np.float32)})["y"].tolist() == [3, 4099]


def test_agreement_bounds_the_mean_error_and_keeps_the_worst_sample() -> None:
    wanted = np.eye(4, dtype=np.float32)
    found = wanted.copy()
    found[2] *= 1.4
    result = agreement([compare({"y": wanted}, {"y": found}, batch_of(x=wanted))])
    assert result.worst == pytest.approx(0.4)
    assert result.error == pytest.approx(0.1)
    assert result.upper == pytest.approx(0.1 + 1.96 * 0.2 / 2)  # of 0, 0, 0.4, 0: deviation 0.2
    assert result.cosine == pytest.approx(1)
    assert result.same_top1 is None or result.same_top1 == 1


def test_padded_positions_are_left_out_of_the_comparison() -> None:
    wanted = np.ones((2, 3, 4), np.float32)
    found = wanted.copy()
    found[0, 2] = 50
    batch = Batch({}, 2, np.array([[True, True, False], [True, True, True]]))
    assert agreement([compare({"y": wanted}, {"y": found}, batch)]).worst == 0


@pytest.mark.parametrize(
    ("found", "error"),
    [(np.full((1, 4), np.nan, np.float32), np.inf), (np.zeros((1, 5), np.float32), 1), (np.zeros((1, 4)), 1)],
)
def test_noise_is_an_error_of_one_or_more(found: np.ndarray, error: float) -> None:
    wanted = np.ones((1, 4), np.float32)
    assert agreement([compare({"y": wanted}, {"y": found}, batch_of(x=wanted))]).error == error


def test_whole_numbers_are_compared_by_the_share_that_differs() -> None:
    wanted, found = np.array([[1, 2, 3, 4]]), np.array([[1, 2, 3, 5]])
    assert agreement([compare({"ids": wanted}, {"ids": found}, batch_of(x=wanted))]).error == 0.25


def test_classes_are_known_by_name_or_because_rows_are_probabilities() -> None:
    embedding = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    probabilities = np.exp(embedding) / np.exp(embedding).sum(axis=1, keepdims=True)
    assert not has_classes("sentence_embedding", embedding)
    assert has_classes("class_logits", embedding)
    assert has_classes("out", probabilities)


def test_changed_classes_fail_the_gate_although_the_error_is_small() -> None:
    def found(same: float) -> Agreement:
        return Agreement(100, 0.01, 0.02, 0.03, 1.0, 1.0, same)

    assert bound(found(1.0), 0.1) == 0.02
    assert bound(found(0.98), 0.1) == pytest.approx(0.1)
    assert bound(found(0.97), 0.1) > 0.1


def baseline(folder: Path, model: onnx.ModelProto, x: np.ndarray) -> Baseline:
    onnx.save_model(model, folder / "model.onnx")
    parts = {"x": [x[i : i + 1] for i in range(len(x))]}
    samples = Samples(folder / "s.npz", parts, len(x), batch=4)
    return keep_baseline(Session(folder / "model.onnx"), samples, range(len(x)), folder, "gate", NoProgress())


def test_an_original_that_gives_nan_is_refused(tmp_path: Path) -> None:
    net = Net()
    net.op("Log", ["x"], "y")
    model = net.model({"x": (TensorProto.FLOAT, ["n", 2])}, {"y": ["n", 2]})
    with pytest.raises(BuildError, match="own output 'y' holds NaN"):
        baseline(tmp_path, model, np.full((4, 2), -1, np.float32))


def test_the_finished_graph_is_run_in_a_process_of_its_own(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(10, K)).astype(np.float32)
    kept = baseline(tmp_path, one_product(np.eye(K, dtype=np.float32)), x)
    assert verify_graph(tmp_path / "model.onnx", kept).worst == 0
    onnx.save_model(one_product(1.5 * np.eye(K, dtype=np.float32)), tmp_path / "other.onnx")
    assert verify_graph(tmp_path / "other.onnx", kept).error == pytest.approx(0.5)


def test_c27_a_finished_graph_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    x = np.zeros((4, K), np.float32)
    kept = baseline(tmp_path, one_product(np.eye(K, dtype=np.float32)), x)
    (tmp_path / "cut.onnx").write_bytes((tmp_path / "model.onnx").read_bytes()[:200])
    with pytest.raises(BuildError, match=r"the finished graph does not run \(exit 2\): .*cut\.onnx") as refused:
        verify_graph(tmp_path / "cut.onnx", kept)
    assert "\n" not in str(refused.value)


def test_constants_of_both_kinds_are_found_as_weights(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.ones((K, 32), np.float32))
    nodes = [helper.make_node("Constant", [], ["w"], value=weight), helper.make_node("MatMul", ["x", "w"], ["y"])]
    nodes[1].name = "y"
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", 1, ["n", K])],
        [helper.make_tensor_value_info("y", 1, ["n", 32])],
    )
    assert [unit.name for unit in find_units(helper.make_model(graph), tmp_path)] == ["y"]
