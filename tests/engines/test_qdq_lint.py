"""The lint of Q/DQ graphs: a good graph passes, and each rule finds its own kind of broken graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_engines.qdq.codes import SMALLEST_SCALE, activation_scale, from_codes, quantise_weight
from edge_engines.qdq.lint import check_quantised, lint
from edge_runtime.errors import BuildError

FOLDER = Path()  # nothing external, unless a test says so


def good(dtype: type[np.floating] = np.float32) -> onnx.ModelProto:
    """Two MatMuls that share one input, a bias, a Conv and a Gemm with a transposed weight, each in INT8."""
    rng = np.random.default_rng(1)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes, constants = [], [numpy_helper.from_array(np.array(0.02, dtype), "x.scale")]
    nodes += pair("x", "x.scale")
    for name, shape, axis in (("q", (32, 48), 1), ("k", (32, 16), 1), ("fc", (16, 48), 0), ("conv", (16, 4, 3, 3), 0)):
        codes, scales = quantise_weight(rng.normal(size=shape).astype(np.float32), axis, dtype)
        constants += [numpy_helper.from_array(codes, f"{name}.w"), numpy_helper.from_array(scales, f"{name}.w.scale")]
        nodes.append(node("DequantizeLinear", [f"{name}.w", f"{name}.w.scale"], f"{name}.w.dq", axis=axis))
    constants.append(numpy_helper.from_array(np.zeros(48, dtype), "bias"))
    constants += [numpy_helper.from_array(np.array(0.03, dtype), f"{n}.scale") for n in ("y", "image")]
    nodes += [node("MatMul", ["x.dq", "q.w.dq"], "q"), node("MatMul", ["x.dq", "k.w.dq"], "k")]
    nodes += [node("Add", ["q", "bias"], "y"), *pair("y", "y.scale")]
    nodes += [node("Gemm", ["y.dq", "fc.w.dq"], "fc", transB=1)]
    nodes += [*pair("image", "image.scale"), node("Conv", ["image.dq", "conv.w.dq"], "conv")]
    inputs = [helper.make_tensor_value_info(*v) for v in (("x", kind, [2, 32]), ("image", kind, [1, 4, 8, 8]))]
    made = {"k": [2, 16], "fc": [2, 16], "conv": [1, 16, 6, 6]}
    outputs = [helper.make_tensor_value_info(name, kind, shape) for name, shape in made.items()]
    graph = helper.make_graph(nodes, "good", inputs, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])


def pair(value: str, scale: str) -> list[onnx.NodeProto]:
    quantise = node("QuantizeLinear", [value, scale], f"{value}.q", output_dtype=TensorProto.INT8)
    return [quantise, node("DequantizeLinear", [f"{value}.q", scale], f"{value}.dq")]


def node(kind: str, inputs: list[str], output: str, **attributes: int) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], name=output, **attributes)


def find(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.name == name)


def constant(model: onnx.ModelProto, name: str, values: np.ndarray) -> None:
    """Put other values in place of a constant, or add one."""
    kept = [t for t in model.graph.initializer if t.name != name]
    model.graph.ClearField("initializer")
    model.graph.initializer.extend([*kept, numpy_helper.from_array(values, name)])


def values(model: onnx.ModelProto, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(t for t in model.graph.initializer if t.name == name)).copy()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_good_graph_has_no_findings(dtype: type[np.floating]) -> None:
    model = good(dtype)
    onnx.checker.check_model(model, full_check=True)
    assert lint(model, FOLDER) == []
    assert check_quantised(model, FOLDER) == []


def unsigned(m: onnx.ModelProto) -> None:
    find(m, "x.q").ClearField("attribute")  # ONNX then takes UINT8


def stored_unsigned(m: onnx.ModelProto) -> None:
    constant(m, "q.w", values(m, "q.w").astype(np.uint8))


def double_scale(m: onnx.ModelProto) -> None:
    constant(m, "q.w.scale", values(m, "q.w.scale").astype(np.float64))


def zero_point(m: onnx.ModelProto) -> None:
    constant(m, "zero", np.array(3, np.int8))
    find(m, "x.q").input.append("zero")


def nan_scale(m: onnx.ModelProto) -> None:
    constant(m, "x.scale", np.array(np.nan, np.float32))


def negative_scale(m: onnx.ModelProto) -> None:
    constant(m, "x.scale", np.array(-0.5, np.float32))


def tiny_scale(m: onnx.ModelProto) -> None:
    scales = values(m, "k.w.scale")
    scales[5] = SMALLEST_SCALE / 2
    constant(m, "k.w.scale", scales)


def infinite_scale(m: onnx.ModelProto) -> None:
    constant(m, "x.scale", np.array(np.inf, np.float32))


def computed_scale(m: onnx.ModelProto) -> None:
    constant(m, "axes", np.array([0], np.int64))
    m.graph.node.insert(0, node("ReduceMax", ["x"], "live", keepdims=0))
    for name in ("x.q", "x.dq"):
        find(m, name).input[1] = "live"


def smallest_code(m: onnx.ModelProto) -> None:
    codes = values(m, "conv.w")
    codes[3, 1, 2, 0] = -128
    constant(m, "conv.w", codes)


def dead_channel(m: onnx.ModelProto) -> None:
    codes = values(m, "q.w")
    codes[:, 7] = 0
    constant(m, "q.w", codes)


def wrong_axis(m: onnx.ModelProto) -> None:
    find(m, "fc.w.dq").attribute[0].i = 1


def one_weight_scale(m: onnx.ModelProto) -> None:
    constant(m, "q.w.scale", np.array(0.1, np.float32))


def per_channel_activation(m: onnx.ModelProto) -> None:
    constant(m, "x.scale", np.full(32, 0.1, np.float32))


def float_activation(m: onnx.ModelProto) -> None:
    find(m, "q").input[0] = "x"


def float_weight(m: onnx.ModelProto) -> None:
    constant(m, "plain", np.ones((32, 16), np.float32))
    find(m, "k").input[1] = "plain"
    m.graph.node.remove(find(m, "k.w.dq"))


def attention_product(m: onnx.ModelProto) -> None:
    find(m, "k").input[1] = "y.dq"
    m.graph.node.remove(find(m, "k.w.dq"))


def residual(m: onnx.ModelProto) -> None:
    find(m, "y").input[0] = "q"
    find(m, "y").input[1] = "y0.dq"
    constant(m, "y0.scale", np.array(0.1, np.float32))
    m.graph.node.extend(pair("k", "y0.scale"))
    m.graph.node[-1].output[0] = "y0.dq"


def softmax(m: onnx.ModelProto) -> None:
    m.graph.node.append(node("Softmax", ["x.dq"], "weights"))


def cast_between(m: onnx.ModelProto) -> None:
    m.graph.node.append(node("Cast", ["x.dq"], "cast", to=TensorProto.FLOAT16))
    find(m, "q").input[0] = "cast"


def mixed_types(m: onnx.ModelProto) -> None:
    constant(m, "q.w.scale", values(m, "q.w.scale").astype(np.float16))


def quantised_bias(m: onnx.ModelProto) -> None:
    constant(m, "b", np.zeros(16, np.int32))
    constant(m, "b.scale", np.full(16, 0.1, np.float32))
    m.graph.node.append(node("DequantizeLinear", ["b", "b.scale"], "b.dq", axis=0))
    find(m, "conv").input.append("b.dq")


def quantised_output(m: onnx.ModelProto) -> None:
    m.graph.output.append(helper.make_tensor_value_info("x.dq", TensorProto.FLOAT, None))


def integer_output(m: onnx.ModelProto) -> None:
    m.graph.output.append(helper.make_tensor_value_info("x.q", TensorProto.INT8, None))


def two_pairs(m: onnx.ModelProto) -> None:
    m.graph.node.extend(pair("x", "x.scale"))
    m.graph.node[-2].output[0] = "again.q"
    m.graph.node[-1].input[0] = "again.q"
    m.graph.node[-1].output[0] = "again.dq"
    find(m, "k").input[0] = "again.dq"


def other_scale(m: onnx.ModelProto) -> None:
    find(m, "x.dq").input[1] = "y.scale"


def quantised_constant(m: onnx.ModelProto) -> None:
    find(m, "x.q").input[0] = "bias"


def lone_quantise(m: onnx.ModelProto) -> None:
    m.graph.node.append(node("QuantizeLinear", ["fc", "x.scale"], "lone", output_dtype=TensorProto.INT8))


def dynamic(m: onnx.ModelProto) -> None:
    m.graph.node.append(helper.make_node("DynamicQuantizeLinear", ["x"], ["a", "b", "c"], name="dynamic"))


def contrib(m: onnx.ModelProto) -> None:
    find(m, "x.q").domain = "com.microsoft"


def inside_if(m: onnx.ModelProto) -> None:
    inner = helper.make_graph(pair("x", "x.scale"), "then", [], [])
    m.graph.node.append(helper.make_node("If", ["flag"], ["out"], name="if", then_branch=inner, else_branch=inner))


@pytest.mark.parametrize(
    ("damage", "rule", "text"),
    [
        (unsigned, "type", "x.q, tensor x: codes of type UINT8"),
        (stored_unsigned, "type", "tensor q.w: codes of type UINT8"),
        (double_scale, "type", "scale of type DOUBLE"),
        (zero_point, "zero point", "zero point 3"),
        (nan_scale, "scale", r"x.scale: scale\[0\] = nan"),
        (negative_scale, "scale", r"scale\[0\] = -0.5"),
        (infinite_scale, "scale", r"scale\[0\] = inf"),
        (tiny_scale, "scale", r"k.w.scale: scale\[5\] = 3.05176e-05; expected finite and at least 2\^-14 = 6.1e-05"),
        (computed_scale, "scale", "live: computed while the model runs"),
        (smallest_code, "codes", r"conv.w: code -128 at \[3, 1, 2, 0\]; expected -127 to 127"),
        (dead_channel, "dead channel", "channel 7 is all zeros with scale .*expected scale 1"),
        (wrong_axis, "axis", r"scale of shape \[16\] on axis 1 of \[16, 48\]; expected shape \[16\] on axis 0"),
        (one_weight_scale, "axis", r"scale of shape \[\] .*expected shape \[48\] on axis 1"),
        (per_channel_activation, "per tensor", r"scale of shape \[32\]"),
        (float_activation, "operands", "node q.*'float', 'dequantised weight'"),
        (float_weight, "operands", "node k.*'dequantised activation', 'float'"),
        (attention_product, "operands", "'dequantised activation', 'dequantised activation'"),
        (residual, "consumer", "taken by Add y"),
        (softmax, "consumer", "taken by Softmax weights"),
        (cast_between, "cast", "Cast cast follows"),
        (mixed_types, "cast", "'FLOAT', 'FLOAT16'"),
        (quantised_bias, "bias", "codes of type INT32; expected a bias in float"),
        (quantised_output, "output", "a dequantised output of the graph"),
        (integer_output, "output", "INT8 codes as an output"),
        (two_pairs, "shared", "tensor x: quantised 2 times"),
        (other_scale, "pair", "scale y.scale differs from x.scale"),
        (quantised_constant, "pair", "a constant quantised at run time"),
        (lone_quantise, "pair", "taken by nothing"),
        (dynamic, "operator", "DynamicQuantizeLinear"),
        (contrib, "operator", "com.microsoft.QuantizeLinear"),
        (inside_if, "operator", "QuantizeLinear inside If"),
    ],
)
def test_c16_each_rule_finds_its_own_fault(damage: Callable[[onnx.ModelProto], None], rule: str, text: str) -> None:
    model = good()
    damage(model)
    assert rule in {fault.rule for fault in lint(model, FOLDER) if not fault.is_warning}
    with pytest.raises(BuildError, match=text) as refused:
        check_quantised(model, FOLDER)
    assert "\n" not in str(refused.value)


def test_a_cache_in_int8_crosses_the_border_of_the_graph() -> None:
    """Rows of an earlier step come in as codes and are read as float by attention; new rows leave as codes."""
    m = good()
    m.graph.input.append(helper.make_tensor_value_info("past", TensorProto.INT8, [2, 32, 8]))
    m.graph.output.append(helper.make_tensor_value_info("new", TensorProto.INT8, [2, 16]))
    constant(m, "one", np.array(1, np.float32))
    m.graph.node.append(node("DequantizeLinear", ["past", "one"], "past.wide"))
    m.graph.node.append(node("MatMul", ["x", "past.wide"], "scores"))
    m.graph.node.append(node("QuantizeLinear", ["k", "one"], "new", output_dtype=TensorProto.INT8))
    m.graph.node.append(node("DequantizeLinear", ["new", "one"], "new.wide"))
    m.graph.node.append(node("Mul", ["new.wide", "one"], "used"))
    assert lint(m, FOLDER) == []
    find(m, "new").ClearField("attribute")
    assert {fault.rule for fault in lint(m, FOLDER)} == {"type"}  # codes are still held to INT8


def test_sizes_that_do_not_fill_the_kernels_are_a_warning_only() -> None:
    model = good()
    codes, scales = quantise_weight(np.ones((32, 20), np.float32), 1)
    constant(model, "k.w", codes)
    constant(model, "k.w.scale", scales)
    (warning,) = check_quantised(model, FOLDER)
    assert warning.is_warning
    assert "weight [32, 20]; expected both sizes a multiple of 16" in str(warning)


def test_weights_in_a_file_of_their_own_are_checked_and_a_missing_file_is_named(tmp_path: Path) -> None:
    model = good()
    smallest_code(model)
    onnx.save_model(model, tmp_path / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    stored = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert {fault.rule for fault in lint(stored, tmp_path)} == {"codes"}
    (tmp_path / "m.data").unlink()
    with pytest.raises(BuildError, match=r"constant .* can't be read: .*m\.data"):
        lint(stored, tmp_path)


def test_many_faults_are_counted_and_the_first_are_shown() -> None:
    model = good()
    for damage in (unsigned, nan_scale, smallest_code, dead_channel):
        damage(model)
    with pytest.raises(BuildError, match=r"has \d faults: .* \| .* \| .* \| and \d more; nothing was compiled"):
        check_quantised(model, FOLDER)


def test_c17_a_dead_channel_gets_scale_1_and_a_tiny_one_stays_normal_in_fp16() -> None:
    weight = np.ones((4, 3), np.float32)
    weight[:, 1], weight[:, 2] = 0, 1e-4
    codes, scales = quantise_weight(weight, 1, np.float16)
    assert scales.tolist() == [np.float16(1 / 127), 1, SMALLEST_SCALE]
    assert codes[0].tolist() == [127, 0, 2]


def test_codes_come_back_within_half_a_step() -> None:
    weight = np.random.default_rng(2).normal(size=(8, 5, 3)).astype(np.float32)
    codes, scales = quantise_weight(weight, 1)
    step = scales[None, :, None]
    assert np.all(np.abs(from_codes(codes, scales, 1) - weight) <= step * (0.5 + 1e-5))  # 1e-5: rounding of FP32
    assert codes.min() >= -127


@pytest.mark.parametrize("absmax", [float("nan"), float("inf"), 65504.0 * 128])
def test_c18_activations_that_no_scale_fits_are_refused_by_name(absmax: float) -> None:
    with pytest.raises(BuildError, match="activations of fc3 reach"):
        activation_scale(absmax, "fc3")


def test_c17_a_dead_activation_gets_scale_1() -> None:
    assert activation_scale(0.0, "x") == 1
    assert activation_scale(127.0, "x") == 1
    assert activation_scale(1e-9, "x") == SMALLEST_SCALE
