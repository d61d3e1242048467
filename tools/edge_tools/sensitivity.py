"""`edge-runtime sensitivity`: measure what INT8 does to each layer of a model, and choose; builds nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table as RichTable

from edge_tools.extras import needs_extra
from edge_tools.places import cache_folder
from edge_tools.progress import shown_progress

if TYPE_CHECKING:
    from edge_engines.sensitivity.table import Table

SHOWN = 12  # units in the printed table: the most sensitive ones
JOURNAL = "measurements"  # folder in the cache, the one that builds use


def sensitivity(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="Hugging Face folder, .gguf file, hf:org/name or a known model such as smollm2-135m-instruct.",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for sensitivity.json.", show_default=False)],
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Your own prompts: UTF-8 text, .jsonl of chats, or token ids as .npy; best close to real use."
        ),
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Largest relative error of a layer's output that INT8 may cause.")
    ] = 0.1,
    gate: Annotated[
        float, typer.Option(min=1, max=2, help="Largest perplexity of the whole, as a multiple of the baseline's.")
    ] = 1.05,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Measure everything again; keep nothing for the next run.")
    ] = False,
) -> None:
    """Measure how each layer of a model takes INT8 and choose which ones may run it; no engine is built.

    Every unit (a fused projection of a layer, embedding, head) is run in simulated INT8 alone: its own error and its
    exact effect on the model's answer are measured. Then as many as possible keep INT8 while the perplexity stays
    below the gate with 95 % confidence. Takes minutes for a 135M model on two cores, and up to twice as many bytes as
    the model has in FP32. Results are kept in the user's cache: a run that was ended goes on where it stood.

    Examples:

      edge-runtime sensitivity smollm2-135m-instruct -o sens/

      edge-runtime sensitivity ~/models/Qwen3-0.6B -o sens/ --calibration prompts.txt
    """
    with needs_extra("measuring"):
        from edge_engines.recipe import source_of  # noqa: PLC0415
        from edge_engines.sensitivity.command import measure_checkpoint  # noqa: PLC0415  # heavy, an optional extra
        from edge_engines.sensitivity.table import write_table  # noqa: PLC0415
        from edge_engines.sources import resolve_source  # noqa: PLC0415
    with shown_progress() as progress:
        source = resolve_source(source_of(checkpoint), cache_folder(os.environ), progress)
        table = measure_checkpoint(
            source,
            calibration=calibration,
            threshold=threshold,
            gate=gate,
            progress=progress,
            journal=None if no_cache else cache_folder(os.environ) / JOURNAL,
        )
    path = write_table(out, table)
    _show(table)
    typer.echo(f"written: {path}")


def _show(table: Table) -> None:
    shown = sorted(table.units, key=lambda unit: -unit.kl)[:SHOWN]
    title = f"Most sensitive of {len(table.units)} units"
    rows = RichTable(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))  # fits 80 columns
    for head in ("unit", "error", "per token", "unsmoothed", "KL", "runs", "why"):
        rows.add_column(head, no_wrap=True)
    for unit in shown:
        rows.add_row(
            unit.unit,
            f"{unit.pooled_error:.3f}",
            f"{unit.per_token_error:.3f}",
            f"{unit.score_without_smoothing:.3f}",
            f"{unit.kl:.5f}",
            unit.precision,
            unit.reason,
        )
    Console(soft_wrap=True, highlight=False).print(rows)
    gate = table.gate
    typer.echo(
        f"INT8: {100 * table.int8_share:.1f} % of the body's weights; perplexity x {gate.ratio:.4f} of "
        f"{gate.base_perplexity:.2f}, with 95 % confidence at most x {gate.upper:.4f} (limit {gate.limit:g}); "
        f"same likeliest token {100 * gate.same_top1:.1f} %"
    )
    rule = table.rule_only
    if rule is not None:
        typer.echo(
            f"the rule of {table.threshold:g} alone, nothing smoothed: perplexity x {rule.ratio:.4f}, at most "
            f"x {rule.upper:.4f}, with {100 * rule.int8_share:.1f} % in INT8"
        )
    typer.echo(
        f"took {table.seconds:.0f} s: {table.model_passes:.0f} passes over the ranking text, "
        f"{table.cache_hits} results from the cache"
    )
