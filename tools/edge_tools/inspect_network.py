"""Show an engine that was built from any ONNX model."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from edge_engines.onnx_model.manifest import OnnxManifest, read_onnx_manifest


def show_network(engine: Path, *, json: bool) -> None:
    """Print what the folder holds; its files are compared with their digests."""
    manifest = read_onnx_manifest(engine)
    if json:
        typer.echo(msgspec.json.encode(manifest))
        return
    console = Console(soft_wrap=True, highlight=False)
    table = Table(title=str(engine), show_header=False, title_justify="left")
    for name, value in _facts(manifest).items():
        table.add_row(name, value)
    console.print(table)
    units = Table("precision", "units", "why", title="Precision by unit", title_justify="left")
    for (precision, reason), count in Counter((unit.precision, unit.reason) for unit in manifest.units).most_common():
        units.add_row(precision, str(count), reason)
    if manifest.units:
        console.print(units)


def accuracy_line(manifest: OnnxManifest) -> str:
    """Say how the outputs agree with those of the original."""
    found = manifest.agreement
    return (
        f"outputs differ from the FP32 original's by {found.error:.3f} on average, with 95 % confidence at most "
        f"{found.upper:.3f} (limit {found.limit:g}); cosine {found.cosine:.4f}, on {found.samples} samples"
    )


def _facts(manifest: OnnxManifest) -> dict[str, str]:
    made = manifest.build
    facts = {
        "network": f"{manifest.name}, from {manifest.source}, opset {manifest.opset}",
        "target": manifest.target,
        "precision": f"{manifest.precision}, {100 * manifest.int8_share:.1f} % of the units' weights in INT8, floats "
        f"{manifest.float_parts}",
        "size": f"weights {manifest.weight_bytes / 1e6:.1f} MB, the original {manifest.source_bytes / 1e6:.1f} MB",
        "inputs": ", ".join(f"{value.name} {value.dtype} {value.shape}" for value in manifest.inputs),
        "outputs": ", ".join(f"{value.name} {value.dtype} {value.shape}" for value in manifest.outputs),
        "accuracy": accuracy_line(manifest),
        "built": f"{made.created} by edge-runtime {made.tool_version} in {made.seconds:.1f} s",
    }
    if manifest.compiled:
        plan = manifest.compiled
        facts["compiled"] = (
            f"{manifest.graph} by {plan.module} {plan.version}, for {', '.join(plan.compute_capabilities)}"
        )
    return facts | ({"warnings": " | ".join(manifest.warnings)} if manifest.warnings else {})
