"""Say which bytes of text one token id stands for. No state: what joins the bytes is the detokenizer.

Two kinds of tokenizer are known, told apart by the decoder that tokenizer.json names:
byte-level (GPT-2's alphabet: one printable character per byte) and SentencePiece ("▁" is a space, "<0xE6>" a byte).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Set
from typing import Any

from tokenizers import Tokenizer

SPACE_MARK = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTable:
    """The bytes of every id; b"" for `hidden` ids (control tokens) and for ids the tokenizer does not know.

    Raises:
        ValueError: the tokenizer's decoder is of neither kind.
    """

    def __init__(self, tokenizer: Tokenizer, hidden: Set[int]) -> None:
        steps = list(_decoder_steps(tokenizer))
        kinds = {step["type"] for step in steps}
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}:
            raise ValueError(f"decoder {sorted(kinds) or 'none'} is neither byte-level nor SentencePiece")
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._added = tokenizer.get_added_tokens_decoder()
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._has_byte_tokens = "ByteFallback" in kinds
        self.strips_first_space = any(map(_strips_first_space, steps))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id; they may begin or end inside a character."""
        if token in self._hidden:
            return b""
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._alphabet is not None:
            return text.encode() if token in self._added else self._byte_level(text, self._alphabet)
        if self._has_byte_tokens and (match := BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        return text.replace(SPACE_MARK, " ").encode()

    @staticmethod
    def _byte_level(text: str, alphabet: dict[str, int]) -> bytes:
        try:
            return bytes([alphabet[char] for char in text])
        except KeyError:  # not of the alphabet: the token is plain text
            return text.encode()


def _decoder_steps(tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Yield the decoder's settings as tokenizer.json writes them, a sequence one by one."""
    if tokenizer.decoder is None:
        return
    state: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    yield from state["decoders"] if state["type"] == "Sequence" else [state]


def _strips_first_space(step: dict[str, Any]) -> bool:
    """Tell whether this decoder step takes one space off the front of the whole text."""
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme", "always") != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)


def _byte_alphabet() -> dict[str, int]:
    """Return character -> byte of GPT-2's encoding: printable Latin-1 is itself, the others count up from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
