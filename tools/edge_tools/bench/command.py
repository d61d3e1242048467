"""`edge-runtime bench`: measure an engine on this machine."""

from __future__ import annotations

from collections.abc import Set
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
from rich.console import Console

from edge_runtime.backends import BackendOptions, open_backend
from edge_runtime.errors import UsageError
from edge_runtime.manifest import MANIFEST_NAME, Manifest, digest_file, read_manifest
from edge_tools.bench.bed import Bed
from edge_tools.bench.report import EngineFacts, shown
from edge_tools.bench.run import SERVING, SUITES, measure
from edge_tools.broker import has_broker
from edge_tools.progress import Shown, shown_progress

Suite = Literal["decode", "prefill", "batch", "context", "mqtt", "cold", "all"]


def bench(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine folder.", show_default=False)],
    suite: Annotated[Suite, typer.Option(help="What to measure.")] = "all",
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result as JSON to this file too.")
    ] = None,
    threads: Annotated[int, typer.Option(min=0, max=256, help="Threads of the engine; 0 means physical cores.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random token ids.")] = 0,
) -> None:
    """Measure an engine on this machine: decode, prefill, batch, context length, the way over MQTT, the cold start.

    The read bandwidth is measured first, and decode is shown as a share of that limit. Tables are for people; the last
    line of the output is one JSON object.

    Examples:

      edge-runtime bench out/

      edge-runtime bench out/ --suite decode --threads 1 --json result.json
    """
    if json and not json.absolute().parent.is_dir():
        raise UsageError(f"--json {json}: no such folder", remedy="create it first")
    manifest = read_manifest(engine)
    with shown_progress() as progress:
        progress.step("loading the engine", None)
        with closing(Bed(open_backend(engine, manifest, BackendOptions(threads)), seed)) as bed:
            facts = _facts(engine, manifest, bed.facts())
            report = measure(bed, facts, _chosen(suite, manifest, progress), progress)
    console = Console(highlight=False)
    for part in shown(report):
        console.print(part, soft_wrap=isinstance(part, str))
    if report.load.busy:
        console.print(
            "warning: the machine was busy with other programs; measure again when it is quiet", soft_wrap=True
        )
    line = msgspec.json.encode(report)
    if json:
        json.write_bytes(line + b"\n")
    typer.echo(line)


def _chosen(suite: Suite, manifest: Manifest, progress: Shown) -> Set[str]:
    """Return the suites to run; `all` leaves out what this machine or engine can't do, and says so."""
    if suite != "all":
        return {suite}
    if has_broker() and manifest.model.has_text:
        return SUITES | SERVING
    progress.note(
        "mqtt and cold are left out: they need a broker (mosquitto or iotcore) and an engine with a tokenizer"
    )
    return SUITES


def _facts(engine: Path, manifest: Manifest, backend: dict[str, str]) -> EngineFacts:
    return EngineFacts(
        folder=str(engine),
        manifest_sha256=digest_file(engine / MANIFEST_NAME),
        model=manifest.model.name,
        target=manifest.target,
        precision=manifest.precision,
        lowering=manifest.lowering,
        capacity=manifest.geometry.capacity,
        slots=manifest.geometry.max_batch,
        weight_bytes=manifest.weight_bytes,
        backend=backend,
    )
