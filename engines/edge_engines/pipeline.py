"""Build an engine folder: the steps in order.

read checkpoint -> choose the INT8 units -> write graph -> check graph -> write text files -> verify against the
reference -> gate -> compile, where the target wants it -> manifest -> rename.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import onnx
import psutil

from edge_engines.budget.choose import choose_auto
from edge_engines.budget.costs import Objective
from edge_engines.build_log import BuildLog
from edge_engines.build_options import check_capacity, check_options
from edge_engines.checkpoint.open import Checkpoint, open_checkpoint
from edge_engines.checkpoint.spec import ModelSpec, tensor_shapes
from edge_engines.compile.tensorrt import (
    TARGETS,
    CompileOptions,
    Compiler,
    choose_lowering,
    compile_graph,
    find_compiler,
)
from edge_engines.describe import build_facts, describe_engine, list_files, num_parameters, unit_precisions
from edge_engines.folder import check_target, new_folder
from edge_engines.graph.builder import GRAPH_NAME, GraphOptions, WrittenGraph, write_graph
from edge_engines.graph.linear import Precision
from edge_engines.int8_build import Int8Options, choose_units, gate_engine
from edge_engines.kv_build import KvChoice, choose_kv, gate_kv
from edge_engines.planning.memory import plan_memory
from edge_engines.planning.options import Target, choose_options
from edge_engines.progress import NoProgress, Progress
from edge_engines.qdq.lint import check_quantised
from edge_engines.report.build_data import report_of
from edge_engines.report.data import Board, Part, Sample, Step
from edge_engines.report.parts import list_parts
from edge_engines.report.write import write_report
from edge_engines.samples import QUESTIONS, write_samples
from edge_engines.text_files import write_text_files
from edge_engines.unit_choice import GateRefusedError, UnitChoice
from edge_engines.verify import fixed_ids, reference_logits, verify_engine
from edge_runtime.errors import BuildError, UsageError
from edge_runtime.manifest import Manifest, UnitPrecision, VerifyFacts, write_manifest
from edge_runtime.memory import fits

LOG_NAME = "build.log"
# w8: one code, and a scale per block of 64. int8: as if a tenth of the weights stayed FP32.
_BYTES_PER_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "w8": 1.0 + 4 / 64, "int8": 1.3, "auto": 1.3}
_MARGIN = 1.05  # norms, tables and the graph itself
_COMPILED_DISK = 2.2  # graph and plan, or the graph and its rewritten form, stand side by side for a while


def build(
    checkpoint: str | Path,
    out: str | Path,
    *,
    target: Target = "ort-cpu",
    precision: Precision = "int8",
    lowering: Literal["ort", "native", "portable"] | None = None,
    kv: Literal["float", "int8"] = "float",
    capacity: int | None = None,
    max_batch: int = 2,
    name: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
    objective: Objective = "bytes",
    int8_options: Int8Options | None = None,
    compile_options: CompileOptions | None = None,
    boards: Sequence[Board] = (),
) -> Manifest:
    """Turn a checkpoint (a Hugging Face folder or a .gguf file) into the engine folder `out` and return its manifest.

    `capacity` is the KV rows of each of `max_batch` slots; None = 512, or the model's context when that is shorter. An
    existing engine is replaced only with `force`, and only once its successor is complete. Precision int8 chooses INT8
    or float for each unit, auto among all forms the target has, for the least `objective`. `int8_options` give text,
    threshold and gate of both, and of an INT8 `kv` cache, which only the portable lowering has; `compile_options` are
    for the TensorRT targets; `boards` are those whose speed limits the report shows. Raises CheckpointError,
    BuildError, UsageError, or NoDeviceError when TensorRT or its device is missing; nothing half-written stays.
    """
    started, source, out = time.monotonic(), Path(checkpoint), Path(out).absolute()
    log = BuildLog(progress or NoProgress())
    check_options(target, precision, lowering, kv, max_batch)
    compiler = _find_compiler(target, precision, compile_options)
    wanted = lowering or ("portable" if kv == "int8" else None)
    chosen_lowering = choose_lowering(compiler, wanted) if compiler else wanted or "ort"
    int8 = int8_options or Int8Options()
    with _reported_refusal(out), open_checkpoint(source) as opened:
        for warning in opened.warnings:
            log.note(f"warning: {warning}")
        capacity = check_capacity(capacity, opened.spec.max_positions)
        model = opened.for_capacity(capacity)
        needed = int(num_parameters(model.spec) * _BYTES_PER_WEIGHT[precision] * _MARGIN)
        check_target(out, force=force, needed_bytes=int(needed * _COMPILED_DISK) if compiler else needed)
        _check_memory(model.spec, target, precision, chosen_lowering, kv, max_batch, capacity)
        chosen = _choose(model, target, precision, chosen_lowering, capacity, objective, int8, log)
        cache = choose_kv(model, chosen, int8, log) if kv == "int8" else None
        options = GraphOptions(
            chosen_lowering,
            precision,
            capacity,
            int8=chosen.units(model.spec) if chosen else None,
            kv_scales=cache.scales if cache else None,
            forms=chosen.forms if chosen else None,
            stores_int8=target == "tensorrt-rtx" and precision == "int8",  # it multiplies with them as they are
        )
        with new_folder(out) as work:
            graph = _write(work, model, chosen, options, log)
            write_text_files(work, model)
            draft = describe_engine(
                model,
                graph,
                options,
                name=name or default_name(source),
                target="ort-cpu",  # what runs the graph now; compiling it changes that
                max_batch=max_batch,
                units=chosen.precisions(options.form) if chosen else unit_precisions(model.spec, options),
                build=build_facts(_as_words(options, max_batch), started),
            )
            _check(work, graph, options, draft.units, log)
            made = msgspec.structs.replace(draft, verify=_verify(work, draft, model, log))
            made = _pass_gate(work, made, model, chosen, cache, int8.gate, log)
            found = _look_closer(work, made, model, boards, is_compiled=compiler is not None, progress=log)
            if compiler:
                made = compile_graph(work, made, compiler, log)
            return _finish(work, made, chosen, found, started, log)


@dataclass(frozen=True, slots=True)
class Findings:
    """What only the report shows."""

    parts: Sequence[Part]
    samples: Sequence[Sample]
    boards: Sequence[Board]


def _look_closer(
    work: Path, made: Manifest, model: Checkpoint, boards: Sequence[Board], *, is_compiled: bool, progress: Progress
) -> Findings:
    """Gather what the report shows of the graph, before a compiler takes it away."""
    questions = QUESTIONS[:1] if is_compiled else QUESTIONS  # a graph for TensorRT runs slowly on a CPU
    samples = write_samples(work, made, model, progress, questions=questions) if made.gate else []
    return Findings(list_parts(made, work / GRAPH_NAME), samples, boards)


@contextmanager
def _reported_refusal(out: Path) -> Iterator[None]:
    """Leave a report beside `out` when an engine is refused for its accuracy: the figures are what the user needs."""
    try:
        yield
    except GateRefusedError as refused:
        folder = out.with_name(f"{out.name}-refused")
        refused.choice.write(folder)
        if table := refused.choice.sensitivity:
            write_report(folder, report_of(table, None, refusal=refused.message))
        raise BuildError(refused.message, remedy=f"{refused.remedy}; what was measured: {folder}") from refused


def default_name(source: Path) -> str:
    """Return the name of a model after its folder or file, in the characters that are safe everywhere."""
    stem = source.stem if source.suffix == ".gguf" else source.absolute().name
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-.") or "model"


def _find_compiler(target: str, precision: str, options: CompileOptions | None) -> Compiler | None:
    """Return what compiles for the target, or None where the graph itself is the engine."""
    if target in TARGETS:
        return find_compiler(target, precision, options or CompileOptions())
    if options and options.compute_capabilities:
        raise UsageError(f"target {target} has no compute capability", remedy="leave --compute-capability out")
    return None


def _check_memory(
    spec: ModelSpec, target: Target, precision: Precision, lowering: str, kv: str, max_batch: int, capacity: int
) -> None:
    """Refuse, with the numbers, what this machine can't build (product.md A8)."""
    planned = choose_options(
        target=target,
        precision="int8" if precision == "auto" else precision,
        kv="int8" if kv == "int8" else None,
        batch=max_batch,
        capacity=capacity,
        lowering=lowering,
    )
    fit = fits(plan_memory(spec, planned).build_peak_bytes, psutil.virtual_memory().available)
    if not fit.is_enough:
        raise BuildError(
            fit.refusal("this build"), remedy="stop other programs, add memory, or build on a larger machine"
        )


