"""Tell control tokens from ordinary text, so that what a user types never steers the model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer

# Reasoning tags are part of the answer: they are shown, and templates look for them in the history.
# Source: chat templates of Qwen3 and DeepSeek-R1.
REASONING_TAGS = ("<think>", "</think>")
# Some checkpoints leave "special" off for their turn markers (DeepSeek-R1-Distill: "<｜User｜>").
MARKER_SHAPE = re.compile(r"<[|｜].+[|｜]>")
MARKS = range(0xE000, 0x110000)  # private-use characters come first


@dataclass(frozen=True, slots=True)
class Disguise:
    """Replace control tokens in user text by marks that pass through a template, and back."""

    mark: str  # a character that occurs in no text of this request
    found: re.Pattern[str]  # matches any control token's text
    ids: Mapping[str, int]
    texts: Mapping[int, str]

    def cover(self, text: str) -> str:
        """Return `text` with a mark in place of every control token."""
        return self.found.sub(lambda match: f"{self.mark}{self.ids[match[0]]}{self.mark}", text)

    def uncover(self, text: str) -> str:
        """Return `text` with the control tokens' text back in place."""
        return re.sub(f"{self.mark}([0-9]+){self.mark}", lambda match: self.texts[int(match[1])], text)


class ControlTokens:
    """The control tokens of a tokenizer, and the two ways to encode: they act, or they are text.

    Control tokens are those marked special, those of a marker's shape, and `named` ids (BOS, EOS); reasoning tags are
    not. All become special in `tokenizer`, which this class owns from then on. Not for use from two threads.
    """

    def __init__(self, tokenizer: Tokenizer, named: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        _mark_special(tokenizer, set(named))
        special = {token: t.content for token, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        self._special = frozenset(special)
        self._texts = {token: text for token, text in special.items() if text not in REASONING_TAGS}
        self._ids = {text: token for token, text in self._texts.items()}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.ids = frozenset(self._texts)

    def encode(self, text: str) -> list[int]:
        """Encode a template's rendering: control tokens act. Adds no BOS."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Encode a user's text: control tokens in it are ordinary characters. Adds no BOS."""
        self._tokenizer.encode_special_tokens = True
        try:
            return self.encode(text)
        finally:
            self._tokenizer.encode_special_tokens = False

    def disguise(self, texts: Iterable[str]) -> Disguise | None:
        """Return what hides the control tokens in `texts`, None when there are none."""
        texts = list(texts)
        if not any(map(self._found.search, texts)):
            return None
        used = set().union(*texts)
        mark = next(char for char in map(chr, MARKS) if char not in used)
        return Disguise(mark, self._found, self._ids, self._texts)

    def encode_disguised(self, text: str, disguise: Disguise) -> list[int]:
        """Encode a rendering of covered texts: the template's control tokens act, the covered ones are text.

        Tokenizers cut the text at special tokens before anything else, so a stretch between two of them has the same
        ids alone; only the stretches with a mark are encoded anew.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        stretch: list[int] = []
        start = 0  # of the stretch, in characters
        for token, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._special:
                ids += self._stretch(text[start:begin], stretch, disguise)
                ids.append(token)
                stretch, start = [], end
            else:
                stretch.append(token)
        return ids + self._stretch(text[start:], stretch, disguise)

    def _stretch(self, text: str, ids: list[int], disguise: Disguise) -> list[int]:
        return self.encode_plain(disguise.uncover(text)) if disguise.mark in text else ids

    def id_of(self, text: str) -> int | None:
        """Return the id of a control token by its text, None for any other text."""
        return self._ids.get(text)


def _mark_special(tokenizer: Tokenizer, named: set[int]) -> None:
    """Make every control token special, so that the library treats them all alike."""
    added = tokenizer.get_added_tokens_decoder()
    for token in named | added.keys():
        known = added.get(token)
        text = known.content if known else tokenizer.id_to_token(token)
        if text is None or (known and known.special) or text in REASONING_TAGS:
            continue
        if token in named or MARKER_SHAPE.fullmatch(text):
            tokenizer.add_special_tokens([_special(text, known)])


def _special(text: str, known: AddedToken | None) -> AddedToken:
    if known is None:
        return AddedToken(text, special=True, normalized=False)
    return AddedToken(
        text,
        single_word=known.single_word,
        lstrip=known.lstrip,
        rstrip=known.rstrip,
        normalized=known.normalized,
        special=True,
    )
