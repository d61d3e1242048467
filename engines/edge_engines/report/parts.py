"""Count the bytes of an engine by part: embedding, head, body by precision, the rest; as predicted and as written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx
from onnx import TensorProto

from edge_engines.report.data import Part
from edge_runtime.manifest import Manifest, UnitPrecision

BYTES_PER_WEIGHT = {"fp32": 4.0, "fp16": 2.0, "int8": 1.0, "w8": 1.0 + 4 / 64, "w4": 0.5 + 4 / 32}  # a scale per block
_NAMES = {"embed": "embedding", "head": "head", "table": "embedding and head, one table", "rest": "norms, tables"}
_BODY = {
    "int8": "body, INT8",
    "w8": "body, 8-bit weights",
    "w4": "body, 4-bit weights",
    "fp16": "body, FP16",
    "fp32": "body, FP32",
}


def list_parts(manifest: Manifest, graph: Path | None) -> list[Part]:
    """Return the parts of an engine, largest first.

    `graph` is the model.onnx beside its external data as it was written, before anything is compiled; None when it is
    not there. Predicted are the weights' sizes by precision, without scales, padding and the rest.
    """
    is_tied, predicted = False, _predict(manifest)
    real: Mapping[str, int] = {}
    if graph is not None:
        sizes = _initializer_bytes(graph)
        is_tied = any(name.startswith("table.") for name in sizes) or not any(
            name.startswith("head.") for name in sizes
        )
        real = _sum_by_part(sizes.items(), manifest.units)
    if is_tied:
        predicted, real = _as_table(predicted, False), _as_table(real, True)
    parts = [
        Part(key, _NAMES.get(key) or _BODY.get(key, f"body, {key}"), predicted.get(key), real.get(key))
        for key in {**predicted, **real}
    ]
    return sorted(parts, key=lambda part: -(part.real or part.predicted or 0))


def _predict(manifest: Manifest) -> dict[str, int]:
    """Return bytes per part from sizes and precisions alone."""
    found: Counter[str] = Counter()
    weights = _weights_per_kind(manifest)
    for unit in manifest.units:
        size = weights[unit.unit.rpartition(".")[2]] * BYTES_PER_WEIGHT[unit.precision]
        found[_part_of(unit)] += round(size)
    return dict(found)


def _weights_per_kind(manifest: Manifest) -> dict[str, int]:
    model, g = manifest.model, manifest.geometry
    queries, keys = model.heads * g.head_dim, g.kv_heads * g.head_dim
    return {
        "embed": g.vocab * model.hidden,
        "qkv": model.hidden * (queries + 2 * keys),
        "o": queries * model.hidden,
        "gate_up": 2 * model.hidden * model.ffn,
        "down": model.ffn * model.hidden,
        "head": g.vocab * model.hidden,
    }


def _initializer_bytes(graph: Path) -> dict[str, int]:
    """Return the bytes of every constant of a graph, without reading its external data."""
    model = onnx.load_model(str(graph), load_external_data=False)
    return {tensor.name: _size(tensor) for tensor in model.graph.initializer}


def _size(tensor: TensorProto) -> int:
    external = {entry.key: entry.value for entry in tensor.external_data}
    return int(external["length"]) if "length" in external else len(tensor.raw_data)


def _sum_by_part(sizes: Iterable[tuple[str, int]], units: Iterable[UnitPrecision]) -> dict[str, int]:
    """Sum constants over parts: the constants of a unit are called like it, with more words behind a dot."""
    parts = {"table": "table"} | {unit.unit: _part_of(unit) for unit in units}
    found: Counter[str] = Counter()
    for name, size in sizes:
        words = name.split(".")
        owners = (".".join(words[:n]) for n in range(len(words) - 1, 0, -1))
        found[next((parts[owner] for owner in owners if owner in parts), "rest")] += size
    return dict(found)


def _part_of(unit: UnitPrecision) -> str:
    return unit.unit if unit.unit in ("embed", "head") else unit.precision


def _as_table(sizes: Mapping[str, int], is_written: bool) -> dict[str, int]:
    """Join embedding and head, which share one table: predicted for each, written once."""
    table = [sizes.get(key, 0) for key in ("table", "embed", "head")]
    rest = {key: size for key, size in sizes.items() if key not in ("table", "embed", "head")}
    return {"table": sum(table) if is_written else max(table), **rest}