def _choose(
    model: Checkpoint,
    target: Target,
    precision: str,
    lowering: str,
    capacity: int,
    objective: Objective,
    options: Int8Options,
    progress: Progress,
) -> UnitChoice | None:
    """Choose the precision of each unit where that is a question."""
    if precision == "int8":
        return choose_units(model, options, progress)
    if precision == "auto":
        return choose_auto(
            model, options, progress, target=target, lowering=lowering, capacity=capacity, objective=objective
        )
    return None


def _write(
    work: Path, model: Checkpoint, chosen: UnitChoice | None, options: GraphOptions, progress: Progress
) -> WrittenGraph:
    progress.step("writing the graph", sum(1 for _ in tensor_shapes(model.spec)))
    if chosen is None:
        return write_graph(work, model.spec, model, options, progress.advance)
    folded = chosen.weights(model)
    return write_graph(work, folded.spec, folded, options, progress.advance)


def _check(
    work: Path, graph: WrittenGraph, options: GraphOptions, units: Sequence[UnitPrecision], progress: Progress
) -> None:
    """Run the ONNX checker and shape inference, and the lint over Q/DQ. A fault is ours, so it is not an EdgeError."""
    progress.step("checking the graph", None)
    onnx.checker.check_model(str(work / GRAPH_NAME), full_check=True)
    if options.int8 is not None and options.lowering != "ort":
        weight_only = {unit.unit for unit in units if unit.precision == "w8"}
        check_quantised(graph.model, work, weight_only=weight_only)


