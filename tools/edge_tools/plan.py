"""`edge-runtime plan`: will an engine of this model fit, and how fast can it be at most? Builds and loads nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from edge_runtime.errors import BuildError, UsageError
from edge_runtime.manifest import MANIFEST_NAME
from edge_tools.extras import needs_extra
from edge_tools.places import cache_folder
from edge_tools.plan_device import Device, find_device
from edge_tools.progress import shown_progress

if TYPE_CHECKING:
    from edge_engines.checkpoint.spec import ModelSpec
    from edge_engines.planning.alternatives import Alternative
    from edge_engines.planning.options import PlanOptions
    from edge_tools.plan_report import PlanReport

Target = Literal["ort-cpu", "tensorrt", "tensorrt-rtx"]
Precision = Literal["fp32", "fp16", "w8", "int8"]
Kv = Literal["fp32", "fp16", "int8"]


def plan(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Hugging Face folder, .gguf file, hf:org/name or smollm2-135m-instruct.",
            show_default=False,
        ),
    ],
    *,
    device: Annotated[
        str, typer.Option(help="A board such as orin-nano-8gb, or this: the machine that the command runs on.")
    ] = "this",
    target: Annotated[
        Target | None, typer.Option(help="What will run the engine; tensorrt on a board, ort-cpu here, if not given.")
    ] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Weights; fp32 for ort-cpu, fp16 for the others, if not given.")
    ] = None,
    kv: Annotated[
        Kv | None, typer.Option(help="KV cache; what the engine computes in, if not given.", show_default=False)
    ] = None,
    batch: Annotated[int, typer.Option(min=1, max=2, help="Slots: answers generated at the same time.")] = 2,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompt and answer per slot; 512, or what the model knows.")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option("--plan", help="A sensitivity.json: which layers are in INT8. All, if not given."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")] = False,
) -> None:
    """Say whether an engine will fit into a device's memory, before anything is built or loaded.

    Only the configuration and the shapes of the tensors are read. A tenth of the available memory is kept back. The
    exit status is 0 when serving the engine fits, 2 when it does not: then what would make it fit has been tried.

    Examples:

      edge-runtime plan smollm2-135m-instruct --precision w8

      edge-runtime plan ~/models/Qwen3-0.6B --device orin-nano-super-8gb --precision int8 --context 2048

      edge-runtime plan model.gguf --device orin-nano-4gb --plan sens/sensitivity.json --json
    """
    if (Path(checkpoint) / MANIFEST_NAME).is_file():
        raise UsageError(
            f"{checkpoint} is an engine, plan takes a checkpoint", remedy=f"see: edge-runtime inspect {checkpoint}"
        )
    with needs_extra("planning"):
        from edge_engines.checkpoint.open import open_checkpoint  # noqa: PLC0415  # heavy, and an optional extra
        from edge_engines.planning.options import choose_options  # noqa: PLC0415
        from edge_engines.recipe import source_of  # noqa: PLC0415
        from edge_engines.sources import resolve_source  # noqa: PLC0415
        from edge_tools.plan_report import as_json, make_report, shown  # noqa: PLC0415
    place = find_device(device)
    chosen_target = _check_target(target, place)
    with shown_progress() as progress:
        source = resolve_source(source_of(checkpoint), cache_folder(os.environ), progress)
    with open_checkpoint(source) as opened:
        spec = opened.spec
    options = choose_options(
        target=chosen_target, precision=precision, kv=kv, batch=batch, capacity=_check_context(context, spec),
        int8=_read_table(table, spec),
    )  # fmt: skip
    report = make_report(source.name, spec, options, place)
    if json:
        typer.echo(as_json(report))
    else:
        for part in shown(report):
            typer.echo(part)
    if not report.fit.is_enough:
        raise BuildError(report.fit.refusal(_engine(report, options)), remedy=_remedy(report.alternatives))


def _check_target(target: Target | None, device: Device) -> Target:
    """Return the target, the device's usual one when none is named."""
    if device.is_board and target == "tensorrt-rtx":
        raise UsageError(
            f"tensorrt-rtx has no engines for {device.name}: Jetson Orin is not among its GPUs",
            remedy="plan with --target tensorrt or ort-cpu",
        )
    return target or ("tensorrt" if device.is_board else "ort-cpu")


def _check_context(context: int | None, spec: ModelSpec) -> int:
    """Return the KV rows per slot, as a build would take them."""
    from edge_engines.build_options import DEFAULT_CAPACITY, MIN_CAPACITY  # noqa: PLC0415

    if context is None:
        return min(DEFAULT_CAPACITY, spec.max_positions)
    if not MIN_CAPACITY <= context <= spec.max_positions:
        raise BuildError(
            f"context {context} is outside {MIN_CAPACITY} to {spec.max_positions}, the positions this model knows",
            remedy=f"plan with --context {min(DEFAULT_CAPACITY, spec.max_positions)}",
        )
    return context


def _read_table(table: Path | None, spec: ModelSpec) -> frozenset[str] | None:
    if table is None:
        return None
    from edge_engines.planning.int8_units import read_int8_units  # noqa: PLC0415

    return read_int8_units(table, spec)


def _engine(report: PlanReport, options: PlanOptions) -> str:
    return (
        f"{report.model} in {options.precision} with {options.batch} x {options.capacity} tokens on "
        f"{report.device.name}"
    )


def _remedy(tried: tuple[Alternative, ...]) -> str:
    """Name what fits, or how near the nearest is."""
    from edge_runtime.memory import in_mb  # noqa: PLC0415

    enough = [f"{other.change} ({in_mb(other.needed)})" for other in tried if other.is_enough]
    if enough:
        return f"it fits with {' or '.join(enough)}"
    least = min(tried, key=lambda other: other.needed, default=None)
    if least is None:
        return "this is the smallest engine of this model: take a smaller model"
    return f"nothing that was tried fits, {least.change} still needs {in_mb(least.needed)}: take a smaller model"
