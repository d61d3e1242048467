"""Add up the memory that an engine takes while it serves, from its description alone.

A line says how its number was come by: `exact` (counted), `measured` (by the project on x86-64 CPUs, with
SmolLM2-135M) or `assumed` (from public reports; nothing of it was measured on a Jetson).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edge_engines.checkpoint.spec import Float32, ModelSpec
from edge_engines.graph.head_padding import pad_heads
from edge_engines.planning.build_peak import build_peak
from edge_engines.planning.engine_file import onnx_bytes, plan_bytes
from edge_engines.planning.options import PlanOptions
from edge_engines.planning.weights import Stored, kv_bytes, list_stored

KV_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
PREFILL_ROWS = 256  # prompt tokens per step that activations are counted for; the daemon's default is 64
LOGIT_ROWS = 16  # rows of logits that a session allocates (BackendOptions.verify_rows)
# Resident size of the two processes of the daemon with their libraries: worker 64 MB, supervisor 36 MB and its threads.
PROCESS_BYTES = 110_000_000
# A loaded tokenizer: 650 to 740 bytes per token with vocabularies of 49,000 to 150,000.
TOKENIZER_BYTES_PER_ID = 800
# jetson.md §6: 65 MB per CUDA context, and what a peer's 0.6B engine takes besides weights and KV.
CUDA_CONTEXT_BYTES = 65_000_000
TENSORRT_SCRATCH_BYTES = 800_000_000

Basis = Literal["exact", "measured", "assumed"]


@dataclass(frozen=True, slots=True)
class Line:
    """One share of the memory."""

    what: str
    precision: str  # "" where there is none
    num_bytes: int
    basis: Basis


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one engine needs."""

    options: PlanOptions
    lines: tuple[Line, ...]
    engine_bytes: int  # graph and weights, or plan, on the disk
    build_peak_bytes: int  # of the machine that builds it
    step_bytes: int  # weights that one decode step reads
    kv_row_bytes: int  # KV that it reads per slot and valid position

    @property
    def needed(self) -> int:
        """Bytes in all while it serves."""
        return sum(line.num_bytes for line in self.lines)


def plan_memory(spec: ModelSpec, options: PlanOptions) -> MemoryPlan:
    """Return the plan of an engine. Raises BuildError for heads that the lowering can't take."""
    is_ort = options.target == "ort-cpu"
    lowered = spec.for_capacity(options.capacity)
    if options.is_ort_lowering:
        lowered, _ = pad_heads(lowered, _Unread())
    stored = tuple(list_stored(lowered, options.scheme, options.capacity))
    kv = kv_bytes(lowered, options.batch, options.capacity, KV_BYTES[options.kv])
    scratch = _scratch_bytes(lowered, options)
    on_device = scratch if is_ort else TENSORRT_SCRATCH_BYTES
    unpacked = _unpacked_lines(stored) if is_ort else _compiled_lines(stored)
    peak = build_peak(spec, stored, options.target, options.precision, kv_and_scratch=kv + scratch)
    return MemoryPlan(
        options=options,
        lines=(
            *_weight_lines(stored),
            *unpacked,
            Line(f"KV cache, {options.batch} x {options.capacity} tokens", options.kv, kv, "exact"),
            Line("activations and scratch", "", on_device, "measured" if is_ort else "assumed"),
            *_runtime_lines(spec, is_ort),
        ),
        engine_bytes=onnx_bytes(stored, len(spec.layers)) if is_ort else plan_bytes(stored),
        build_peak_bytes=peak,
        step_bytes=_step_bytes(stored, is_ort),
        kv_row_bytes=kv_bytes(lowered, 1, 1, KV_BYTES[options.kv]),
    )


class _Unread:
    """Weights that are never read: sizes are all a plan needs."""

    def tensor(self, name: str) -> Float32:
        """See Weights.tensor."""
        raise AssertionError(f"a plan reads no weights: {name}")


def _weight_lines(stored: Sequence[Stored]) -> list[Line]:
    """Return one line per part and precision, in graph order of their first appearance; norms and tables last."""
    sums: dict[tuple[str, str], int] = {}
    for item in sorted(stored, key=lambda s: s.part == "norms and tables"):
        precision = "" if item.part == "norms and tables" else item.form
        sums[item.part, precision] = sums.get((item.part, precision), 0) + item.num_bytes
    return [Line(part, precision, size, "exact") for (part, precision), size in sums.items()]


def _unpacked_lines(stored: Sequence[Stored]) -> list[Line]:
    """Return what ONNX Runtime makes of the weights while it loads them.

    It converts FP16 to FP32, both being there for a while; a tied table is packed for the head and kept for look-ups.
    """
    halves = [item.num_bytes for item in stored if item.form == "fp16"]
    lines = [Line("FP32 copy, made at load", "fp32", 2 * sum(halves), "measured")] if halves else []
    tied = [item for item in stored if item.part == "embedding and head" and item.form != "fp16"]
    return lines + [Line("table again, packed for the head", t.form, t.num_bytes, "measured") for t in tied]


def _compiled_lines(stored: Sequence[Stored]) -> list[Line]:
    overhead = plan_bytes(stored) - sum(item.num_bytes for item in stored)
    return [Line("kept by the compiler besides", "", overhead, "assumed")]


def _scratch_bytes(spec: ModelSpec, options: PlanOptions) -> int:
    """Return what a step takes in ONNX Runtime besides weights and KV: 18 MB for SmolLM2-135M at 512 tokens.

    Measured there: 16 to 18 MB. Builds for TensorRT run their graph in ONNX Runtime, too, when they verify it.
    """
    rows = min(PREFILL_ROWS, options.capacity)
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    per_row = 4 * spec.hidden + 2 * q + 2 * kv + 4 * spec.ffn  # residual, norm and its sums; qkv, mixed; gate, up
    scores = spec.num_heads * rows * options.capacity
    return 4 * (rows * per_row + scores + spec.vocab * LOGIT_ROWS)


def _runtime_lines(spec: ModelSpec, is_ort: bool) -> list[Line]:
    text = TOKENIZER_BYTES_PER_ID * spec.vocab
    processes = Line("processes, libraries and tokenizer", "", PROCESS_BYTES + text, "measured")
    return [processes] if is_ort else [processes, Line("CUDA context", "", CUDA_CONTEXT_BYTES, "assumed")]


def _step_bytes(stored: Sequence[Stored], is_ort: bool) -> int:
    """Return the weights that a step reads; ONNX Runtime reads the FP32 copy of what is stored in FP16."""
    return sum(
        item.num_bytes * (2 if is_ort and item.form == "fp16" else 1) for item in stored if not item.is_looked_up
    )
