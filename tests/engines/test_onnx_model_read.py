"""Reading a user's model and samples: what is taken, and what is refused in one line that says what to do."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_engines.onnx_model.baseline import may_batch
from edge_engines.onnx_model.samples import Samples, open_samples
from edge_engines.onnx_model.session import Session
from edge_engines.onnx_model.source import Source, Value, read_source
from edge_runtime.errors import CheckpointError, EdgeError, UsageError
from engines.onnx_nets import Net, conv_net, images, random_encoder, sentences


def read(path: Path, model: onnx.ModelProto, *, target: str = "ort-cpu", precision: str = "int8") -> Source:
    onnx.save_model(model, path / "model.onnx")
    return read_source(path / "model.onnx", target=target, precision=precision)


def refused(call: Callable[[], object], kind: type[EdgeError]) -> str:
    with pytest.raises(kind) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_inputs_and_outputs_are_named_with_their_varying_axes(tmp_path: Path) -> None:
    source = read(tmp_path, conv_net())
    assert source.inputs == (Value("image", "float32", ("n", 3, 16, 16)),)
    assert source.outputs == (Value("logits", "float32", ("n", 32)),)
    assert source.opset == 17
    assert source.file_bytes == (tmp_path / "model.onnx").stat().st_size


def test_constants_that_an_old_exporter_lists_as_inputs_are_not_asked_for(tmp_path: Path) -> None:
    model = conv_net()
    shape = [16, 16, 3, 3]
    model.graph.input.append(helper.make_tensor_value_info("point.weight", TensorProto.FLOAT, shape))
    assert [value.name for value in read(tmp_path, model).inputs] == ["image"]


def test_external_data_is_part_of_the_model_and_changes_its_digest(tmp_path: Path) -> None:
    digests = []
    for seed in (0, 1):
        onnx.save_model(
            conv_net(seed), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0
        )
        source = read_source(tmp_path / "m.onnx", target="ort-cpu", precision="int8")
        assert source.file_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
        digests.append(source.sha256)
        (tmp_path / "w.bin").unlink()
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda folder: (folder / "w.bin").unlink(), "said to be in 'w.bin', which is not there; put the file beside"),
        (lambda folder: (folder / "w.bin").write_bytes(b"short"), "w.bin: 5 bytes, the weights .* end at"),
    ],
)
def test_c26_missing_or_short_external_data_is_named(
    damage: Callable[[Path], object], text: str, tmp_path: Path
) -> None:
    onnx.save_model(conv_net(), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=text):
        read_source(tmp_path / "m.onnx", target="ort-cpu", precision="int8")


def test_c26_external_data_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(10_000))
    model = conv_net()
    tensor = next(t for t in model.graph.initializer if t.name == "point.weight")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../w.bin")
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    said = refused(lambda: read_source(folder / "m.onnx", target="ort-cpu", precision="int8"), CheckpointError)
    assert "'../w.bin', which is outside its folder" in said


def half_weights(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        if tensor.name == "fc1.weight":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))


def quantised(model: onnx.ModelProto) -> None:
    node = helper.make_node("DynamicQuantizeLinear", ["flat"], ["a", "b", "c"], name="dyn")
    model.graph.node.append(node)


def custom(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Fancy", ["flat"], ["fancy"], name="fancy", domain="acme.ops"))
    model.opset_import.append(helper.make_opsetid("acme.ops", 1))


def text_input(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("label", TensorProto.STRING, ["n"]))


def broken_link(model: onnx.ModelProto) -> None:
    model.graph.node[3].input[0] = "nowhere"


def opset(version: int) -> Callable[[onnx.ModelProto], None]:
    def change(model: onnx.ModelProto) -> None:
        model.opset_import[0].version = version

    return change


@pytest.mark.parametrize(
    ("damage", "target", "text"),
    [
        (half_weights, "ort-cpu", "its weights are 16-bit floats (1 x Gemm); give the FP32 model"),
        (quantised, "ort-cpu", "is quantised already (1 x DynamicQuantizeLinear); give the float model"),
        (custom, "ort-cpu", "target ort-cpu has no operator 1 x acme.ops.Fancy"),
        (custom, "tensorrt-rtx", "target tensorrt-rtx has no operator 1 x acme.ops.Fancy"),
        (text_input, "ort-cpu", "'label' is of type STRING, inputs and outputs are one of float32, float16"),
        (broken_link, "ort-cpu", "not a valid ONNX model: "),
        (opset(5), "ort-cpu", "opset 5, target ort-cpu takes 7 to "),
        (opset(99), "ort-cpu", "opset 99, target ort-cpu takes 7 to "),
        (opset(25), "tensorrt-rtx", "opset 25, target tensorrt-rtx takes 7 to 24; export it again"),
    ],
)
def test_a_model_that_can_not_be_built_is_refused_with_the_reason(
    damage: Callable[[onnx.ModelProto], None], target: str, text: str, tmp_path: Path
) -> None:
    model = conv_net()
    damage(model)
    said = refused(lambda: read(tmp_path, model, target=target), CheckpointError)
    assert said.startswith(f"{tmp_path / 'model.onnx'}: ")
    assert text in said


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_that_is_no_model_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    said = refused(lambda: read_source(tmp_path / "model.onnx", target="ort-cpu", precision="int8"), CheckpointError)
    assert "not an ONNX file" in said or "holds no graph" in said


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    said = refused(lambda: read_source(tmp_path / "no.onnx", target="ort-cpu", precision="int8"), CheckpointError)
    assert "no.onnx: No such file" in said


def test_a_quantised_model_is_taken_as_it_is_in_fp32(tmp_path: Path) -> None:
    model = conv_net()
    quantised(model)
    assert read(tmp_path, model, precision="fp32").opset == 17


def samples_of(tmp_path: Path, model: onnx.ModelProto, arrays: dict[str, np.ndarray]) -> Samples:
    np.savez(tmp_path / "s.npz", **arrays)
    folder = tmp_path / "unpacked"
    folder.mkdir(exist_ok=True)
    return open_samples(tmp_path / "s.npz", read(tmp_path, model), folder)


def test_samples_are_dealt_into_three_disjoint_sets(tmp_path: Path) -> None:
    split = samples_of(tmp_path, random_encoder(), sentences(64)).split()
    sets = [set(split.calibration), set(split.ranking), set(split.gate)]
    assert [len(s) for s in sets] == [24, 8, 32]
    assert set.union(*sets) == set(range(64))


def test_repeated_samples_are_left_out_and_too_few_are_refused(tmp_path: Path) -> None:
    twice = {name: np.concatenate([values, values]) for name, values in sentences(20).items()}
    assert samples_of(tmp_path, random_encoder(), twice).split().num_repeated == 20
    few = {name: np.concatenate([values, values]) for name, values in sentences(8).items()}
    said = refused(lambda: samples_of(tmp_path, random_encoder(), few).split(), UsageError)
    assert "16 samples, 8 of them different, at least 16 are needed" in said


def test_samples_of_different_shapes_come_one_by_one(tmp_path: Path) -> None:
    arrays = {}
    for i in range(16):
        for name, values in sentences(1, seed=i, length=5 + i % 3).items():
            arrays[f"{name}/{i:03}"] = values
    samples = samples_of(tmp_path, random_encoder(), arrays).batched(8)
    batches = list(samples.batches(range(16)))
    assert sum(batch.count for batch in batches) == 16
    assert samples.shapes("input_ids") == {(1, 5), (1, 6), (1, 7)}
    assert all(batch.feeds["input_ids"].shape == (batch.count, batch.feeds["input_ids"].shape[1]) for batch in batches)


def test_neighbours_of_one_shape_are_joined(tmp_path: Path) -> None:
    samples = samples_of(tmp_path, conv_net(), {"image": images(20)}).batched(8)
    assert [batch.feeds["image"].shape[0] for batch in samples.batches(range(20))] == [8, 8, 4]


def test_one_more_axis_in_front_counts_the_samples(tmp_path: Path) -> None:
    samples = samples_of(tmp_path, conv_net(), {"image": images(16)[:, None]})
    assert samples.count == 16
    assert samples.shapes("image") == {(1, 3, 16, 16)}


def test_a_fixed_batch_takes_as_many_samples_at_once(tmp_path: Path) -> None:
    samples = samples_of(tmp_path, conv_net(batch=4), {"image": images(34)})
    assert samples.count == 8
    assert samples.shapes("image") == {(4, 3, 16, 16)}


def test_padding_is_known_from_an_input_called_attention_mask(tmp_path: Path) -> None:
    arrays = sentences(16)
    batch = next(samples_of(tmp_path, random_encoder(), arrays).batched(4).batches(range(4)))
    assert batch.valid is not None
    assert np.array_equal(batch.valid, arrays["attention_mask"][:4] == 1)


def test_samples_are_mapped_not_loaded(tmp_path: Path) -> None:
    samples = samples_of(tmp_path, conv_net(), {"image": images(16)})
    assert isinstance(samples.parts["image"][0], np.memmap)


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({}, "no array 'image', which is an input of the model; it holds none; save it as image="),
        ({"picture": images(16)}, "no array 'image', .* it holds picture"),
        (
            {"image": images(16).astype(np.float64)},
            r"'image' is float64, the model takes float32; .*astype\(",
        ),
        ({"image": images(16, size=8)}, r"has shape \[1, 3, 8, 8\], the model takes \['n', 3, 16, 16\]"),
        ({"image": images(16)[0, 0]}, r"has shape \[1, 16\], the model takes"),
        ({"image": np.array([{"a": 1}], object)}, "image.npy is not an array of numbers"),
    ],
)
def test_samples_that_do_not_fit_are_refused_with_what_was_found(
    arrays: dict[str, np.ndarray], text: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=text) as error:
        samples_of(tmp_path, conv_net(), arrays)
    assert str(error.value).startswith(f"{tmp_path / 's.npz'}: ")
    assert "\n" not in str(error.value)


def test_inputs_with_different_numbers_of_samples_are_refused(tmp_path: Path) -> None:
    arrays = sentences(16)
    arrays["input_ids"] = arrays["input_ids"][:12]
    said = refused(lambda: samples_of(tmp_path, random_encoder(), arrays), UsageError)
    assert "different numbers of samples: {'input_ids': 12, 'attention_mask': 16, 'token_type_ids': 16}" in said


@pytest.mark.parametrize(("name", "content"), [("absent.npz", None), ("text.npz", b"image: 1, 2, 3"), ("cut.npz", b"")])
def test_a_file_that_is_no_npz_is_refused(name: str, content: bytes | None, tmp_path: Path) -> None:
    source = read(tmp_path, conv_net())
    if content is not None:
        (tmp_path / name).write_bytes(content)
    said = refused(lambda: open_samples(tmp_path / name, source, tmp_path), UsageError)
    assert name in said


def test_a_truncated_npz_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", image=images(16))
    content = (tmp_path / "s.npz").read_bytes()
    (tmp_path / "s.npz").write_bytes(content[: len(content) // 2])
    source = read(tmp_path, conv_net())
    assert "s.npz: not an .npz file, or a damaged one" in refused(
        lambda: open_samples(tmp_path / "s.npz", source, tmp_path), UsageError
    )


def test_names_inside_an_archive_lead_nowhere_else(tmp_path: Path) -> None:
    stream = io.BytesIO()
    np.save(stream, images(16))
    with zipfile.ZipFile(tmp_path / "s.npz", "w") as archive:
        archive.writestr("../image.npy", stream.getvalue())
        archive.writestr("image.npy", stream.getvalue())
    folder = tmp_path / "deep/unpacked"
    folder.mkdir(parents=True)
    open_samples(tmp_path / "s.npz", read(tmp_path, conv_net()), folder)
    assert not (tmp_path / "deep/image.npy").exists()


def test_samples_are_fed_together_only_where_that_changes_nothing(tmp_path: Path) -> None:
    net = Net()
    net.op("ReduceMean", ["x"], "mean", axes=[0], keepdims=1)
    net.op("Sub", ["x", "mean"], "y")  # what one sample gives depends on its neighbours
    mixing = net.model({"x": (TensorProto.FLOAT, ["n", 8])}, {"y": ["n", 8]})
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    samples = samples_of(tmp_path, mixing, {"x": x})
    assert not may_batch(Session(tmp_path / "model.onnx"), samples, range(16))
    samples = samples_of(tmp_path, conv_net(), {"image": images(16)})
    assert may_batch(Session(tmp_path / "model.onnx"), samples, range(16))
