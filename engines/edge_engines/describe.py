"""Describe a written engine: its manifest, from what was read, written and measured."""

from __future__ import annotations

import math
import platform
import time
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import onnx

from edge_engines.checkpoint.open import Checkpoint
from edge_engines.checkpoint.spec import ModelSpec, tensor_shapes, unit_inputs
from edge_engines.graph.builder import GRAPH_NAME, PARTS, GraphOptions, WrittenGraph
from edge_engines.graph.linear import block_size
from edge_engines.graph.writer import ONNX_TYPES
from edge_runtime import __version__
from edge_runtime.manifest import (
    FORMAT,
    BuildFacts,
    FileEntry,
    Geometry,
    IoTensor,
    Manifest,
    ModelFacts,
    UnitPrecision,
    digest_file,
)

_DTYPES: dict[int, Any] = {number: name for name, number in ONNX_TYPES.items()}
_LIBRARIES = ("onnx", "onnxruntime", "numpy", "safetensors", "gguf", "tokenizers")


def describe_engine(
    checkpoint: Checkpoint,
    graph: WrittenGraph,
    options: GraphOptions,
    *,
    name: str,
    target: Literal["ort-cpu"],
    max_batch: int,
    units: list[UnitPrecision],
    build: BuildFacts,
) -> Manifest:
    """Return the manifest of an engine that is not verified yet and whose files are not final."""
    spec = graph.spec
    return Manifest(
        format=FORMAT,
        target=target,
        lowering=options.lowering,  # type: ignore[arg-type]  # checked when the options were made
        precision=options.precision,
        kv_dtype=options.kv_dtype,  # type: ignore[arg-type]
        geometry=Geometry(
            layers=len(spec.layers),
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            vocab=spec.vocab,
            capacity=options.capacity,
            max_batch=max_batch,
        ),
        model=describe_model(checkpoint, name),
        graph=GRAPH_NAME,
        inputs=[_tensor(value) for value in graph.model.graph.input],
        outputs=[_tensor(value) for value in graph.model.graph.output],
        units=units,
        weight_bytes=graph.data_bytes,
        build=build,
    )


def describe_model(checkpoint: Checkpoint, name: str) -> ModelFacts:
    """Return where the model comes from and what it is, in the checkpoint's own sizes."""
    spec = checkpoint.spec
    windows = {layer.window for layer in spec.layers}
    return ModelFacts(
        name=name,
        family=spec.family,
        source=checkpoint.source.name,
        checkpoint_sha256=checkpoint.digest,
        hidden=spec.hidden,
        ffn=spec.ffn,
        heads=spec.num_heads,
        parameters=num_parameters(spec),
        rotary=[{"base": r.base, "kind": r.kind, "dims": float(r.dim)} for r in spec.rotaries],
        window=min((w for w in windows if w is not None), default=None),
        known_ids=checkpoint.text.known_ids if checkpoint.text else spec.vocab,
        has_text=checkpoint.text is not None,
    )


def unit_precisions(spec: ModelSpec, options: GraphOptions) -> list[UnitPrecision]:
    """Return the precision of each unit where one is asked for by name, and why."""
    float_name = "fp16" if options.compute == "float16" else "fp32"
    widths = unit_inputs(spec)

    def choose(unit: str) -> UnitPrecision:
        if options.precision != "w8":
            return UnitPrecision(unit, float_name, f"--precision {options.precision}")
        width = widths["head" if unit == "embed" else unit.rpartition(".")[2]]
        size = block_size(width)
        if size is None:
            return UnitPrecision(unit, float_name, f"no block size divides its {width} inputs")
        return UnitPrecision(unit, "w8", f"--precision w8, blocks of {size}")

    body = [f"layers.{i}.{kind}" for i in range(len(spec.layers)) for kind in PARTS]
    return [choose(unit) for unit in ("embed", *body, "head")]


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of weights; a tied table counts once."""
    return sum(math.prod(shape) for _, shape in tensor_shapes(spec))


def list_files(folder: Path) -> list[FileEntry]:
    """Return every file of a finished folder with size and digest."""
    return [FileEntry(path.name, path.stat().st_size, digest_file(path)) for path in sorted(folder.iterdir())]


def build_facts(options: dict[str, str], started: float) -> BuildFacts:
    """Return tool, libraries, options and cost so far of a build that began at monotonic time `started`."""
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    for library in _LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            continue  # ONNX Runtime may come as onnxruntime-gpu
    return BuildFacts(
        tool_version=__version__,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - started, 3),
        peak_memory_bytes=peak_memory(),
        options=options,
        versions=versions,
    )


def peak_memory() -> int:
    """Return the most bytes this process has held: `VmHWM`, since getrusage on Linux counts the parent's too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _tensor(value: onnx.ValueInfoProto) -> IoTensor:
    kind = value.type.tensor_type
    shape: list[int | str] = [d.dim_param or int(d.dim_value) for d in kind.shape.dim]
    return IoTensor(value.name, shape, _DTYPES[kind.elem_type])