def _verify(work: Path, draft: Manifest, model: Checkpoint, progress: Progress) -> VerifyFacts:
    progress.step("verifying against the reference", None)
    ids = fixed_ids(model.spec, model.text, draft.geometry.capacity)
    facts = verify_engine(work, draft, ids, reference_logits(model.spec, model, ids))
    progress.note(
        f"logits differ from the reference by {facts.relative_error:.2g} (at most {facts.limit:g} is allowed)"
    )
    return facts


def _pass_gate(
    work: Path,
    made: Manifest,
    model: Checkpoint,
    chosen: UnitChoice | None,
    cache: KvChoice | None,
    limit: float,
    progress: Progress,
) -> Manifest:
    """Hold an engine with INT8 in it against the FP32 model; others are what they are."""
    if chosen:
        chosen.write(work)
        return msgspec.structs.replace(made, gate=gate_engine(work, made, chosen, limit, progress))
    if cache:
        return msgspec.structs.replace(made, gate=gate_kv(work, made, model, cache, limit, progress))
    return made


def _finish(
    work: Path, made: Manifest, chosen: UnitChoice | None, found: Findings, started: float, log: BuildLog
) -> Manifest:
    """Write log and report, then the manifest over everything, last."""
    log.step("writing the manifest", None)
    facts = build_facts(made.build.options, started)
    made = msgspec.structs.replace(made, build=facts)
    (work / LOG_NAME).write_text(
        f"{facts.created} edge-runtime {facts.tool_version}\n"
        f"options {facts.options}\nversions {facts.versions}\n{log.text}"
        f"took {facts.seconds} s, peak memory {facts.peak_memory_bytes / 1e6:.0f} MB\n",
        encoding="utf-8",
    )
    data = report_of(
        chosen.sensitivity if chosen else None,
        msgspec.structs.replace(made, files=list_files(work)),
        parts=found.parts,
        boards=found.boards,
        samples=found.samples,
        steps=[Step(step.name, step.seconds) for step in log.steps],
    )
    write_report(work, msgspec.structs.replace(data, pareto=chosen.pareto(found.boards) if chosen else []))
    manifest = msgspec.structs.replace(made, files=list_files(work))
    write_manifest(work, manifest)
    return manifest


def _as_words(options: GraphOptions, max_batch: int) -> dict[str, str]:
    return {
        "lowering": options.lowering,
        "precision": options.precision,
        "kv": options.kv_dtype,
        "capacity": str(options.capacity),
        "max_batch": str(max_batch),
    }
