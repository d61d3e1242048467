"""Bring a model into the plain form that the later steps work on: opset, folded constants, weights in one file."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import version_converter

from edge_engines.onnx_model.session import write_simplified
from edge_engines.onnx_model.source import UNKNOWN_AXES, Source, all_nodes
from edge_engines.progress import Progress
from edge_engines.qdq.places import ONNX_DOMAINS
from edge_runtime.errors import BuildError

PLAIN_NAME, PLAIN_DATA = "plain.onnx", "plain.onnx.data"
_CONVERTED = "converted.onnx"
PER_CHANNEL_OPSET = 13  # the first whose DequantizeLinear takes one scale per channel
HALF_OPSET = 19  # the first whose QuantizeLinear takes FP16
_LARGEST_PROTOBUF = 2**31 - 1  # bytes; conversion between opsets works on one message


def write_plain(source: Source, work: Path, *, opset: int, progress: Progress) -> onnx.ModelProto:
    """Write `work`/plain.onnx and its data file, and return the graph without the values of large constants.

    A model of an older opset than `opset` is converted; when that fails, to the least that INT8 needs. Raises
    BuildError when neither works.
    """
    file = source.path if source.opset >= opset else _convert(source, work / _CONVERTED, opset, progress)
    target = work / PLAIN_NAME
    write_simplified(file, target, PLAIN_DATA, simplify=True)
    model = onnx.load_model(target, load_external_data=False)
    if _foreign(model) - _foreign(source.model):  # a fused operator that only ONNX Runtime knows
        write_simplified(file, target, PLAIN_DATA, simplify=False)
        model = onnx.load_model(target, load_external_data=False)
    _tidy(model)
    onnx.save_model(model, target)
    (work / _CONVERTED).unlink(missing_ok=True)
    return _with_types(model, target)


def opset_of(model: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operators."""
    return max(int(o.version) for o in model.opset_import if o.domain in ONNX_DOMAINS)


def _convert(source: Source, file: Path, opset: int, progress: Progress) -> Path:
    """Write the model with a newer opset; return which file to go on with."""
    complaints = []
    for wanted in sorted({opset, PER_CHANNEL_OPSET}, reverse=True):
        if wanted <= source.opset:
            break
        try:
            if source.file_bytes > _LARGEST_PROTOBUF:
                raise ValueError("more than 2 GB of weights")
            converted = version_converter.convert_version(onnx.load_model(source.path), wanted)
            onnx.save_model(converted, file)
        except (RuntimeError, ValueError, AssertionError, onnx.checker.ValidationError) as error:
            complaints.append(next(iter(str(error).strip().splitlines()), type(error).__name__))
            continue
        progress.note(f"opset {source.opset} was converted to {wanted}")
        return file
    if source.opset >= PER_CHANNEL_OPSET:
        progress.note(f"opset {source.opset} can't be converted to {opset} and is kept: {complaints[0]}")
        return source.path
    raise BuildError(
        f"{source.path}: opset {source.opset} can't be converted to {PER_CHANNEL_OPSET}, which INT8 needs: "
        f"{complaints[-1]}",
        remedy=f"export it again with opset {HALF_OPSET} to 21",
    )


def _foreign(model: onnx.ModelProto) -> set[tuple[str, str]]:
    return {(n.domain, n.op_type) for n in all_nodes(model.graph) if n.domain not in ONNX_DOMAINS}


def _tidy(model: onnx.ModelProto) -> None:
    """Leave out operator sets that nothing uses, name every node, and unname axes whose name says nothing.

    TensorRT holds axes of one name to be equal, and some exporters call every axis that varies "?".
    """
    for value in (*model.graph.input, *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param in UNKNOWN_AXES:
                axis.ClearField("value")
    used = {n.domain for n in all_nodes(model.graph)} | {""}
    kept = [o for o in model.opset_import if o.domain in used]
    model.ClearField("opset_import")
    model.opset_import.extend(kept)
    taken: set[str] = set()
    for node in model.graph.node:
        first = next((name for name in node.output if name), node.op_type)
        node.name = node.name if node.name and node.name not in taken else first
        taken.add(node.name)


def _with_types(model: onnx.ModelProto, file: Path) -> onnx.ModelProto:
    """Add the types and shapes of values, as far as they can be inferred."""
    try:
        return onnx.shape_inference.infer_shapes(model)
    except (onnx.shape_inference.InferenceError, RuntimeError) as error:
        first = next(iter(str(error).strip().splitlines()), "no reason given")
        raise BuildError(f"{file.name}: shapes don't fit: {first}", remedy="export the model again") from error
