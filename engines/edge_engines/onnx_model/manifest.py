"""Describe the engine folder of an ONNX model: `engine.json`, of another kind than a decoder's.

`edge_runtime.manifest` describes engines that are served; this kind is run by the user's own program.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from edge_runtime.errors import EngineRefusedError
from edge_runtime.manifest import MANIFEST_NAME, AxisRange, BuildFacts, FileEntry, IoTensor, digest_file

FORMAT = 1
KIND = "onnx"


class UnitFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """One unit: the nodes decided as one, what was measured when it alone runs INT8, and the choice."""

    unit: str  # its first node
    nodes: list[str]
    weights: int
    scale: float  # of its input
    scale_rule: str  # which clipping point gave the scale
    pooled_error: float  # of its own output, relative L2 over all values
    per_row_error: float  # mean over rows
    worst_row_error: float
    output_error: float  # of the model's outputs
    output_cosine: float
    precision: Literal["int8", "float"]
    reason: str


class AgreementFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """How the outputs agree with the FP32 original's on held-out samples. See outputs.py for the measures."""

    subject: Literal["graph"]  # the graph as written was run by ONNX Runtime; a compiled plan was not
    samples: int
    error: float
    upper: float
    worst: float
    cosine: float
    least_cosine: float
    same_top1: float | None
    limit: float  # `upper` is at most this


class SampleFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """The samples, and how they were dealt out."""

    file: str
    sha256: str
    calibration: int
    ranking: int
    gate: int
    repeated: int  # left out


class PlanFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """How the graph was compiled."""

    module: str
    version: str
    library: str
    compute_capabilities: list[str]
    axes: dict[str, AxisRange]  # what the varying axes may be
    inspection: str
    source: list[FileEntry]  # the graph it was made from, which is not kept
    seconds: float
    peak_memory_bytes: int


class OnnxManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `engine.json`."""

    format: int
    kind: Literal["onnx"]
    name: str
    target: Literal["ort-cpu", "tensorrt", "tensorrt-rtx"]
    precision: Literal["fp32", "fp16", "int8"]  # as asked for
    float_parts: Literal["fp32", "fp16"]  # what is not INT8
    int8_form: Literal["qdq", "ort"] | None  # see rewrite.py; "ort": activations unsigned around 128; None: no INT8
    source: str
    source_sha256: str
    opset: Annotated[int, Meta(ge=1)]
    graph: str  # what is loaded
    inputs: list[IoTensor]
    outputs: list[IoTensor]
    weight_bytes: int  # of the graph
    source_bytes: int
    int8_share: float  # of the weights of all units; 0 without INT8
    units: list[UnitFacts]
    threshold: float | None  # hard rule; None without INT8
    agreement: AgreementFacts
    samples: SampleFacts
    warnings: list[str]
    build: BuildFacts
    compiled: PlanFacts | None = None
    files: list[FileEntry] = []


def write_onnx_manifest(folder: Path, manifest: OnnxManifest) -> None:
    """Write `engine.json` as indented JSON."""
    (folder / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def is_onnx_engine(folder: Path) -> bool:
    """Say whether a folder holds an engine of this kind."""
    try:
        kind = msgspec.json.decode((folder / MANIFEST_NAME).read_bytes(), type=_Kind).kind
    except (OSError, msgspec.MsgspecError):
        return False
    return kind == KIND


def read_onnx_manifest(folder: Path) -> OnnxManifest:
    """Read and verify `engine.json` and the files it lists. Raises EngineRefusedError naming the file."""
    path = folder / MANIFEST_NAME
    remedy = f"build it again with: edge-runtime build MODEL.onnx --inputs SAMPLES.npz -o {folder}"
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=OnnxManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise EngineRefusedError(f"{path}: not the manifest of an ONNX model: {error}", remedy=remedy) from error
    if manifest.format != FORMAT:
        raise EngineRefusedError(f"{path}: format {manifest.format}, this program reads {FORMAT}", remedy=remedy)
    for entry in manifest.files:
        file = folder / Path(entry.name).name
        found = digest_file(file) if file.is_file() else "no such file"
        if found != entry.sha256:
            raise EngineRefusedError(f"{file}: SHA-256 {found}, the manifest says {entry.sha256}", remedy=remedy)
    return manifest


class _Kind(Struct):
    kind: str = ""
