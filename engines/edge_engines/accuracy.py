"""Measure how well an engine predicts a text, alone or against another engine of the same model.

Both run as a user would run them: their files, in ONNX Runtime, on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import Float32
from edge_engines.perplexity import Ratio, perplexity, perplexity_ratio, token_losses
from edge_engines.progress import Progress
from edge_engines.sensitivity.command import FIXED_NOW
from edge_engines.sensitivity.gate import BOOTSTRAP_SEED
from edge_engines.sensitivity.measure import compare_rows, log_probabilities
from edge_engines.text_run import engine_logits
from edge_engines.texts.sets import DEFAULT_SIZES, TextSizes, load_text_sets
from edge_runtime.backends import check_loadable
from edge_runtime.errors import UsageError
from edge_runtime.manifest import Manifest, read_manifest
from edge_runtime.session.text import TextCodec


@dataclass(frozen=True, slots=True)
class Agreement:
    """An engine against another, token by token of one text."""

    ratio: Ratio  # perplexity by that of the other
    kl: float  # mean divergence from the other's distribution, nats per token
    largest_kl: float
    same_top1: float  # share of tokens whose likeliest next token is the same


@dataclass(frozen=True, slots=True)
class Accuracy:
    """What was measured of one engine."""

    tokens: int  # that were predicted
    perplexity: float
    finite: bool  # no logit was NaN or infinite
    agreement: Agreement | None  # None: there was no other engine


def measure_accuracy(
    engine: Path,
    against: Path | None,
    *,
    text: Path | None,
    progress: Progress,
    sizes: TextSizes = DEFAULT_SIZES,
) -> Accuracy:
    """Run the gate's text through `engine`, and through the engine `against`.

    `text` is the user's own text, chats or token ids; None: the shipped texts. Raises EngineRefusedError, UsageError
    for engines of different models, BuildError when one does not run.
    """
    manifest = _read_loadable(engine)
    other = _read_loadable(against) if against is not None else None
    if other is not None:
        _check_same_model(engine, manifest, against, other)
    longest = min(m.geometry.capacity for m in (manifest, other) if m is not None)
    ids = _gate_ids(engine, manifest, text, sizes.within(longest))
    progress.step("running the text through the engine" + ("s" if other else ""), len(ids))
    if against is None or other is None:
        losses, is_finite = _losses_alone(engine_logits(engine, manifest, ids), ids, progress)
        return Accuracy(losses.size, perplexity(losses), is_finite, None)
    pairs = zip(engine_logits(engine, manifest, ids), engine_logits(against, other, ids), strict=True)
    return _compare(pairs, ids, progress)


def _read_loadable(engine: Path) -> Manifest:
    manifest = read_manifest(engine)
    check_loadable(engine, manifest)
    return manifest


def _check_same_model(engine: Path, manifest: Manifest, against: Path | None, other: Manifest) -> None:
    if manifest.geometry.vocab != other.geometry.vocab:
        raise UsageError(
            f"{engine} knows {manifest.geometry.vocab} ids, {against} {other.geometry.vocab}: they are of different "
            f"models",
            remedy="compare engines of one checkpoint",
        )


def _gate_ids(engine: Path, manifest: Manifest, text: Path | None, sizes: TextSizes) -> NDArray[np.int64]:
    vocab = manifest.geometry.vocab
    if not manifest.model.has_text:
        return load_text_sets(None, None, vocab, user_file=text, sizes=sizes).gate.ids
    codec = TextCodec.load(engine, now=lambda: FIXED_NOW)
    chat = codec.encode_chat if (engine / "chat_template.jinja").exists() else None
    return load_text_sets(codec.encode, chat, vocab, user_file=text, sizes=sizes).gate.ids


def _losses_alone(
    runs: Iterator[Float32], ids: NDArray[np.int64], progress: Progress
) -> tuple[NDArray[np.float64], bool]:
    losses, is_finite = np.empty((len(ids), ids.shape[1] - 1)), True
    for i, logits in enumerate(runs):
        losses[i] = token_losses(logits, ids[i])
        is_finite = is_finite and bool(np.isfinite(logits).all())
        progress.advance(1)
    return losses, is_finite


def _compare(pairs: Iterator[tuple[Float32, Float32]], ids: NDArray[np.int64], progress: Progress) -> Accuracy:
    losses, other_losses = (np.empty((len(ids), ids.shape[1] - 1)) for _ in range(2))
    divergences, agreements, is_finite = [], [], True
    for i, (logits, other) in enumerate(pairs):
        losses[i], other_losses[i] = token_losses(logits, ids[i]), token_losses(other, ids[i])
        is_finite = is_finite and bool(np.isfinite(logits).all())
        divergence, same = compare_rows(log_probabilities(other), logits)
        divergences.append(divergence)
        agreements.append(same)
        progress.advance(1)
    divergence = np.concatenate(divergences)
    return Accuracy(
        tokens=losses.size,
        perplexity=perplexity(losses),
        finite=is_finite,
        agreement=Agreement(
            ratio=perplexity_ratio(other_losses, losses, seed=BOOTSTRAP_SEED),
            kl=float(divergence.mean()),
            largest_kl=float(divergence.max()),
            same_top1=float(np.concatenate(agreements).mean()),
        ),
    )
