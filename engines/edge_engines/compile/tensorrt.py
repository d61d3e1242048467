"""Compile an engine folder's verified graph for TensorRT or TensorRT-RTX: what comes before, in and after the compiler.

FP16, or INT8 that the graph holds as Q/DQ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import onnx

from edge_engines.compile.frames import Compiled, CompileRequest, ModuleFacts, Probed, ProbeRequest
from edge_engines.compile.int8_layers import check_int8_layers, int8_bytes, read_int8_layers
from edge_engines.compile.kept import keep_plan, plan_key, take_plan
from edge_engines.compile.module import MODULES, takes_native
from edge_engines.compile.process import COMPILER, ask_compiler
from edge_engines.compile.profiles import profiles_for
from edge_engines.graph.builder import DATA_NAME, GRAPH_NAME
from edge_engines.progress import NoProgress, Progress
from edge_runtime.errors import BuildError, UsageError
from edge_runtime.manifest import CompiledFacts, FileEntry, Manifest, ProfileFacts, digest_file

PLAN_NAME, LAYERS_NAME = "model.plan", "layers.json"
TARGETS = tuple(MODULES)
PRECISIONS = ("fp16", "int8", "auto")
LEVELS = range(6)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """How to compile; every default is TensorRT's own."""

    compute_capabilities: tuple[str, ...] = ()  # "8.6"; TensorRT-RTX only, which needs at least one
    optimization_level: int | None = None  # 0 to 5: quick build to quick engine
    workspace_bytes: int | None = None  # most scratch memory a kernel may ask for on the device
    timing_caches: Path | None = None  # folder of timing caches, one file per version and GPU; may be copied around
    plans: Path | None = None  # folder of plans of earlier builds; None: each is compiled anew


@dataclass(frozen=True, slots=True)
class Compiler:
    """A TensorRT that was found and takes what will be asked of it."""

    target: str
    module: ModuleFacts
    options: CompileOptions
    command: Sequence[str] = COMPILER

    @property
    def compute_capabilities(self) -> list[str]:
        """What the plan is for."""
        if self.options.compute_capabilities:
            return list(self.options.compute_capabilities)
        return [self.module.device.compute_capability] if self.module.device else []

    @property
    def timing_cache(self) -> Path | None:
        """File of the timing cache; TensorRT-RTX has none: it chooses kernels on the device."""
        if self.options.timing_caches is None or self.target == "tensorrt-rtx":
            return None
        gpus = "-".join(c.replace(".", "") for c in self.compute_capabilities)
        return self.options.timing_caches / f"{self.module.module}-{self.module.version}-sm{gpus}.timing"


def choose_lowering(compiler: Compiler, wanted: str | None) -> str:
    """Return the lowering that a compiler takes: native where it can. Raises BuildError for one that it can't take."""
    version = compiler.module.version
    can_native = takes_native(compiler.target, version)
    if wanted == "native" and not can_native:
        raise BuildError(
            f"TensorRT {version} has no operators for the native lowering, which came with 10.15",
            remedy="leave --lowering out, or use JetPack 7.2",
        )
    return wanted or ("native" if can_native else "portable")


def find_compiler(target: str, precision: str, options: CompileOptions, command: Sequence[str] = COMPILER) -> Compiler:
    """Return the compiler of a target, before any work is done.

    Raises UsageError for options that don't fit, NoDeviceError for a missing module or GPU, BuildError for a version
    that can't take the graph.
    """
    _check_options(target, precision, options)
    answer = ask_compiler(ProbeRequest(target), NoProgress(), command=command)
    assert isinstance(answer, Probed)
    compiler = Compiler(target, answer.facts, options, command)
    known = compiler.module.compute_capabilities
    for wanted in options.compute_capabilities:
        if wanted not in known:
            raise UsageError(
                f"compute capability {wanted!r} is not known to {compiler.module.module} {compiler.module.version}",
                remedy=f"choose from: {', '.join(known)}",
            )
    return compiler


def compile_graph(folder: Path, manifest: Manifest, compiler: Compiler, progress: Progress) -> Manifest:
    """Replace the graph in `folder` by a plan made of it, and return the manifest that says so.

    Graph and weights are removed: the plan holds the weights again, and a graph without its weights only looks like a
    model. Their digests stay in the manifest. Raises BuildError; files of a failed attempt are removed.
    """
    progress.note(
        f"compiling for compute capability {', '.join(compiler.compute_capabilities)} "
        f"with {compiler.module.module} {compiler.module.version}"
    )
    source = [_entry(folder / name) for name in (GRAPH_NAME, DATA_NAME)]
    profiles = profiles_for(
        manifest.geometry.capacity, manifest.geometry.max_batch, specialises=compiler.target == "tensorrt-rtx"
    )
    units = int8_bytes(onnx.load(folder / GRAPH_NAME, load_external_data=False).graph)
    try:
        done = _compile(_request(folder, manifest, compiler, profiles), source, compiler, progress)
        ran = _judge_int8(folder, units)
    except BaseException:
        for path in (*folder.glob(f"{PLAN_NAME}*"), folder / LAYERS_NAME):
            path.unlink(missing_ok=True)
        raise
    for name in (GRAPH_NAME, DATA_NAME):
        (folder / name).unlink()
    assert manifest.verify is not None
    return msgspec.structs.replace(
        manifest,
        target=compiler.target,
        graph=PLAN_NAME,
        verify=msgspec.structs.replace(manifest.verify, subject="graph"),
        compiled=_describe(compiler, profiles, source, done, ran),
    )


