"""Run a build: join flags, recipe and defaults, call the engine builder, say what was built and what to do next."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import typer

from edge_engines.compile.tensorrt import CompileOptions
from edge_engines.int8_build import Int8Options
from edge_engines.onnx_model.build import build_onnx_model
from edge_engines.pipeline import build
from edge_engines.recipe import Recipe, find_recipe
from edge_engines.report.data import Board
from edge_engines.sensitivity.select import GATE, THRESHOLD
from edge_engines.sources import resolve_source
from edge_jetson.boards import BOARDS
from edge_runtime.errors import UsageError
from edge_runtime.manifest import Manifest
from edge_tools.inspect_network import accuracy_line
from edge_tools.places import cache_folder
from edge_tools.progress import shown_progress

DEFAULTS = Recipe(
    source="", target="ort-cpu", precision="int8", kv="float", batch=2, threshold=THRESHOLD
)  # the gate's depends on what is built


@dataclass(frozen=True, slots=True)
class Places:
    """Where a build writes, and what it may take from earlier ones."""

    out: Path
    force: bool
    uses_cache: bool
    timing_caches: Path | None


def as_text(path: Path | None) -> str | None:
    """Return a path as a recipe holds it."""
    return None if path is None else str(path)


def build_decoder(flags: Recipe, places: Places) -> None:
    """Build a language model from a checkpoint or a recipe."""
    recipe = find_recipe(flags.source)
    wanted = DEFAULTS.overridden_by(recipe).overridden_by(flags) if recipe else DEFAULTS.overridden_by(flags)
    source = recipe.source if recipe else flags.source
    cache = cache_folder(os.environ)
    with shown_progress() as progress:
        if recipe:
            progress.note(f"recipe {flags.source}: {recipe.about}")
        manifest = build(
            resolve_source(source, cache, progress),
            places.out,
            target=wanted.target or "ort-cpu",
            precision=wanted.precision or "int8",
            lowering=wanted.lowering,
            kv=wanted.kv or "float",
            objective=wanted.objective or "bytes",
            capacity=wanted.capacity,
            max_batch=wanted.batch or 2,
            name=wanted.name,
            force=places.force,
            progress=progress,
            int8_options=Int8Options(
                calibration=Path(wanted.calibration) if wanted.calibration else None,
                plan=Path(wanted.plan) if wanted.plan else None,
                threshold=THRESHOLD if wanted.threshold is None else wanted.threshold,
                gate=_decoder_gate(wanted.gate),
                journal=cache / "measurements" if places.uses_cache else None,
            ),
            compile_options=_compile_options(wanted, places),
            boards=_boards(),
        )
    _say_decoder(places.out, manifest)


def build_network(flags: Recipe, places: Places, inputs: Path | None) -> None:
    """Build any other network from an .onnx file and samples of its inputs."""
    for field in ("objective", "lowering", "kv", "capacity", "batch", "calibration", "plan"):
        if getattr(flags, field) is not None:
            raise UsageError(f"--{field} is for language models", remedy=f"leave it out for {flags.source}")
    wanted = DEFAULTS.overridden_by(flags)
    precision = wanted.precision or "int8"
    if precision == "w8" or precision == "auto":  # noqa: PLR1714  # so that mypy follows
        raise UsageError(f"precision {precision} is for language models", remedy="choose from: int8, fp16, fp32")
    with shown_progress() as progress:
        manifest = build_onnx_model(
            Path(flags.source),
            places.out,
            inputs=inputs,
            target=wanted.target or "ort-cpu",
            precision=precision,
            gate=wanted.gate,
            threshold=THRESHOLD if wanted.threshold is None else wanted.threshold,
            name=wanted.name,
            force=places.force,
            progress=progress,
            compile_options=_compile_options(wanted, places),
        )
    typer.echo(
        f"built {places.out}: {manifest.name}, {manifest.precision}, {100 * manifest.int8_share:.1f} % of the units' "
        f"weights in INT8, in {manifest.build.seconds:.1f} s"
    )
    typer.echo(accuracy_line(manifest))
    typer.echo(f"look at it with: edge-runtime inspect {places.out}")


def _decoder_gate(gate: float | None) -> float:
    if gate is None:
        return GATE
    if gate < 1:
        raise UsageError(f"gate {gate:g} is below 1", remedy="it is a multiple of the baseline's perplexity, e.g. 1.05")
    return gate


def _compile_options(wanted: Recipe, places: Places) -> CompileOptions:
    return CompileOptions(
        compute_capabilities=tuple(dict.fromkeys(wanted.compute_capability or ())),
        optimization_level=wanted.optimization_level,
        workspace_bytes=wanted.workspace_mib * 2**20 if wanted.workspace_mib else None,
        timing_caches=places.timing_caches or cache_folder(os.environ) / "timing",
        plans=cache_folder(os.environ) / "plans" if places.uses_cache else None,
    )


def _boards() -> list[Board]:
    """Return each module in its default power mode and its highest, for the speed limits of the report."""
    return [
        Board(board.name, mode.name, board.bandwidth_gb_s(mode))
        for board in BOARDS
        for mode in board.modes
        if mode.name in (board.default_mode, board.modes[-1].name)
    ]


def _say_decoder(out: Path, manifest: Manifest) -> None:
    typer.echo(
        f"built {out}: {manifest.model.name}, {manifest.precision}, {manifest.weight_bytes / 1e6:.0f} MB of weights, "
        f"{manifest.geometry.max_batch} x {manifest.geometry.capacity} tokens, in {manifest.build.seconds:.1f} s"
    )
    if chosen := manifest.gate:
        counted = Counter(unit.precision for unit in manifest.units).most_common()
        typer.echo(
            f"units: {', '.join(f'{count} {form}' for form, count in counted)}; perplexity x {chosen.ratio:.4f} of the "
            f"FP32 model's, with 95 % confidence at most x {chosen.upper:.4f} (limit {chosen.limit:g})"
        )
    typer.echo(f"what was measured and chosen: {out / 'report.html'}")
    if compiled := manifest.compiled:
        typer.echo(
            f"made {manifest.graph} for compute capability {', '.join(compiled.compute_capabilities)} with "
            f"{compiled.module} {compiled.version}; its graph was verified, the plan was not run"
        )
        typer.echo(f"this version can't serve it yet; look at it with: edge-runtime inspect {out}")
    else:
        typer.echo(f"serve it with: edge-runtime serve --engine {out}")
