"""Show a comparison: a table for people, one record for machines."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from compare.ratios import Figure
from edge_tools.bench.machine import Load, Machine


@dataclass(frozen=True, slots=True)
class PeerTrial:
    """One form of the peer, and its time in the trial that chose among them; 0 when there was no choice."""

    build: str
    spinning: bool
    answer_ms: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One run. This is the JSON line."""

    schema: int
    model: str
    machine: Machine
    ours: dict[str, str]
    peer: dict[str, str]
    peer_trials: list[PeerTrial]
    peer_form: PeerTrial
    peer_precision: str
    same_tokens: dict[str, int]  # "BATCHxPROMPT" -> first tokens that agree
    rounds: int
    tokens: int  # decoded after each prompt and round
    figures: list[Figure]
    load: Load


def table(comparison: Comparison) -> Table:
    """Return the figures, with what was compared in the caption."""
    machine, peer, form = comparison.machine, comparison.peer, comparison.peer_form
    shown = Table(
        title=f"Ours against ONNX Runtime GenAI {peer['onnxruntime-genai']}, {comparison.peer_precision}",
        title_justify="left",
    )
    for name in ("step", "batch", "prompt", "ours ms", "theirs ms", "theirs / ours", "middle half", "target"):
        shown.add_column(name, justify="left" if name == "step" else "right")
    for figure in comparison.figures:
        shown.add_row(
            figure.kind,
            str(figure.batch),
            str(figure.prompt_tokens),
            f"{figure.ours_ms:.1f}",
            f"{figure.theirs_ms:.1f}",
            f"{figure.ratio:.2f}",
            f"{figure.ratio_low:.2f} to {figure.ratio_high:.2f}",
            f"{'met' if figure.met else 'missed'} ({figure.target:g})",
        )
    shown.caption_justify = "left"
    shown.caption = (
        f"{comparison.model}; {machine.cpu}, {machine.threads} threads each, {machine.bandwidth_gb_s} GB/s; "
        f"{comparison.rounds} rounds\n"
        f"peer: build {form.build}, spinning {'on' if form.spinning else 'off'}, ONNX Runtime {peer['onnxruntime']}; "
        f"ours: ONNX Runtime {comparison.ours['version']}\n"
        f"other programs used {comparison.load.others_share:.0%} of the processors; a step of batch 2 serves both"
    )
    return shown