def _compile(request: CompileRequest, source: Sequence[FileEntry], compiler: Compiler, progress: Progress) -> Compiled:
    """Have the plan in its place: that of an earlier build from exactly this, or a new one."""
    plans, key = compiler.options.plans, plan_key(request, source, compiler.module)
    kept = take_plan(plans, key, request) if plans else None
    if kept is not None:
        progress.note("taken from an earlier build of the same graph: nothing was compiled")
        return kept
    done = ask_compiler(request, progress, command=compiler.command)
    assert isinstance(done, Compiled)
    _check_plan(Path(request.folder) / request.plan, done)
    if plans:
        keep_plan(plans, key, request, done)
    return done


def _judge_int8(folder: Path, units: Mapping[str, int]) -> str | None:
    """Say which INT8 units the plan multiplies in INT8; None where there are none, or the plan was not inspected."""
    if not units or not (folder / LAYERS_NAME).exists():
        return None
    ran = read_int8_layers((folder / LAYERS_NAME).read_text(encoding="utf-8"), units)
    check_int8_layers(ran, units)
    return ran.summary


def _check_options(target: str, precision: str, options: CompileOptions) -> None:
    if precision not in PRECISIONS:
        raise UsageError(
            f"precision {precision} can't be built for target {target}: TensorRT has no attention kernel for FP32, and "
            f"w8 is a form of ONNX Runtime",
            remedy=f"build with --precision {PRECISIONS[0]}",
        )
    if target == "tensorrt-rtx" and not options.compute_capabilities:
        raise UsageError(
            "target tensorrt-rtx is built ahead of time for named GPUs",
            remedy="name one with --compute-capability, e.g. 8.6 for the RTX 30 series or 8.9 for the RTX 40 series",
        )
    if target == "tensorrt" and options.compute_capabilities:
        raise UsageError(
            "target tensorrt is built for the GPU of this machine", remedy="leave --compute-capability out"
        )
    if options.optimization_level is not None and options.optimization_level not in LEVELS:
        raise UsageError(f"optimization level {options.optimization_level} is outside 0 to {LEVELS[-1]}")
    if options.workspace_bytes is not None and options.workspace_bytes < 1:
        raise UsageError(f"workspace of {options.workspace_bytes} bytes: at least 1 is needed")


def _request(folder: Path, manifest: Manifest, compiler: Compiler, profiles: Sequence[ProfileFacts]) -> CompileRequest:
    cache = compiler.timing_cache
    return CompileRequest(
        target=compiler.target,
        folder=str(folder.absolute()),
        graph=GRAPH_NAME,
        plan=PLAN_NAME,
        layers=LAYERS_NAME,
        inputs=manifest.inputs,
        profiles=list(profiles),
        compute_capabilities=list(compiler.options.compute_capabilities),
        optimization_level=compiler.options.optimization_level,
        workspace_bytes=compiler.options.workspace_bytes,
        timing_cache=str(cache.absolute()) if cache else None,
    )


def _check_plan(plan: Path, done: Compiled) -> None:
    size = plan.stat().st_size if plan.exists() else 0
    if size == 0 or size != done.plan_bytes:
        raise BuildError(
            f"the compiler reported success with a plan of {done.plan_bytes} bytes, {size} bytes are there",
            remedy="nothing was written; see whether the disk is full",
        )


def _describe(
    compiler: Compiler, profiles: Sequence[ProfileFacts], source: list[FileEntry], done: Compiled, ran: str | None
) -> CompiledFacts:
    options, module = compiler.options, compiler.module
    device = module.device
    words = {
        "typing": "strong",
        "optimization_level": _word(options.optimization_level),
        "workspace_bytes": _word(options.workspace_bytes),
        "timing_cache": done.timing_cache,
        "profiling_verbosity": "detailed",
    }
    return CompiledFacts(
        module=module.module,
        version=module.version,
        library=module.library,
        compute_capabilities=compiler.compute_capabilities,
        device=f"{device.name}, CUDA driver {device.driver}" if device else None,
        profiles=list(profiles),
        options=words,
        inspection=done.inspection,
        int8=ran,
        source=source,
        seconds=done.seconds,
        peak_memory_bytes=done.peak_memory_bytes,
    )


def _word(value: int | None) -> str:
    return "default" if value is None else str(value)


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.name, path.stat().st_size, digest_file(path))
