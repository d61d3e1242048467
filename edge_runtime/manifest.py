"""Describe an engine folder and refuse a wrong one before anything of it is loaded.

`engine.json` is written last: a folder without it is not an engine. Reading checks the format, the sizes and, unless
told otherwise, the SHA-256 of every file. Which versions and devices fit is checked by the backend that will load it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from edge_runtime.errors import EngineRefusedError

FORMAT = 1
MANIFEST_NAME = "engine.json"
DECODER = "decoder"
_READ_BLOCK = 1 << 20

Positive = Annotated[int, Meta(ge=1)]


class Geometry(Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the model and its buffers; axis letters as everywhere."""

    layers: Positive  # L
    kv_heads: Positive  # K
    head_dim: Positive  # D
    vocab: Positive  # V
    capacity: Positive  # C, KV rows per slot
    max_batch: Annotated[int, Meta(ge=1, le=2)]  # B


class IoTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """One graph input or output; a name in `shape` is an axis that varies from step to step."""

    name: str
    shape: list[int | str]
    dtype: Literal["float32", "float16", "int64", "int32", "int8", "uint8", "bool"]


class FileEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One file of the folder."""

    name: str
    size: Annotated[int, Meta(ge=0)]
    sha256: str


class UnitPrecision(Struct, frozen=True, forbid_unknown_fields=True):
    """The precision of one unit (a fused projection, the head, the embedding) and why."""

    unit: str
    precision: str
    reason: str


class ModelFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """Where the engine comes from and what the model is."""

    name: str
    family: str
    source: str
    checkpoint_sha256: str
    hidden: Positive
    ffn: Positive
    heads: Positive  # H
    parameters: Positive
    rotary: list[dict[str, float | str]]
    window: int | None
    known_ids: Positive  # ids [known_ids, V) are padding, never sampled
    has_text: bool  # a tokenizer is part of the folder


class VerifyFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine compared with the plain reference on a fixed prompt, before it was put in place."""

    tokens: Positive
    relative_error: float  # of the last logits: L2 norm of the difference over that of the reference
    limit: float
    same_top1: bool
    chunked_error: float  # the same measure between prefill as a whole and token by token
    subject: Literal["engine", "graph"] = "engine"  # "graph": as it was before it was compiled; the plan was not run


class GateFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """How an INT8 engine compares with the FP32 model on the gate's text; its graph was run, not a simulation."""

    limit: float  # largest allowed upper bound
    ratio: float  # perplexity by that of the baseline
    upper: float  # its 95 % bound
    base_perplexity: float
    tokens: Positive
    simulated_ratio: float  # what the choice of units was made by
    kl: float  # of the simulation on the ranking text: nats per token from the baseline's distribution
    same_top1: float  # share of its tokens whose likeliest next token is the baseline's


class AxisRange(Struct, frozen=True, forbid_unknown_fields=True):
    """What an axis may be in one profile: 1 <= least <= usual <= most."""

    least: Positive
    usual: Positive
    most: Positive


class ProfileFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """One optimisation profile of a compiled engine: the ranges of the axes that vary, by the names in `inputs`."""

    name: Literal["decode", "prefill", "any"]
    axes: dict[str, AxisRange]


class CompiledFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """How the graph was compiled, and for what."""

    module: Literal["tensorrt", "tensorrt_rtx"]
    version: str  # of the Python module
    library: str  # as the library itself reports it
    compute_capabilities: list[str]  # "8.6": where the plan may run
    device: str | None  # GPU and driver of the build; None: built without one
    profiles: list[ProfileFacts]
    options: dict[str, str]
    inspection: str  # file with the engine inspector's JSON, or "not inspected: ..."
    source: list[FileEntry]  # the verified graph it was made from, which is not kept
    int8: str | None  # which INT8 units it multiplies in INT8, by the inspector; None: none, or not inspected
    seconds: float
    peak_memory_bytes: int  # of the compiler process


class BuildFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine was built."""

    tool_version: str
    created: str  # UTC, ISO 8601
    seconds: float
    peak_memory_bytes: int
    options: dict[str, str]
    versions: dict[str, str]


class Manifest(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of `engine.json`."""

    format: int
    target: Literal["ort-cpu", "tensorrt", "tensorrt-rtx"]
    lowering: Literal["ort", "native", "portable"]
    precision: Literal["fp32", "fp16", "w8", "int8", "auto"]
    kv_dtype: Literal["float32", "float16", "int8"]
    geometry: Geometry
    model: ModelFacts
    graph: str  # file name of what the backend loads
    inputs: list[IoTensor]
    outputs: list[IoTensor]
    units: list[UnitPrecision]
    weight_bytes: int
    build: BuildFacts
    verify: VerifyFacts | None = None  # None only while the engine is being built
    gate: GateFacts | None = None  # None: nothing was chosen by measured sensitivity
    compiled: CompiledFacts | None = None  # None: the backend loads the graph itself
    files: list[FileEntry] = []

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV buffers of all slots."""
        g = self.geometry
        size = {"float32": 4, "float16": 2, "int8": 1}[self.kv_dtype]
        return 2 * g.layers * g.kv_heads * g.head_dim * g.max_batch * g.capacity * size


class _Kind(Struct):
    """What every `engine.json` says first; language models say nothing."""

    kind: str = DECODER


def read_manifest(
    folder: Path, *, check_digests: bool = True, progress: Callable[[int], None] | None = None
) -> Manifest:
    """Read and verify `folder/engine.json` and the files it lists.

    `progress` receives the number of bytes hashed since the last call. Raises EngineRefusedError naming the file and
    both values.
    """
    path = folder / MANIFEST_NAME
    if not folder.is_dir():
        raise EngineRefusedError(
            f"{folder}: no such engine folder",
            remedy="build one with: edge-runtime build CHECKPOINT -o FOLDER",
        )
    try:
        content = path.read_bytes()
        kind = msgspec.json.decode(content, type=_Kind).kind
        if kind != DECODER:
            raise EngineRefusedError(
                f"{path}: a network of kind {kind}, not a language model",
                remedy="its graph is for a program of your own",
            )
        manifest = msgspec.json.decode(content, type=Manifest)
    except FileNotFoundError as error:
        raise EngineRefusedError(
            f"{folder}: no {MANIFEST_NAME}, so this is not a finished engine folder", remedy=_rebuild(folder)
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError) as error:
        raise EngineRefusedError(f"{path}: not a valid manifest: {error}", remedy=_rebuild(folder)) from error
    if manifest.format != FORMAT:
        raise EngineRefusedError(
            f"{path}: format {manifest.format}, this program reads format {FORMAT}", remedy=_rebuild(folder)
        )
    for entry in manifest.files:
        _check_file(folder, entry, check_digests, progress)
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `engine.json` as indented JSON (the caller makes the folder durable and renames it into place)."""
    (folder / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def digest_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file as hex, reading it in blocks."""
    sha = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_READ_BLOCK):
            sha.update(block)
            if progress:
                progress(len(block))
    return sha.hexdigest()


def _check_file(folder: Path, entry: FileEntry, check_digest: bool, progress: Callable[[int], None] | None) -> None:
    path = folder / entry.name
    if Path(entry.name).name != entry.name:
        raise EngineRefusedError(
            f"{folder / MANIFEST_NAME}: file name {entry.name!r} leaves the engine folder",
            remedy=_rebuild(folder),
        )
    try:
        size = path.stat().st_size
    except OSError as error:
        raise EngineRefusedError(
            f"{path}: listed in {MANIFEST_NAME} but {error.strerror}", remedy=_rebuild(folder)
        ) from error
    if size != entry.size:
        raise EngineRefusedError(f"{path}: {size} bytes, the manifest says {entry.size}", remedy=_rebuild(folder))
    if check_digest and (found := digest_file(path, progress)) != entry.sha256:
        raise EngineRefusedError(f"{path}: SHA-256 {found}, the manifest says {entry.sha256}", remedy=_rebuild(folder))


def _rebuild(folder: Path) -> str:
    return f"build it again with: edge-runtime build CHECKPOINT -o {folder}"
