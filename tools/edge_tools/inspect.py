"""`edge-runtime inspect`: say what an engine folder holds, and check it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from edge_engines.onnx_model.manifest import is_onnx_engine
from edge_runtime.manifest import Manifest, read_manifest
from edge_tools.inspect_network import show_network
from edge_tools.progress import shown_progress


def inspect(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine folder.", show_default=False)],
    json: Annotated[bool, typer.Option("--json", help="Print the manifest as one JSON object.")] = False,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare every file with its SHA-256.")] = True,
) -> None:
    """Say what an engine folder holds and whether its files are whole; nothing of it is loaded.

    Examples:

      edge-runtime inspect out/

      edge-runtime inspect out/ --json --no-verify
    """
    if is_onnx_engine(engine):
        show_network(engine, json=json)
        return
    if verify:
        with shown_progress() as progress:
            progress.step("checking files", _bytes_listed(engine))
            manifest = read_manifest(engine, progress=progress.advance)
    else:
        manifest = read_manifest(engine, check_digests=False)
    if json:
        typer.echo(msgspec.json.encode(manifest))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(_facts(manifest, engine))
    console.print(_units(manifest))
    console.print(_files(manifest))


def _bytes_listed(engine: Path) -> int:
    return sum(entry.size for entry in read_manifest(engine, check_digests=False).files)


def _facts(manifest: Manifest, engine: Path) -> Table:
    g, model, made = manifest.geometry, manifest.model, manifest.build
    table = Table(title=str(engine), show_header=False, title_justify="left")
    rows = {
        "model": f"{model.name} ({model.family}, {model.parameters / 1e6:.1f} M parameters)",
        "source": f"{model.source}  sha256 {model.checkpoint_sha256[:16]}…",
        "target": f"{manifest.target}, lowering {manifest.lowering}",
        "precision": f"{manifest.precision}, KV cache {manifest.kv_dtype}",
        "geometry": f"{g.layers} layers, {model.heads} heads over {g.kv_heads} of size {g.head_dim}, {g.vocab} ids",
        "capacity": f"{g.max_batch} slots x {g.capacity} tokens",
        "memory": f"weights {mib(manifest.weight_bytes)}, KV buffers {mib(manifest.kv_bytes)}",
        "text": "tokenizer and chat template included" if model.has_text else "no tokenizer: token ids only",
        "verified": _verified(manifest),
        "accuracy": _accuracy(manifest),
        "built": f"{made.created} by edge-runtime {made.tool_version} in {made.seconds:.1f} s",
        "versions": ", ".join(f"{name} {version}" for name, version in sorted(made.versions.items())),
    }
    for name, value in (rows | _compiled(manifest)).items():
        table.add_row(name, value)
    return table


def _verified(manifest: Manifest) -> str:
    """Say how the engine compared with the reference when it was built."""
    facts = manifest.verify
    if facts is None:
        return "not compared with the reference"
    agrees = "same" if facts.same_top1 else "another"
    said = f"error {facts.relative_error:.2g} on {facts.tokens} tokens (limit {facts.limit:g}), {agrees} first token"
    return said if facts.subject == "engine" else f"{said}; the graph before it was compiled, the plan was not run"


def _accuracy(manifest: Manifest) -> str:
    """Say how an engine with INT8 in it predicts text, against the FP32 model."""
    facts = manifest.gate
    if facts is None:
        return "not measured: see edge-runtime verify --help"
    return (
        f"perplexity x {facts.ratio:.4f} of the FP32 model's {facts.base_perplexity:.2f}, with 95 % confidence at "
        f"most x {facts.upper:.4f} (limit {facts.limit:g}), on {facts.tokens} tokens"
    )


def _compiled(manifest: Manifest) -> dict[str, str]:
    """Say what the graph was compiled for, and with what."""
    facts = manifest.compiled
    if facts is None:
        return {}
    profiles = [
        f"{profile.name} "
        + " ".join(f"{axis}={r.least}..{r.most}" for axis, r in profile.axes.items() if r.least != r.most)
        for profile in facts.profiles
    ]
    return {
        "compiled": f"{manifest.graph} by {facts.module} {facts.version} in {facts.seconds:.1f} s, at most "
        f"{mib(facts.peak_memory_bytes)} of memory",
        "runs on": f"compute capability {', '.join(facts.compute_capabilities)}",
        "built on": facts.device or "a machine without a GPU",
        "profiles": ", ".join(profiles),
        "layers": facts.inspection,
        **({"int8": facts.int8} if facts.int8 else {}),
    }


def _units(manifest: Manifest) -> Table:
    table = Table("precision", "units", "why", title="Precision by unit", title_justify="left")
    counted = Counter((unit.precision, unit.reason) for unit in manifest.units)
    for (precision, reason), count in counted.most_common():
        table.add_row(precision, str(count), reason)
    return table


def _files(manifest: Manifest) -> Table:
    table = Table("file", "size", "sha256", title="Files", title_justify="left")
    for entry in manifest.files:
        table.add_row(entry.name, mib(entry.size), f"{entry.sha256[:16]}…")
    return table


def mib(size: int) -> str:
    """Write a number of bytes in MiB."""
    return f"{size / 2**20:.1f} MiB"
