"""Build an engine folder from any ONNX model: the steps in order.

read model and samples -> plain graph -> answers of the original -> INT8 chosen under the gate -> written graph -> lint
-> verified in a child process -> compiled, where the target wants it -> manifest -> rename.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import onnx
import psutil

from edge_engines.compile.tensorrt import TARGETS, CompileOptions, Compiler, find_compiler
from edge_engines.describe import build_facts, list_files
from edge_engines.folder import check_target, new_folder
from edge_engines.graph.builder import GRAPH_NAME
from edge_engines.onnx_model.assess import GATE, Assessment, assess
from edge_engines.onnx_model.baseline import Baseline, keep_baseline, may_batch
from edge_engines.onnx_model.compile import BATCH_MOST, axis_ranges, check_memory, compile_onnx, io_tensors
from edge_engines.onnx_model.cpu_speed import time_both
from edge_engines.onnx_model.facts import describe
from edge_engines.onnx_model.final import write_final
from edge_engines.onnx_model.float_parts import Parts, float_parts
from edge_engines.onnx_model.manifest import OnnxManifest, write_onnx_manifest
from edge_engines.onnx_model.outputs import Agreement
from edge_engines.onnx_model.plain import HALF_OPSET, PER_CHANNEL_OPSET, PLAIN_NAME, write_plain
from edge_engines.onnx_model.rewrite import Form
from edge_engines.onnx_model.samples import Samples, Split, open_samples
from edge_engines.onnx_model.session import Session
from edge_engines.onnx_model.source import Source, read_source
from edge_engines.onnx_model.units import find_units
from edge_engines.onnx_model.verify import verify_graph
from edge_engines.progress import NoProgress, Progress
from edge_engines.qdq.lint import check_quantised
from edge_engines.qdq.places import PRODUCTS
from edge_engines.sensitivity.select import THRESHOLD
from edge_runtime.backends.byte_products import cpu_flags, sums_exactly
from edge_runtime.errors import BuildError, UsageError

Target = Literal["ort-cpu", "tensorrt", "tensorrt-rtx"]
Precision = Literal["fp32", "fp16", "int8"]
PRECISIONS = ("fp32", "fp16", "int8")
FLOAT_LIMITS = {"fp32": 1e-3, "fp16": 0.05}  # relative error of a build without INT8, which tells an engine from noise
_DISK = 3.0  # the plain graph, its codes and FP16 form, and what is written stand side by side
_COMPILED_DISK = 1.5
# ONNX Runtime 1.32 on an x86 CPU with VNNI: its INT8 convolutions take five times the time of those in FP32 (64 and 256
# channels, 3 x 3), and twice with one filter per channel; products of matrices a third to a seventh.
_MATRIX_PRODUCTS = ("MatMul", "Gemm")
_NO_UNITS = {
    "qdq": ("no MatMul, Gemm or convolution has a constant weight of some size", "build with --precision fp32 or fp16"),
    "ort": (
        "no MatMul or Gemm has a constant weight of some size, and ONNX Runtime's convolutions are slower in INT8",
        "build with --precision fp32, or for TensorRT",
    ),
}
_SHOWN = 3  # warnings of the lint; all are in the manifest


@dataclass(frozen=True, slots=True)
class _Read:
    """The model and its samples, ready to be run."""

    source: Source
    plain: onnx.ModelProto
    samples: Samples
    split: Split
    joins: bool  # whether samples may be fed several at a time
    scratch: Path


def build_onnx_model(
    source: Path,
    out: Path,
    *,
    inputs: Path | None,
    target: Target = "ort-cpu",
    precision: Precision = "int8",
    gate: float | None = None,
    threshold: float = THRESHOLD,
    name: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
    compile_options: CompileOptions | None = None,
) -> OnnxManifest:
    """Turn an .onnx file into the engine folder `out` and return its manifest.

    `inputs` is an .npz file of samples, see samples.py. `gate` is the largest upper 95 % bound of the mean relative
    error of the outputs on samples that calibration never saw (None: 0.1), `threshold` the largest error of a unit's
    own output. Raises UsageError, CheckpointError, BuildError, or NoDeviceError when TensorRT or its device is missing;
    nothing half-written stays.
    """
    started, progress, out = time.monotonic(), progress or NoProgress(), Path(out).absolute()
    limit = _check_options(target, precision, gate, threshold)
    if inputs is None:
        raise UsageError(
            f"{source}: an ONNX model is built with samples of its inputs", remedy="give them with --inputs SAMPLES.npz"
        )
    compiler = _find_compiler(target, compile_options)
    found = read_source(Path(source), target=target, precision=precision)
    check_target(out, force=force, needed_bytes=int(found.file_bytes * (_DISK + (_COMPILED_DISK if compiler else 0))))
    if compiler:
        check_memory(found, psutil.virtual_memory().available)
    with (
        new_folder(out) as work,
        tempfile.TemporaryDirectory(prefix=f".{out.name}.scratch-", dir=out.parent) as scratch,
    ):
        read = _read(found, inputs, Path(scratch), target, precision, progress)
        judged = _answers(read, read.split.gate, "gate", progress)
        seen = read.samples.batches(read.split.calibration)
        parts = float_parts(read.plain, read.scratch, seen, judged, target, precision, limit, progress)
        assessment = _assess(read, judged, parts, target, limit, threshold, progress) if precision == "int8" else None
        graph, weight_bytes = _write(read, assessment, parts, work, progress)
        warnings = [*parts.warnings, *_check(graph, read, assessment, work, progress)]
        agreement = _verify(work, judged, limit, progress)
        warnings += _look_at_cpu(read, work, target, assessment is not None, judged, progress)
        axes = axis_ranges(found, read.samples, joins=read.joins)
        compiled = compile_onnx(work, io_tensors(found.inputs), axes, compiler, progress) if compiler else None
        manifest = describe(
            found, inputs, read.split, assessment, agreement,
            name=name or found.path.stem, target=target, precision=precision, parts=parts.kind, limit=limit,
            threshold=threshold, weight_bytes=weight_bytes, warnings=warnings, compiled=compiled,
            build=build_facts(_as_words(target, precision, limit, threshold), started),
        )  # fmt: skip
        manifest = msgspec.structs.replace(manifest, files=list_files(work))
        write_onnx_manifest(work, manifest)
    return manifest


def _check_options(target: str, precision: str, gate: float | None, threshold: float) -> float:
    """Return the limit of the outputs' error."""
    if target not in ("ort-cpu", *TARGETS):
        raise UsageError(f"target {target!r} is not supported", remedy=f"choose from: ort-cpu, {', '.join(TARGETS)}")
    if precision not in PRECISIONS:
        raise UsageError(
            f"precision {precision!r} can't be built from an ONNX model", remedy=f"choose from: {', '.join(PRECISIONS)}"
        )
    for label, value in (("gate", gate), ("threshold", threshold)):
        if value is not None and not 0 < value < 1:
            raise UsageError(f"{label} {value:g} is a relative error of an ONNX model's outputs, between 0 and 1")
    return gate or {**FLOAT_LIMITS, "int8": GATE}[precision]


