"""Predict the most memory that building an engine takes, all processes of the build together."""

from __future__ import annotations

from collections.abc import Sequence

from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.compile.memory import needed_memory
from edge_engines.describe import num_parameters
from edge_engines.planning.weights import Stored

BASE_BYTES = 100_000_000  # the builder's process and libraries, measured
PROBE_BYTES = 64_000_000  # the process that runs the graph for verification, measured
EXPORT_PER_FP32_BYTE = 1.1  # reading, converting and writing the weights, measured with SmolLM2-135M
# Measuring and choosing INT8 units: the model in FP32, and the logits of the ranking text. A bound (quantization.md §7,
# test 16), not a measurement.
CHOICE_PER_FP32_BYTE = 2.0


def build_peak(spec: ModelSpec, stored: Sequence[Stored], target: str, precision: str, *, kv_and_scratch: int) -> int:
    """Return the largest of the steps: choosing INT8 units, export, verification by ONNX Runtime, compilation.

    `stored` are the weights of the engine; `kv_and_scratch` is what running it takes besides them.
    """
    fp32 = 4 * num_parameters(spec)
    steps = [EXPORT_PER_FP32_BYTE * fp32, PROBE_BYTES + _loaded_bytes(stored) + kv_and_scratch]
    if precision == "int8":
        steps.append(CHOICE_PER_FP32_BYTE * fp32)
    if target != "ort-cpu":
        steps.append(needed_memory(sum(item.num_bytes for item in stored)))
    return int(BASE_BYTES + max(steps))


def _loaded_bytes(stored: Sequence[Stored]) -> int:
    """Return what ONNX Runtime holds of the weights: FP16 is converted to FP32, a tied table is kept twice."""
    return sum(
        item.num_bytes * (3 if item.form == "fp16" else 2 if item.part == "embedding and head" else 1)
        for item in stored
    )
