"""Read the vocabulary of a GGUF file and check it: texts, kinds, scores, merges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from edge_runtime.errors import CheckpointError


class TokenKind(IntEnum):
    """Values of `tokenizer.ggml.token_type`. Source: the GGUF specification."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens by id. Unused rows at the end (padding of the head) are cut off: `len(tokens)` ids are known."""

    file: str
    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    scores: tuple[float, ...]  # () where the tokenizer has none
    merges: tuple[tuple[str, str], ...]  # () where the tokenizer has none

    @property
    def ids(self) -> dict[str, int]:
        """Return text -> id."""
        return {token: index for index, token in enumerate(self.tokens)}


def read_vocabulary(metadata: Mapping[str, object], file: str) -> Vocabulary:
    """Return the checked vocabulary. Raises CheckpointError naming the metadata key at fault."""
    tokens = _list(metadata, "tokenizer.ggml.tokens", file, str)
    kinds = _list(metadata, "tokenizer.ggml.token_type", file, int)
    if len(kinds) != len(tokens):
        raise CheckpointError(
            f"{file}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens, expected one each"
        )
    known = len(tokens)
    while known and kinds[known - 1] == TokenKind.UNUSED:
        known -= 1
    if len(set(tokens[:known])) != known:
        twice = next(token for token in tokens[:known] if tokens[:known].count(token) > 1)
        raise CheckpointError(f"{file}: tokenizer.ggml.tokens holds {twice!r} twice", remedy="convert the model again")
    scores: list[float] = []
    if "tokenizer.ggml.scores" in metadata:
        scores = _list(metadata, "tokenizer.ggml.scores", file, float)
    merges: list[str] = []
    if "tokenizer.ggml.merges" in metadata:
        merges = _list(metadata, "tokenizer.ggml.merges", file, str)
    return Vocabulary(
        file=file,
        tokens=tuple(tokens[:known]),
        kinds=tuple(kinds[:known]),
        scores=tuple(scores[:known]),
        merges=tuple(_split_merge(merge, file) for merge in merges),
    )


def _list(metadata: Mapping[str, object], key: str, file: str, kind: type) -> list:  # type: ignore[type-arg]
    value = metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        state = "is missing" if value is None else f"is not a list of {kind.__name__}"
        raise CheckpointError(f"{file}: {key} {state}", remedy="convert the model again with a current converter")
    return value


def _split_merge(merge: str, file: str) -> tuple[str, str]:
    """Split "left right" at its one space (a space inside a token is written as another character)."""
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise CheckpointError(f"{file}: tokenizer.ggml.merges holds {merge!r}, expected two tokens")
    return left, right
