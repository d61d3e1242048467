"""Choose the three disjoint texts of a quantised build: for calibration, for ranking and for the gate.

Sequences are full, so nothing is padded; they take turns over the domains. Same text and tokenizer, same sets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_engines.texts.cut import EncodeChat, EncodeText, cut
from edge_engines.texts.domains import USER, Domain, shipped_domains, user_domain
from edge_engines.texts.token_ids import read_token_ids
from edge_runtime.errors import BuildError, UsageError


@dataclass(frozen=True, slots=True)
class SetSize:
    """`count` sequences of `length` ids, prefix included."""

    count: int
    length: int

    def within(self, capacity: int) -> SetSize:
        """Return a set of at least as many ids whose sequences fit in `capacity` positions."""
        length = min(self.length, capacity)
        return SetSize(-(-self.count * self.length // length), length)


@dataclass(frozen=True, slots=True)
class TextSizes:
    """How much text each set takes."""

    calibration: SetSize = SetSize(48, 128)  # many beginnings and all domains: ranges are about variety
    ranking: SetSize = SetSize(6, 128)  # one sequence of each shipped domain
    gate: SetSize = SetSize(18, 512)  # three sequences of each shipped domain, at least 8,192 judged tokens

    def within(self, capacity: int) -> TextSizes:
        """Return sizes for a model that knows `capacity` positions only; the number of ids doesn't shrink."""
        return TextSizes(self.calibration.within(capacity), self.ranking.within(capacity), self.gate.within(capacity))


DEFAULT_SIZES = TextSizes()


@dataclass(frozen=True, slots=True)
class TextSet:
    """One text, ready for the model."""

    ids: NDArray[np.int64]  # [N, S], read-only
    domains: tuple[str, ...]  # of each sequence
    digest: str  # SHA-256 of shape and ids, hex


@dataclass(frozen=True, slots=True)
class TextSets:
    """The three texts; no sequence of one is in another."""

    calibration: TextSet
    ranking: TextSet
    gate: TextSet


def load_text_sets(
    encode: EncodeText | None,
    chat: EncodeChat | None,
    vocab: int,
    *,
    user_file: Path | None = None,
    sizes: TextSizes = DEFAULT_SIZES,
) -> TextSets:
    """Cut the three texts with the model's own tokenizer and prefix.

    `encode` and `chat` are `TextCodec.encode` and `encode_chat`; None without a tokenizer, without a chat template. The
    codec needs a fixed clock: templates that write today's date would make other sets tomorrow.
    `user_file` is UTF-8 text or .jsonl conversations and takes every second sequence, or a .npy file of ids [N, S],
    which takes all: its first rows are the gate's, then ranking's, then calibration's.

    Raises:
        UsageError: the user's file is missing, broken, too short, or holds the same sequence twice.
        BuildError: the model has no tokenizer, or a shipped domain is too short for it.
    """
    if user_file is not None and user_file.suffix.lower() == ".npy":
        return _from_ids(user_file, vocab, sizes)
    if encode is None:
        raise BuildError(
            "this model has no tokenizer, so no text can calibrate it",
            remedy="give token ids: --calibration FILE.npy with a whole-number array [N, S]",
        )
    turns = _turns(shipped_domains(), user_domain(user_file) if user_file is not None else None)
    pieces = _cut_domains(turns, sizes, encode, chat)
    # The gate is dealt first, so that it stays the same when another set grows.
    gate, ranking, calibration = (_deal(turns, size, pieces, vocab) for size in _in_order(sizes))
    return _disjoint(TextSets(calibration, ranking, gate), str(user_file or "the shipped text"))


def _turns(shipped: Sequence[Domain], user: Domain | None) -> list[Domain]:
    """Return whose turn it is, over and over: with a user's file, every second sequence is from there."""
    return list(shipped) if user is None else [domain for other in shipped for domain in (user, other)]


def _in_order(sizes: TextSizes) -> tuple[SetSize, SetSize, SetSize]:
    return sizes.gate, sizes.ranking, sizes.calibration


def _cut_domains(
    turns: Sequence[Domain], sizes: TextSizes, encode: EncodeText, chat: EncodeChat | None
) -> dict[str, Iterator[list[int]]]:
    """Return the sequences of each domain in the order in which they are dealt."""
    lengths: dict[str, list[int]] = {domain.name: [] for domain in turns}
    for size in _in_order(sizes):
        for i in range(size.count):
            lengths[turns[i % len(turns)].name].append(size.length)
    return {d.name: iter(_cut_enough(d, lengths[d.name], encode, chat)) for d in {d.name: d for d in turns}.values()}


def _cut_enough(domain: Domain, lengths: Sequence[int], encode: EncodeText, chat: EncodeChat | None) -> list[list[int]]:
    pieces = cut(domain, lengths, encode, chat)
    if len(pieces) == len(lengths):
        return pieces
    message = f"{domain.source} gives {len(pieces)} of {len(lengths)} sequences (up to {max(lengths)} tokens each)"
    if domain.name == USER:
        raise UsageError(f"{message}: it is too short", remedy="add text, or build without --calibration")
    raise BuildError(
        f"domain {domain.name}: {message}: too short for this model's tokenizer",
        remedy="give text of your own as token ids: --calibration FILE.npy",
    )


def _deal(turns: Sequence[Domain], size: SetSize, pieces: Mapping[str, Iterator[list[int]]], vocab: int) -> TextSet:
    names = [turns[i % len(turns)].name for i in range(size.count)]
    ids = np.array([next(pieces[name]) for name in names], np.int64)
    if ids.max() >= vocab:
        raise BuildError(f"the tokenizer gives id {ids.max()}, the model knows 0 to {vocab - 1}")
    return _text_set(ids, names)


def _from_ids(path: Path, vocab: int, sizes: TextSizes) -> TextSets:
    order = _in_order(sizes)
    rows = read_token_ids(path, sum(size.count for size in order), max(size.length for size in order), vocab)
    first = np.cumsum([0, *(size.count for size in order)])
    gate, ranking, calibration = (
        _text_set(rows[start : start + size.count, : size.length].copy(), [USER] * size.count)
        for start, size in zip(first, order, strict=False)
    )
    return _disjoint(TextSets(calibration, ranking, gate), str(path))


def _text_set(ids: NDArray[np.int64], domains: Sequence[str]) -> TextSet:
    ids.flags.writeable = False
    digest = hashlib.sha256(f"{ids.shape}".encode() + ids.astype("<i8").tobytes()).hexdigest()
    return TextSet(ids, tuple(domains), digest)


def _disjoint(sets: TextSets, source: str) -> TextSets:
    """Refuse a text that repeats itself: the gate must not judge what calibration has seen."""
    rows = [row for text in (sets.gate, sets.ranking, sets.calibration) for row in text.ids]
    shortest = min(len(row) for row in rows)
    if len({row[:shortest].tobytes() for row in rows}) < len(rows):
        raise UsageError(
            f"{source} holds the same sequence twice", remedy="remove what is repeated, or use longer sequences"
        )
    return sets
