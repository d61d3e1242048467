"""Build an engine folder: the steps in order.

read checkpoint -> write graph -> check graph -> write text files -> verify against the reference -> compile, where the
target wants it -> manifest -> rename.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Literal

import msgspec
import onnx

from edge_engines.checkpoint.open import Checkpoint, open_checkpoint
from edge_engines.checkpoint.spec import tensor_shapes
from edge_engines.compile.adapt import adapt_graph
from edge_engines.compile.tensorrt import (
    TARGETS,
    CompileOptions,
    Compiler,
    check_free_memory,
    compile_graph,
    find_compiler,
)
from edge_engines.describe import build_facts, describe_engine, list_files, num_parameters
from edge_engines.folder import check_target, new_folder
from edge_engines.graph.builder import GRAPH_NAME, LOWERINGS, GraphOptions, WrittenGraph, write_graph
from edge_engines.graph.linear import Precision
from edge_engines.progress import NoProgress, Progress
from edge_engines.text_files import write_text_files
from edge_engines.verify import LIMITS, fixed_ids, reference_logits, verify_engine
from edge_runtime.errors import BuildError, UsageError
from edge_runtime.manifest import Manifest, VerifyFacts, write_manifest

LOG_NAME = "build.log"
MIN_CAPACITY, DEFAULT_CAPACITY = 8, 512
DEFAULT_LOWERING = {"ort-cpu": "ort", **dict.fromkeys(TARGETS, "native")}
_BYTES_PER_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "w8": 1.0 + 4 / 64}  # w8: one code, and a scale per block of 64
_MARGIN = 1.05  # norms, tables and the graph itself
_COMPILED_DISK = 2.2  # graph and plan, or the graph and its rewritten form, stand side by side for a while


def build(
    checkpoint: str | Path,
    out: str | Path,
    *,
    target: Literal["ort-cpu", "tensorrt", "tensorrt-rtx"] = "ort-cpu",
    precision: Precision = "fp32",
    lowering: Literal["ort", "native"] | None = None,
    capacity: int | None = None,
    max_batch: int = 2,
    name: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
    compile_options: CompileOptions | None = None,
) -> Manifest:
    """Turn a checkpoint (a Hugging Face folder or a .gguf file) into the engine folder `out` and return its manifest.

    `capacity` is the KV rows of each of `max_batch` slots; None = 512, or the model's context when that is shorter. An
    existing engine is replaced only with `force`, and only once its successor is complete. `compile_options` are for
    the TensorRT targets. Raises CheckpointError, BuildError, UsageError, or NoDeviceError when TensorRT or its device
    is missing; nothing half-written stays.
    """
    started, source, out = time.monotonic(), Path(checkpoint), Path(out).absolute()
    progress = progress or NoProgress()
    chosen = _check_options(target, precision, lowering, max_batch)
    compiler = _find_compiler(target, precision, compile_options)
    with open_checkpoint(source) as opened:
        for warning in opened.warnings:
            progress.note(f"warning: {warning}")
        options = GraphOptions(chosen, precision, _check_capacity(capacity, opened.spec.max_positions))
        model = opened.for_capacity(options.capacity)
        needed = int(num_parameters(model.spec) * _BYTES_PER_WEIGHT[precision] * _MARGIN)
        check_target(out, force=force, needed_bytes=int(needed * _COMPILED_DISK) if compiler else needed)
        if compiler:
            check_free_memory(needed)
        with new_folder(out) as work:
            graph = _write(work, model, options, progress)
            if compiler:
                graph = _adapt(work, graph, progress)
            _check(work, progress)
            write_text_files(work, model)
            draft = describe_engine(
                model,
                graph,
                options,
                name=name or default_name(source),
                target="ort-cpu",  # what runs the graph now; compiling it changes that
                max_batch=max_batch,
                build=build_facts(_as_words(options, max_batch), started),
            )
            finished = msgspec.structs.replace(draft, verify=_verify(work, draft, model, progress))
            if compiler:
                finished = compile_graph(work, finished, compiler, progress)
            return _finish(work, finished, started, progress)


def default_name(source: Path) -> str:
    """Return the name of a model after its folder or file, in the characters that are safe everywhere."""
    stem = source.stem if source.suffix == ".gguf" else source.absolute().name
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-.") or "model"


def _check_options(target: str, precision: str, lowering: str | None, max_batch: int) -> str:
    """Return the lowering to use."""
    if target not in DEFAULT_LOWERING:
        raise UsageError(f"target {target!r} is not supported", remedy=f"choose from: {', '.join(DEFAULT_LOWERING)}")
    chosen = lowering or DEFAULT_LOWERING[target]
    if chosen not in LOWERINGS:
        raise UsageError(f"lowering {chosen!r} is not supported", remedy=f"choose from: {', '.join(LOWERINGS)}")
    if target in TARGETS and chosen != DEFAULT_LOWERING[target]:
        raise UsageError(
            f"lowering {chosen} can't be built for target {target}", remedy="use --lowering " + DEFAULT_LOWERING[target]
        )
    if precision not in LIMITS:
        raise UsageError(f"precision {precision!r} is not supported", remedy=f"choose from: {', '.join(LIMITS)}")
    if max_batch not in (1, 2):
        raise UsageError(f"max_batch {max_batch}: an engine has 1 or 2 slots")
    return chosen


def _find_compiler(target: str, precision: str, options: CompileOptions | None) -> Compiler | None:
    """Return what compiles for the target, or None where the graph itself is the engine."""
    if target in TARGETS:
        return find_compiler(target, precision, options or CompileOptions())
    if options and options.compute_capabilities:
        raise UsageError(f"target {target} has no compute capability", remedy="leave --compute-capability out")
    return None


def _check_capacity(capacity: int | None, max_positions: int) -> int:
    """Return the capacity to build for."""
    if capacity is None:
        return min(DEFAULT_CAPACITY, max_positions)
    if not MIN_CAPACITY <= capacity <= max_positions:
        raise BuildError(
            f"capacity {capacity} is outside {MIN_CAPACITY} to {max_positions}, the positions this model knows",
            remedy=f"build with --capacity {min(DEFAULT_CAPACITY, max_positions)}",
        )
    return capacity


def _write(work: Path, model: Checkpoint, options: GraphOptions, progress: Progress) -> WrittenGraph:
    progress.step("writing the graph", sum(1 for _ in tensor_shapes(model.spec)))
    return write_graph(work, model.spec, model, options, progress.advance)


def _adapt(work: Path, graph: WrittenGraph, progress: Progress) -> WrittenGraph:
    progress.step("rewriting the graph for TensorRT", None)
    return adapt_graph(work, graph)


def _check(work: Path, progress: Progress) -> None:
    """Run the ONNX checker and shape inference over the written file. A fault is ours, so it is not an EdgeError."""
    progress.step("checking the graph", None)
    onnx.checker.check_model(str(work / GRAPH_NAME), full_check=True)


def _verify(work: Path, draft: Manifest, model: Checkpoint, progress: Progress) -> VerifyFacts:
    progress.step("verifying against the reference", None)
    ids = fixed_ids(model.spec, model.text, draft.geometry.capacity)
    facts = verify_engine(work, draft, ids, reference_logits(model.spec, model, ids))
    progress.note(
        f"logits differ from the reference by {facts.relative_error:.2g} (at most {facts.limit:g} is allowed)"
    )
    return facts


def _finish(work: Path, verified: Manifest, started: float, progress: Progress) -> Manifest:
    """Write the build log, then the manifest over everything, last."""
    progress.step("writing the manifest", None)
    facts = build_facts(verified.build.options, started)
    verify, compiled = verified.verify, verified.compiled
    assert verify is not None
    (work / LOG_NAME).write_text(
        f"{facts.created} edge-runtime {facts.tool_version}\n"
        f"options {facts.options}\nversions {facts.versions}\n"
        f"took {facts.seconds} s, peak memory {facts.peak_memory_bytes / 1e6:.0f} MB\n"
        f"verified on {verify.tokens} tokens: relative error {verify.relative_error:.3g}, limit {verify.limit:g}\n"
        + (f"compiled by {compiled.module} {compiled.version} in {compiled.seconds} s\n" if compiled else ""),
        encoding="utf-8",
    )
    manifest = msgspec.structs.replace(verified, build=facts, files=list_files(work))
    write_manifest(work, manifest)
    return manifest


def _as_words(options: GraphOptions, max_batch: int) -> dict[str, str]:
    return {
        "lowering": options.lowering,
        "precision": options.precision,
        "capacity": str(options.capacity),
        "max_batch": str(max_batch),
    }
