"""Read a user's ONNX file and say at once why it can't be built, before any long step.

Weights are not loaded: an external data file is only looked for (case C26), so size doesn't matter.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # comes with onnx
from onnx import TensorProto

from edge_engines.graph.writer import ONNX_TYPES
from edge_engines.qdq.places import ONNX_DOMAINS, PRODUCTS
from edge_runtime.errors import CheckpointError
from edge_runtime.manifest import digest_file

OLDEST_OPSET = 7  # what ONNX Runtime promises to read
NEWEST_FOR_TENSORRT = 24  # the newest that was compiled
_DOMAINS = {"ort-cpu": (*ONNX_DOMAINS, "ai.onnx.ml", "com.microsoft")}
_QUANTISED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger")
_NAMES: dict[int, str] = {number: name for name, number in ONNX_TYPES.items()}
UNKNOWN_AXES = (0, -1, "?", "")  # what exporters write for an axis that varies, whichever it is
_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(frozen=True, slots=True)
class Value:
    """An input or output of the model; None is an axis without a name that varies."""

    name: str
    dtype: str  # numpy's name
    shape: tuple[int | str | None, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A model that was read and found fit."""

    path: Path
    model: onnx.ModelProto  # values of external tensors are not in it
    opset: int
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    file_bytes: int  # with external data
    sha256: str  # of the .onnx file and, in order of name, its data files


def read_source(path: Path, *, target: str, precision: str) -> Source:
    """Return what the file is. Raises CheckpointError naming the file, what was found and what is expected."""
    model = _parse(path)
    opset = _opset(path, model, target)
    files = _data_files(path, model)
    _check_operators(path, model, target, precision)
    _check(path)
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(_value(path, v) for v in model.graph.input if v.name not in constants)  # IR 3 lists constants too
    outputs = tuple(_value(path, v) for v in model.graph.output)
    if not inputs or not outputs:
        raise CheckpointError(
            f"{path}: {len(inputs)} inputs and {len(outputs)} outputs, at least one of each is needed"
        )
    digests = "".join(digest_file(file) for file in (path, *files))
    sizes = sum(file.stat().st_size for file in (path, *files))
    return Source(path, model, opset, inputs, outputs, sizes, digests[:64] if not files else _joint(digests))


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes of a graph and of the graphs inside its If, Loop and Scan nodes."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in ([attribute.g] if attribute.HasField("g") else []) + list(attribute.graphs):
                yield from all_nodes(inner)


def _parse(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load_model(path, load_external_data=False)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}", remedy="give the path of an .onnx file") from error
    except DecodeError as error:
        raise CheckpointError(
            f"{path}: not an ONNX file, or a damaged one", remedy="export or copy it again"
        ) from error
    if not model.graph.node:
        raise CheckpointError(f"{path}: holds no graph", remedy="export or copy it again")
    return model


def _opset(path: Path, model: onnx.ModelProto, target: str) -> int:
    found = max((o.version for o in model.opset_import if o.domain in ONNX_DOMAINS), default=0)
    newest = onnx.defs.onnx_opset_version() if target == "ort-cpu" else NEWEST_FOR_TENSORRT
    if not OLDEST_OPSET <= found <= newest:
        raise CheckpointError(
            f"{path}: opset {found}, target {target} takes {OLDEST_OPSET} to {newest}",
            remedy="export it again with opset 17 to 21",
        )
    return found


def _data_files(path: Path, model: onnx.ModelProto) -> list[Path]:
    """Return the files with external weights, each inside the model's folder and long enough (case C26)."""
    folder, files = path.parent.resolve(), set()
    for tensor in model.graph.initializer:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        said = {entry.key: entry.value for entry in tensor.external_data}
        file = (folder / said.get("location", "")).resolve()
        if not file.is_relative_to(folder) or not file.is_file():
            raise CheckpointError(
                f"{path}: the weights {tensor.name!r} are said to be in {said.get('location', 'no file')!r}, which is "
                f"{'not there' if file.is_relative_to(folder) else 'outside its folder'}",
                remedy=f"put the file beside the model, in {folder}",
            )
        end = int(said.get("offset", 0)) + int(said.get("length", 0))
        if file.stat().st_size < end:
            raise CheckpointError(
                f"{file}: {file.stat().st_size} bytes, the weights {tensor.name!r} end at {end}", remedy="copy it again"
            )
        files.add(file)
    return sorted(files)


def _check_operators(path: Path, model: onnx.ModelProto, target: str, precision: str) -> None:
    known = {*_DOMAINS.get(target, ONNX_DOMAINS), *(function.domain for function in model.functions)}
    nodes = list(all_nodes(model.graph))
    foreign = Counter(f"{n.domain}.{n.op_type}" for n in nodes if n.domain not in known)
    if foreign:
        raise CheckpointError(
            f"{path}: target {target} has no operator {_list(foreign)}",
            remedy="export the model with ONNX's own operators",
        )
    quantised = Counter(n.op_type for n in nodes if n.op_type in _QUANTISED or n.op_type.startswith("QLinear"))
    if quantised and precision != "fp32":
        raise CheckpointError(
            f"{path}: is quantised already ({_list(quantised)})",
            remedy="give the float model it was made from, or take it as it is with --precision fp32",
        )
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    halves = Counter(n.op_type for n in nodes if n.op_type in PRODUCTS and kinds.get(n.input[1]) in _HALF)
    if halves and precision == "int8":
        raise CheckpointError(
            f"{path}: its weights are 16-bit floats ({_list(halves)})",
            remedy="give the FP32 model: ranges and errors are measured in FP32",
        )


def _check(path: Path) -> None:
    try:
        onnx.checker.check_model(str(path))  # by path: also takes more than 2 GB
    except (onnx.checker.ValidationError, ValueError, RuntimeError) as error:
        first = next(iter(str(error).strip().splitlines()), "no reason given")
        raise CheckpointError(f"{path}: not a valid ONNX model: {first}", remedy="export it again") from error


def _value(path: Path, value: onnx.ValueInfoProto) -> Value:
    kind = value.type.tensor_type
    if kind.elem_type not in _NAMES:
        found = TensorProto.DataType.Name(kind.elem_type) if kind.elem_type else value.type.WhichOneof("value")
        raise CheckpointError(
            f"{path}: {value.name!r} is of type {found}, inputs and outputs are one of {', '.join(ONNX_TYPES)}",
            remedy="export the model without the part before or behind it",
        )
    shape = tuple(d.dim_param or (d.dim_value if d.HasField("dim_value") else None) for d in kind.shape.dim)
    return Value(value.name, _NAMES[kind.elem_type], tuple(None if d in UNKNOWN_AXES else d for d in shape))


def _joint(digests: str) -> str:
    return hashlib.sha256(digests.encode()).hexdigest()


def _list(counts: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counts.most_common(4))
