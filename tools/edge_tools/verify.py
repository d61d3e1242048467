"""`edge-runtime verify`: check an engine's files, run it, and say how well it predicts, alone or against another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from edge_runtime.errors import EngineRefusedError
from edge_runtime.manifest import GateFacts, read_manifest
from edge_tools.extras import needs_extra
from edge_tools.progress import shown_progress

if TYPE_CHECKING:
    from edge_engines.accuracy import Accuracy

SAME = 0.01  # relative difference of perplexities that other kernels and versions make; a broken engine is far beyond


def verify(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine folder.", show_default=False)],
    *,
    against: Annotated[
        Path | None, typer.Option(help="Engine of the same checkpoint to compare with, e.g. one built with fp32.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text to predict: UTF-8, .jsonl of chats or token ids as .npy. The shipped texts if not given."
        ),
    ] = None,
    gate: Annotated[
        float, typer.Option(min=1, max=2, help="Largest perplexity, as a multiple of the other engine's.")
    ] = 1.05,
    json: Annotated[bool, typer.Option("--json", help="Print the measurements as one JSON object.")] = False,
) -> None:
    """Check an engine's files, run a text through it on this machine, and say how well it predicts that text.

    An INT8 engine built with the shipped texts is held against what it gave when it was built, so another CPU or
    library that computes otherwise is noticed. With --against, the perplexities of two engines are compared under the
    gate, with their distributions token by token. Ends with status 78 when the engine fails.

    Examples:

      edge-runtime verify out/

      edge-runtime verify int8/ --against fp32/ --text prompts.txt
    """
    with needs_extra("verifying"):
        from edge_engines.accuracy import measure_accuracy  # noqa: PLC0415  # heavy, an optional extra
    with shown_progress() as progress:
        found = measure_accuracy(engine, against, text=text, progress=progress)
    built = read_manifest(engine, check_digests=False).gate if text is None and against is None else None
    if json:
        typer.echo(msgspec.json.encode(found))
    else:
        typer.echo(f"{engine}: files are whole; perplexity {found.perplexity:.3f} on {found.tokens} tokens")
        _show(found, against, built)
    _judge(engine, found, gate, built)


def _show(found: Accuracy, against: Path | None, built: GateFacts | None) -> None:
    if built and built.tokens == found.tokens:
        typer.echo(f"when it was built it gave {_expected(built):.3f}")
    if agreement := found.agreement:
        ratio = agreement.ratio
        typer.echo(
            f"against {against}: perplexity x {ratio.ratio:.4f}, with 95 % confidence at most x {ratio.upper:.4f}; "
            f"KL {agreement.kl:.5f} (largest {agreement.largest_kl:.3f}); same likeliest token "
            f"{100 * agreement.same_top1:.1f} %"
        )


def _judge(engine: Path, found: Accuracy, gate: float, built: GateFacts | None) -> None:
    """Raise EngineRefusedError for an engine that fails."""
    if not found.finite:
        raise EngineRefusedError(f"{engine}: logits are NaN or infinite", remedy="build it again with other options")
    if found.agreement and not found.agreement.ratio.upper <= gate:
        raise EngineRefusedError(
            f"{engine}: the perplexity is at most x {found.agreement.ratio.upper:.4f} of the other engine's, "
            f"{gate:g} is allowed",
            remedy="build it with more units in float, or raise --gate knowingly",
        )
    if built and built.tokens == found.tokens and abs(found.perplexity / _expected(built) - 1) > SAME:
        raise EngineRefusedError(
            f"{engine}: perplexity {found.perplexity:.3f}, when it was built {_expected(built):.3f}: this machine "
            f"computes otherwise",
            remedy="build the engine again on this machine",
        )


def _expected(built: GateFacts) -> float:
    return built.base_perplexity * built.ratio
