"""Build a plan from a checked ONNX file: parse, configure, build, write. Runs in the compiler process.

Every name of TensorRT used here exists in 10.3, 10.16 and 11, save those reached only for TensorRT-RTX.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_engines.compile.frames import CompileRequest
from edge_engines.compile.profiles import shapes_of
from edge_engines.compile.watch import Watch, progress_monitor, trt_logger
from edge_runtime.errors import BuildError


def build_plan(trt: Any, request: CompileRequest, watch: Watch) -> tuple[Path, str]:
    """Write the plan that `request` asks for; return its path and what became of the timing cache.

    Raises BuildError with TensorRT's own words when it can't parse or build the graph.
    """
    folder = Path(request.folder)
    logger = trt_logger(trt, watch)
    builder = _start(trt, logger, watch)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    _parse(trt.OnnxParser(network, logger), folder / request.graph, watch)
    config = builder.create_builder_config()
    _configure(trt, config, request)
    config.progress_monitor = progress_monitor(trt, watch)
    for profile in request.profiles:
        limits = builder.create_optimization_profile()
        for value in request.inputs:
            limits.set_shape(value.name, *shapes_of(value.shape, profile))
        config.add_optimization_profile(limits)
    cache = _load_timing_cache(config, request.timing_cache)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BuildError(f"TensorRT can't build this graph: {watch.last_error}", remedy="nothing was written")
    return _write(folder / request.plan, plan), _keep_timing_cache(config, request.timing_cache, cache)


def _start(trt: Any, logger: Any, watch: Watch) -> Any:
    try:
        return trt.Builder(logger)
    except TypeError as error:  # how the binding says that the library returned null
        raise BuildError(
            f"TensorRT does not start: {watch.last_error or error}", remedy="see whether the driver fits this TensorRT"
        ) from error


def _parse(parser: Any, graph: Path, watch: Watch) -> None:
    """Parse by absolute path: weights are looked for beside the file, from wherever we run (case C26)."""
    watch.begin("parsing the graph", None)
    if parser.parse_from_file(str(graph)):
        return
    errors = [parser.get_error(i).desc() for i in range(parser.num_errors)] or [watch.last_error]
    raise BuildError(
        f"TensorRT does not know a part of this graph: {errors[0]}", remedy="nothing was written; please report this"
    )


def _configure(trt: Any, config: Any, request: CompileRequest) -> None:
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # the inspector then names layers and types
    if request.optimization_level is not None:
        config.builder_optimization_level = request.optimization_level
    if request.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, request.workspace_bytes)
    if request.target == "tensorrt-rtx":
        config.num_compute_capabilities = len(request.compute_capabilities)
        for i, capability in enumerate(request.compute_capabilities):
            name = "SM" + capability.replace(".", "")
            config.set_compute_capability(getattr(trt.ComputeCapability, name), i)


def _load_timing_cache(config: Any, file: str | None) -> str:
    """Give TensorRT what earlier builds measured; a cache it refuses costs time, never the build."""
    if file is None:
        return "none"
    path = Path(file)
    known = path.read_bytes() if path.is_file() else b""
    cache = config.create_timing_cache(known)
    if cache is not None and config.set_timing_cache(cache, False):
        return "used" if known else "begun"
    config.set_timing_cache(config.create_timing_cache(b""), False)
    return "refused, begun anew"


def _keep_timing_cache(config: Any, file: str | None, state: str) -> str:
    if file is None:
        return state
    try:
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, config.get_timing_cache().serialize())
    except OSError as error:
        return f"{state}, not kept: {error.strerror}"
    return state


def _write(path: Path, content: Any) -> Path:
    """Write a TensorRT buffer under a temporary name and rename it."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as stream:
        stream.write(memoryview(content))
    part.replace(path)
    return path
