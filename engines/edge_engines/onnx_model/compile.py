"""Compile a written graph for TensorRT or TensorRT-RTX, with one profile that spans the shapes of the samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_engines.compile.frames import Compiled, CompileRequest
from edge_engines.compile.memory import needed_memory
from edge_engines.compile.process import ask_compiler
from edge_engines.compile.profiles import axis_range
from edge_engines.compile.tensorrt import LAYERS_NAME, PLAN_NAME, Compiler
from edge_engines.graph.builder import DATA_NAME, GRAPH_NAME
from edge_engines.onnx_model.manifest import PlanFacts
from edge_engines.onnx_model.samples import Samples
from edge_engines.onnx_model.source import Source, Value
from edge_engines.progress import Progress
from edge_runtime.errors import BuildError
from edge_runtime.manifest import AxisRange, FileEntry, IoTensor, ProfileFacts, digest_file
from edge_runtime.memory import fits

BATCH_MOST = 8  # of an axis that joins samples; the runtime's own limit of two is for text generation


def check_memory(source: Source, available: int) -> None:
    """Raise BuildError when `available` bytes are too little to compile a model, before any work is done."""
    fit = fits(needed_memory(source.file_bytes), available)
    if not fit.is_enough:
        raise BuildError(
            fit.refusal(f"compiling {source.path.name}"),
            remedy="stop other programs, add memory, or build on a larger machine",
        )


def io_tensors(values: Sequence[Value]) -> list[IoTensor]:
    """Return inputs or outputs as the manifest names them; an axis without a name is called after its place."""
    return [
        IoTensor(value.name, [_axis_name(value, i) if d is None else d for i, d in enumerate(value.shape)], value.dtype)  # type: ignore[arg-type]  # checked when the model was read
        for value in values
    ]


def axis_ranges(source: Source, samples: Samples, *, joins: bool) -> dict[str, AxisRange]:
    """Return the range of each axis of the inputs that varies, over all samples.

    With `joins`, first axes join samples and go up to BATCH_MOST.
    """
    seen: dict[str, list[int]] = {}
    for value in source.inputs:
        for i, axis in enumerate(value.shape):
            if isinstance(axis, int):
                continue
            sizes = {shape[i] for shape in samples.shapes(value.name)}
            seen.setdefault(axis or _axis_name(value, i), []).extend(
                {*sizes, *({BATCH_MOST} if joins and i == 0 else ())}
            )
    return {
        name: axis_range(name, min(sizes), sorted(sizes)[(len(sizes) - 1) // 2], max(sizes))
        for name, sizes in seen.items()
    }


def compile_onnx(
    folder: Path,
    inputs: Sequence[IoTensor],
    axes: dict[str, AxisRange],
    compiler: Compiler,
    progress: Progress,
) -> PlanFacts:
    """Replace the graph in `folder` by a plan made of it. Raises BuildError."""
    source = [_entry(folder / name) for name in (GRAPH_NAME, DATA_NAME)]
    progress.note(f"compiling for compute capability {', '.join(compiler.compute_capabilities)}")
    done = ask_compiler(_request(folder, inputs, axes, compiler), progress, command=compiler.command)
    assert isinstance(done, Compiled)
    plan = folder / PLAN_NAME
    size = plan.stat().st_size if plan.exists() else 0
    if size == 0 or size != done.plan_bytes:
        raise BuildError(
            f"the compiler reported a plan of {done.plan_bytes} bytes, {size} are there",
            remedy="see whether the disk is full",
        )
    for entry in source:
        (folder / entry.name).unlink()
    return PlanFacts(
        module=compiler.module.module,
        version=compiler.module.version,
        library=compiler.module.library,
        compute_capabilities=compiler.compute_capabilities,
        axes=axes,
        inspection=done.inspection,
        source=source,
        seconds=done.seconds,
        peak_memory_bytes=done.peak_memory_bytes,
    )


def _request(
    folder: Path, inputs: Sequence[IoTensor], axes: dict[str, AxisRange], compiler: Compiler
) -> CompileRequest:
    options, cache = compiler.options, compiler.timing_cache
    return CompileRequest(
        target=compiler.target,
        folder=str(folder.absolute()),
        graph=GRAPH_NAME,
        plan=PLAN_NAME,
        layers=LAYERS_NAME,
        inputs=list(inputs),
        profiles=[ProfileFacts("any", axes)],
        compute_capabilities=list(options.compute_capabilities),
        optimization_level=options.optimization_level,
        workspace_bytes=options.workspace_bytes,
        timing_cache=str(cache.absolute()) if cache else None,
    )


def _axis_name(value: Value, axis: int) -> str:
    return f"{value.name}.{axis}"


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.name, path.stat().st_size, digest_file(path))
