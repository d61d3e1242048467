"""Put together what the manifest of an ONNX model says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from edge_engines.compile.tensorrt import PLAN_NAME
from edge_engines.graph.builder import GRAPH_NAME
from edge_engines.onnx_model.assess import Assessment, UnitScore
from edge_engines.onnx_model.compile import io_tensors
from edge_engines.onnx_model.manifest import (
    FORMAT,
    AgreementFacts,
    OnnxManifest,
    PlanFacts,
    SampleFacts,
    UnitFacts,
)
from edge_engines.onnx_model.outputs import Agreement
from edge_engines.onnx_model.samples import Split
from edge_engines.onnx_model.source import Source
from edge_engines.onnx_model.units import Unit
from edge_runtime.manifest import BuildFacts, digest_file


def describe(
    source: Source,
    inputs: Path,
    split: Split,
    assessment: Assessment | None,
    agreement: Agreement,
    *,
    name: str,
    target: Literal["ort-cpu", "tensorrt", "tensorrt-rtx"],
    precision: Literal["fp32", "fp16", "int8"],
    parts: Literal["fp32", "fp16"],
    limit: float,
    threshold: float,
    weight_bytes: int,
    warnings: Sequence[str],
    compiled: PlanFacts | None,
    build: BuildFacts,
) -> OnnxManifest:
    """Return the manifest of an engine whose files are not listed yet."""
    return OnnxManifest(
        format=FORMAT,
        kind="onnx",
        name=name,
        target=target,
        precision=precision,
        float_parts=parts,
        int8_form=assessment.trials.form if assessment else None,
        source=source.path.name,
        source_sha256=source.sha256,
        opset=source.opset,
        graph=PLAN_NAME if compiled else GRAPH_NAME,
        inputs=io_tensors(source.inputs),
        outputs=io_tensors(source.outputs),
        weight_bytes=weight_bytes,
        source_bytes=source.file_bytes,
        int8_share=int8_share(assessment) if assessment else 0.0,
        units=[_unit(score, assessment) for score in assessment.scores] if assessment else [],
        threshold=threshold if assessment else None,
        agreement=AgreementFacts(subject="graph", limit=limit, **dataclasses.asdict(agreement)),
        samples=SampleFacts(
            file=inputs.name,
            sha256=digest_file(inputs),
            calibration=len(split.calibration),
            ranking=len(split.ranking),
            gate=len(split.gate),
            repeated=split.num_repeated,
        ),
        warnings=list(warnings),
        build=build,
        compiled=compiled,
    )


def units_of(assessment: Assessment) -> list[Unit]:
    """Return the units that run INT8."""
    return [score.unit for score in assessment.scores if score.unit.name in assessment.choice.int8]


def int8_share(assessment: Assessment) -> float:
    """Return the share of the units' weights that run INT8."""
    every = sum(score.unit.num_weights for score in assessment.scores)
    return sum(unit.num_weights for unit in units_of(assessment)) / every


def _unit(score: UnitScore, assessment: Assessment) -> UnitFacts:
    unit = score.unit
    return UnitFacts(
        unit=unit.name,
        nodes=[product.node for product in unit.products],
        weights=unit.num_weights,
        scale=score.scale,
        scale_rule=score.rule,
        pooled_error=score.local.pooled,
        per_row_error=score.local.per_row,
        worst_row_error=score.local.worst_row,
        output_error=score.effect.error,
        output_cosine=score.effect.cosine,
        precision="int8" if unit.name in assessment.choice.int8 else "float",
        reason=assessment.choice.reasons[unit.name],
    )
