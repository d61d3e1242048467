"""Engines from any ONNX model, on small networks: what is chosen, written, verified and claimed, what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from edge_engines.compile.tensorrt import PLAN_NAME, CompileOptions
from edge_engines.onnx_model.build import build_onnx_model
from edge_engines.onnx_model.manifest import OnnxManifest, is_onnx_engine, read_onnx_manifest
from edge_runtime.errors import BuildError, EngineRefusedError, UsageError
from edge_runtime.manifest import read_manifest
from engines.onnx_nets import Net, conv_net, images, random_encoder, sentences

RTX = CompileOptions(compute_capabilities=("8.6",))


def build(tmp_path: Path, model: onnx.ModelProto, samples: dict[str, np.ndarray], **options: object) -> OnnxManifest:
    onnx.save_model(model, tmp_path / "model.onnx")
    np.savez(tmp_path / "samples.npz", **samples)
    out = tmp_path / "engine"
    return build_onnx_model(tmp_path / "model.onnx", out, inputs=tmp_path / "samples.npz", **options)  # type: ignore[arg-type]


def answers(file: Path, samples: dict[str, np.ndarray]) -> np.ndarray:
    (values,) = ort.InferenceSession(file).run(None, samples)
    return values


def kinds(file: Path) -> Counter[str]:
    return Counter(node.op_type for node in onnx.load_model(file, load_external_data=False).graph.node)


def test_an_encoder_runs_int8_in_every_layer_and_stays_within_its_gate(tmp_path: Path) -> None:
    samples = sentences(64)
    manifest = build(tmp_path, random_encoder(), samples)
    assert read_onnx_manifest(tmp_path / "engine") == manifest
    assert (manifest.int8_share, manifest.int8_form, manifest.float_parts) == (1.0, "ort", "fp32")
    assert {unit.reason for unit in manifest.units} == {"int8"}
    assert manifest.agreement.error <= manifest.agreement.upper <= manifest.agreement.limit == 0.1
    assert manifest.weight_bytes < 0.4 * manifest.source_bytes
    found = answers(tmp_path / "engine/model.onnx", samples)
    wanted = answers(tmp_path / "model.onnx", samples)
    errors = np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)
    # Half of these samples judged it; twice the bound on the mean is far from any wrong graph (1.4 for unrelated ones).
    assert errors.mean() <= 2 * manifest.agreement.upper
    assert errors.mean() > 0


def test_products_of_one_input_are_one_unit_with_one_quantize(tmp_path: Path) -> None:
    manifest = build(tmp_path, random_encoder(layers=1), sentences(32))
    assert [len(unit.nodes) for unit in manifest.units] == [3, 1, 1, 1]  # qkv, o, up, down
    found = kinds(tmp_path / "engine/model.onnx")
    assert found["QuantizeLinear"] == 4
    assert found["MatMulIntegerToFloat"] == 6
    assert found["MatMul"] == 2  # the products of attention stay float
    assert found["DequantizeLinear"] == 0


def test_a_convolutional_network_goes_through_its_own_gate_and_a_planted_outlier_stays_float(tmp_path: Path) -> None:
    samples = {"image": images(64)}
    manifest = build(tmp_path, conv_net(), samples, target="tensorrt-rtx", compile_options=RTX)
    units = {unit.unit: unit for unit in manifest.units}
    assert units["point"].reason == "hard rule"
    assert max(units["point"].pooled_error, units["point"].per_row_error) > 0.1
    int8 = {name for name, unit in units.items() if unit.precision == "int8"}
    assert (
        {"stem", "wide"} <= int8 <= {"stem", "wide", "fc1", "fc2"}
    )  # random classes are nearly tied: the gate may act
    assert "depth" not in units  # 144 weights: too few to gain
    assert manifest.agreement.same_top1 is not None
    assert manifest.agreement.same_top1 >= 1 - 1 / manifest.agreement.samples


def test_convolutions_stay_float_for_onnx_runtime_which_is_slower_with_them_in_int8(tmp_path: Path) -> None:
    manifest = build(tmp_path, conv_net(), {"image": images(64)})
    assert [unit.unit for unit in manifest.units] == ["fc1", "fc2"]
    assert kinds(tmp_path / "engine/model.onnx")["Conv"] == 4
    net = Net()
    weight = net.const("w", np.random.default_rng(0).normal(size=(32, 3, 5, 5)))
    net.op("Conv", ["image", weight], "y", kernel_shape=[5, 5])
    model = net.model({"image": (TensorProto.FLOAT, ["n", 3, 16, 16])}, {"y": ["n", 32, 12, 12]})
    with pytest.raises(BuildError, match="convolutions are slower in INT8; build with --precision fp32, or for Tens"):
        build(tmp_path, model, {"image": images(64)}, force=True)


def test_fp32_keeps_the_graph_and_its_answers(tmp_path: Path) -> None:
    samples = {"image": images(16)}
    manifest = build(tmp_path, conv_net(), samples, precision="fp32")
    assert (manifest.units, manifest.int8_share, manifest.threshold) == ([], 0.0, None)
    np.testing.assert_allclose(  # folding batch normalisation rounds differently: a few FP32 steps
        answers(tmp_path / "engine/model.onnx", samples),
        answers(tmp_path / "model.onnx", samples),
        rtol=1e-3,
        atol=1e-4,
    )


def test_fp16_halves_the_weights(tmp_path: Path) -> None:
    samples = sentences(24)
    manifest = build(tmp_path, random_encoder(), samples, precision="fp16")
    assert manifest.weight_bytes < 0.55 * manifest.source_bytes
    assert manifest.agreement.upper < 0.01  # ten times what rounding to FP16 gave
    assert manifest.float_parts == "fp16"


def test_layers_that_fp16_can_not_hold_stay_in_fp32_and_the_rest_does_not(tmp_path: Path) -> None:
    """Weights and values beyond 65504 between two layers: FP16 would give infinity."""
    net = Net()
    rng = np.random.default_rng(7)
    net.op("MatMul", ["x", net.const("a", rng.normal(size=(64, 64)) * 1e5)], "large")
    net.op("Relu", ["large"], "relu")
    net.op("MatMul", ["relu", net.const("b", rng.normal(size=(64, 64)) * 1e-5)], "small")
    net.op("MatMul", ["small", net.const("c", rng.normal(size=(64, 64)))], "y")
    model = net.model({"x": (TensorProto.FLOAT, ["n", 64])}, {"y": ["n", 64]})
    samples = {"x": rng.normal(size=(32, 64)).astype(np.float32)}
    manifest = build(tmp_path, model, samples, precision="fp16")
    assert manifest.agreement.upper < 0.01
    graph = onnx.load_model(tmp_path / "engine/model.onnx", load_external_data=False).graph
    kinds = {tensor.name: tensor.data_type for tensor in graph.initializer}
    assert kinds["a"] == TensorProto.FLOAT
    assert kinds["c.cast"] == TensorProto.FLOAT16


@pytest.mark.parametrize("net", ["encoder", "convolutions"])
def test_int8_compiles_for_tensorrt_rtx_without_a_gpu(net: str, tmp_path: Path) -> None:
    model = random_encoder() if net == "encoder" else conv_net()
    samples = sentences(32) if net == "encoder" else {"image": images(32)}
    manifest = build(tmp_path, model, samples, target="tensorrt-rtx", compile_options=RTX)
    assert {entry.name for entry in manifest.files} == {PLAN_NAME}
    assert manifest.compiled is not None
    assert manifest.compiled.compute_capabilities == ["8.6"]
    assert [entry.name for entry in manifest.compiled.source] == ["model.onnx", "model.onnx.data"]
    batch = manifest.compiled.axes["batch" if net == "encoder" else "n"]
    assert (batch.least, batch.most) == (1, 8)
    assert (manifest.int8_form, manifest.float_parts) == ("qdq", "fp16")
    assert manifest.agreement.subject == "graph"


def test_an_engine_of_this_kind_is_told_apart_and_not_served(tmp_path: Path) -> None:
    build(tmp_path, random_encoder(layers=1), sentences(32))
    assert is_onnx_engine(tmp_path / "engine")
    assert not is_onnx_engine(tmp_path)
    with pytest.raises(EngineRefusedError) as refused:
        read_manifest(tmp_path / "engine")
    assert "\n" not in str(refused.value)


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    build(tmp_path, random_encoder(layers=1), sentences(32))
    data = tmp_path / "engine/model.onnx.data"
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    with pytest.raises(EngineRefusedError, match=r"model\.onnx\.data: SHA-256"):
        read_onnx_manifest(tmp_path / "engine")


def test_a_gate_that_nothing_passes_ends_the_build_and_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no layer can run INT8: 0 of 2 are off by more than 0\.1 .*gate 1e-06"):
        build(tmp_path, conv_net(), {"image": images(32)}, gate=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "samples.npz"]


def test_a_tighter_gate_keeps_more_layers_in_float(tmp_path: Path) -> None:
    for folder in ("wide", "tight"):
        (tmp_path / folder).mkdir()
    wide = build(tmp_path / "wide", random_encoder(), sentences(48))
    tight = build(tmp_path / "tight", random_encoder(), sentences(48), gate=0.5 * wide.agreement.upper)
    assert 0 < tight.int8_share < wide.int8_share
    assert tight.agreement.upper <= 0.5 * wide.agreement.upper
    assert "gate" in {unit.reason for unit in tight.units}


def test_the_same_build_chooses_the_same(tmp_path: Path) -> None:
    found = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        manifest = build(tmp_path / folder, conv_net(), {"image": images(32)})
        found.append((manifest.units, {entry.name: entry.sha256 for entry in manifest.files}))
    assert found[0] == found[1]


def test_axes_that_an_exporter_called_a_question_mark_are_told_apart(tmp_path: Path) -> None:
    model = conv_net()
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_value in (0, 16):
                axis.dim_param = "?"
    narrow = np.ascontiguousarray(images(32)[:, :, :, :12])
    manifest = build(tmp_path, model, {"image": narrow}, target="tensorrt-rtx", compile_options=RTX)
    assert manifest.inputs[0].shape == ["image.0", 3, "image.2", "image.3"]
    assert manifest.compiled is not None
    most = {name: axis.most for name, axis in manifest.compiled.axes.items()}
    assert most == {"image.0": 8, "image.2": 16, "image.3": 12}


def test_a_model_of_an_older_opset_is_converted(tmp_path: Path) -> None:
    manifest = build(tmp_path, conv_net(opset=11), {"image": images(32)}, target="tensorrt-rtx", compile_options=RTX)
    assert manifest.opset == 11
    assert manifest.float_parts == "fp16"


def test_c19_a_weight_that_two_layers_share_is_stored_once_and_one_that_stays_float_is_kept(tmp_path: Path) -> None:
    net = Net()
    rng = np.random.default_rng(3)
    table = net.const("table", rng.normal(size=(64, 64)))
    net.op("Gather", [table, "ids"], "words")
    net.op("MatMul", ["words", table], "first")
    net.op("Relu", ["first"], "relu")
    net.op("MatMul", ["relu", table], "second")
    model = net.model({"ids": (TensorProto.INT64, ["n", 4])}, {"second": ["n", 4, 64]})
    manifest = build(tmp_path, model, {"ids": rng.integers(0, 64, (32, 4))})
    assert [unit.precision for unit in manifest.units] == ["int8", "int8"]
    graph = onnx.load_model(tmp_path / "engine/model.onnx", load_external_data=False).graph
    large = sorted(tensor.data_type for tensor in graph.initializer if list(tensor.dims) == [64, 64])
    assert large == [TensorProto.FLOAT, TensorProto.INT8]


def test_a_constant_first_operand_is_left_alone(tmp_path: Path) -> None:
    net = Net()
    rng = np.random.default_rng(4)
    net.op("MatMul", [net.const("left", rng.normal(size=(64, 64))), "x"], "mixed")
    net.op("MatMul", ["mixed", net.const("right", rng.normal(size=(64, 64)))], "y")
    model = net.model({"x": (TensorProto.FLOAT, ["n", 64, 64])}, {"y": ["n", 64, 64]})
    manifest = build(tmp_path, model, {"x": rng.normal(size=(24, 64, 64)).astype(np.float32)})
    assert [unit.unit for unit in manifest.units] == ["y"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision": "w8"}, "choose from: fp32, fp16, int8"),
        ({"target": "orin"}, "choose from: ort-cpu, tensorrt, tensorrt-rtx"),
        ({"gate": 1.05}, "gate 1.05 is a relative error .* between 0 and 1"),
        ({"threshold": 0.0}, "threshold 0 is a relative error"),
        ({"compile_options": RTX}, "leave --compute-capability out"),
        ({"target": "tensorrt-rtx"}, "--compute-capability"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_any_work(
    options: dict[str, object], text: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=text):
        build_onnx_model(tmp_path / "none.onnx", tmp_path / "out", inputs=tmp_path / "none.npz", **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_build_without_samples_says_how_to_give_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"give them with --inputs SAMPLES\.npz"):
        build_onnx_model(tmp_path / "none.onnx", tmp_path / "out", inputs=None)