def _find_compiler(target: str, options: CompileOptions | None) -> Compiler | None:
    if target in TARGETS:
        return find_compiler(target, "int8", options or CompileOptions())  # any precision of such a model compiles
    if options and options.compute_capabilities:
        raise UsageError(f"target {target} has no compute capability", remedy="leave --compute-capability out")
    return None


def _read(source: Source, inputs: Path, scratch: Path, target: str, precision: str, progress: Progress) -> _Read:
    progress.step("reading the model and the samples", None)
    samples = open_samples(inputs, source, scratch)
    split = samples.split()
    wished = HALF_OPSET if target in TARGETS else PER_CHANNEL_OPSET
    plain = write_plain(source, scratch, opset=wished if precision == "int8" else source.opset, progress=progress)
    joins = may_batch(Session(scratch / PLAIN_NAME), samples, split.gate)
    if split.num_repeated:
        progress.note(f"warning: {split.num_repeated} samples repeat earlier ones and are left out")
    return _Read(source, plain, samples.batched(BATCH_MOST if joins else 1), split, joins, scratch)


def _answers(read: _Read, indexes: Sequence[int], name: str, progress: Progress) -> Baseline:
    """Run the original, as the user gave it."""
    progress.step(f"running the original on the {name} samples", len(indexes))
    return keep_baseline(Session(read.source.path), read.samples, indexes, read.scratch, name, progress)


