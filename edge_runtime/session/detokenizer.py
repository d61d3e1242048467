"""Turn ids into text one by one, whole code points only."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol


class TokenBytes(Protocol):
    """What the detokenizer needs of a tokenizer; `TextCodec` is one."""

    @property
    def strips_first_space(self) -> bool:
        """Whether one space is taken off the front of the whole text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one id; b"" for control tokens and unknown ids."""
        ...


class Detokenizer:
    """The text of one sequence's output, in pieces that joined are the decoding of all its ids.

    A character whose bytes are spread over ids comes out with its last byte. U+FFFD stands only for bytes that can't
    become a character any more. Control tokens give nothing. The work per id does not depend on the text so far.
    """

    def __init__(self, source: TokenBytes) -> None:
        self._source = source
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds at most 3 bytes back
        self._strip_next = source.strips_first_space

    def push(self, token: int) -> str:
        """Return the text that this id completes; often one token's, "" inside a character."""
        return self._strip(self._decoder.decode(self._source.token_bytes(token)))

    def flush(self) -> str:
        """Return the tail: U+FFFD for a character that was begun and never completed, else ""."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if self._strip_next and text:  # SentencePiece puts one space before the first word
            self._strip_next = False
            return text.removeprefix(" ")
        return text


def decode(source: TokenBytes, ids: Iterable[int]) -> str:
    """Return the text of a complete list of ids."""
    detokenizer = Detokenizer(source)
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])
