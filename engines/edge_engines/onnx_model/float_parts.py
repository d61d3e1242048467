"""Decide what the parts that are not INT8 compute in: FP16 for TensorRT where that is safe, else FP32."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx

from edge_engines.compile.tensorrt import TARGETS
from edge_engines.onnx_model.baseline import Baseline
from edge_engines.onnx_model.half import to_half, value_types
from edge_engines.onnx_model.magnitudes import too_large_for_half
from edge_engines.onnx_model.plain import HALF_OPSET, opset_of
from edge_engines.onnx_model.samples import Batch
from edge_engines.onnx_model.session import Session
from edge_engines.progress import Progress
from edge_runtime.errors import BuildError

_HALF_NAME = "half.onnx"
_SHARE = 0.25  # of the limit that FP16 alone may take: the rest is for INT8


@dataclass(frozen=True, slots=True)
class Parts:
    """The float form to write."""

    kind: Literal["fp32", "fp16"]
    half: onnx.ModelProto | None  # its data lies in the scratch folder
    warnings: tuple[str, ...] = ()


def float_parts(
    plain: onnx.ModelProto,
    scratch: Path,
    batches: Iterable[Batch],
    judged: Baseline,
    target: str,
    precision: str,
    limit: float,
    progress: Progress,
) -> Parts:
    """Return the float form of a build; `batches` show how large its values get.

    Raises BuildError when FP16 was asked for by name and can't be had.
    """
    if precision == "fp32" or (target not in TARGETS and precision != "fp16"):
        return Parts("fp32", None)
    progress.step("converting to FP16", None)
    allowed = limit * (_SHARE if precision == "int8" else 1)
    why, half = _try_half(plain, scratch, batches, judged, precision, allowed, progress)
    if half is not None:
        return Parts("fp16", half)
    if precision == "fp16":
        raise BuildError(f"this model can't be built in FP16: {why}", remedy="build with --precision fp32")
    text = f"what is not INT8 stays in FP32: {why}"
    progress.note(f"warning: {text}")
    return Parts("fp32", None, (text,))


def _try_half(
    plain: onnx.ModelProto,
    scratch: Path,
    batches: Iterable[Batch],
    judged: Baseline,
    precision: str,
    limit: float,
    progress: Progress,
) -> tuple[str, onnx.ModelProto | None]:
    """Return the FP16 graph, or the reason why there is none."""
    if precision == "int8" and opset_of(plain) < HALF_OPSET:
        return f"opset {opset_of(plain)} has no Quantize for FP16, which came with {HALF_OPSET}", None
    types = value_types(plain)
    if types is None:
        return "the graph holds other graphs, or values whose type can't be inferred", None
    half = to_half(plain, scratch, types, too_large_for_half(plain, scratch, types, batches, progress))
    onnx.save_model(half, scratch / _HALF_NAME)
    session = Session(scratch / _HALF_NAME)
    found = judged.agree(lambda batch: session.run(batch.feeds))
    if not found.upper <= limit:
        return f"FP16 alone changes the outputs by {found.upper:.3g}, at most {limit:.3g} is allowed", None
    return "", half