def _assess(
    read: _Read, judged: Baseline, parts: Parts, target: str, gate: float, threshold: float, progress: Progress
) -> Assessment:
    form: Form = "ort" if target == "ort-cpu" else "qdq"
    units = find_units(read.plain, read.scratch, PRODUCTS if form == "qdq" else _MATRIX_PRODUCTS)
    if not units:
        raise BuildError(f"{read.source.path}: no layer can run INT8: {_NO_UNITS[form][0]}", remedy=_NO_UNITS[form][1])
    ranking = _answers(read, read.split.ranking, "ranking", progress)
    found = assess(
        read.plain, read.scratch, units, read.samples, read.split, ranking, judged,
        half=parts.half, form=form, threshold=threshold, gate=gate, progress=progress,
    )  # fmt: skip
    if not found.choice.int8:
        raise BuildError(
            f"{read.source.path}: no layer can run INT8: {_count(found, 'hard rule')} of {len(units)} are off by more "
            f"than {threshold:g} themselves, each of the others makes the outputs fail the gate {gate:g}",
            remedy="build with --precision fp32 or fp16, or raise --gate knowingly",
        )
    return found


def _count(assessment: Assessment, reason: str) -> int:
    return sum(found == reason for found in assessment.choice.reasons.values())


def _write(
    read: _Read, assessment: Assessment | None, parts: Parts, work: Path, progress: Progress
) -> tuple[onnx.ModelProto, int]:
    progress.step("writing the graph", None)
    model = assessment.trials.graph(assessment.choice.int8) if assessment else parts.half or read.plain
    return write_final(model, read.scratch, work)


def _check(
    graph: onnx.ModelProto, read: _Read, assessment: Assessment | None, work: Path, progress: Progress
) -> list[str]:
    """Run the ONNX checker over the written file and the lint over its Q/DQ; return warnings.

    ONNX Runtime's own form has none: the same codes and scales are checked as Q/DQ.
    """
    progress.step("checking the graph", None)
    onnx.checker.check_model(str(work / GRAPH_NAME))  # a fault is ours, so it is not an EdgeError
    folder = work
    if assessment and assessment.trials.form != "qdq":
        graph, folder = assessment.trials.fp32_graph(assessment.choice.int8, "qdq"), read.scratch
    warnings = [str(fault) for fault in check_quantised(graph, folder)]
    for text in warnings[:_SHOWN]:
        progress.note(f"warning: {text}")
    if len(warnings) > _SHOWN:
        progress.note(f"warning: and {len(warnings) - _SHOWN} more of this kind, see engine.json")
    return warnings


def _verify(work: Path, judged: Baseline, limit: float, progress: Progress) -> Agreement:
    progress.step("verifying against the original", len(judged.indexes))
    found = verify_graph(work / GRAPH_NAME, judged)
    progress.note(
        f"outputs differ from the original's by {found.error:.3g}, upper bound {found.upper:.3g} "
        f"(at most {limit:g} is allowed), cosine {found.cosine:.5f}"
    )
    if not found.upper <= limit:  # NaN fails too
        raise BuildError(
            f"the finished graph does not compute this model: its outputs are off by {found.upper:.3g} (upper bound), "
            f"at most {limit:g} is allowed",
            remedy="nothing was written; raise --gate knowingly, or build with --precision fp32",
        )
    return found


def _look_at_cpu(
    read: _Read, work: Path, target: str, is_int8: bool, judged: Baseline, progress: Progress
) -> list[str]:
    """Say what INT8 does on this CPU, when it is what the engine is for."""
    if target != "ort-cpu" or not is_int8:
        return []
    is_exact = sums_exactly(platform.machine(), cpu_flags())
    warnings = [] if is_exact else ["this CPU adds INT8 products inexactly: another gives other results"]
    batch, _ = next(judged.batches())
    fp32, int8 = time_both(read.scratch / PLAIN_NAME, work / GRAPH_NAME, batch)
    progress.note(f"a batch of {batch.count} takes {int8:.2f} ms of one core, in FP32 {fp32:.2f} ms")
    if int8 > fp32:
        warnings.append(f"INT8 is slower than FP32 on this CPU: {int8:.2f} against {fp32:.2f} ms")
    for text in warnings:
        progress.note(f"warning: {text}")
    return warnings


def _as_words(target: str, precision: str, limit: float, threshold: float) -> dict[str, str]:
    return {"target": target, "precision": precision, "gate": f"{limit:g}", "threshold": f"{threshold:g}"}
