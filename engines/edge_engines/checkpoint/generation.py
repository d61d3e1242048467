"""Collect the ids that end a text: the union of all the places where a checkpoint may name them (C56)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tokenizers import Tokenizer

from edge_engines.checkpoint.config import read_optional_json
from edge_engines.checkpoint.spec import GenerationDefaults, TextAssets
from edge_engines.checkpoint.text_assets import load_tokenizer
from edge_runtime.errors import CheckpointError

GGUF_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # after "tokenizer.ggml."
# Tokens that close a turn in published chat templates; a GGUF file may name only the base model's end of text.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")


def folder_generation(
    folder: Path, config: Mapping[str, object], text: TextAssets | None, vocab: int
) -> GenerationDefaults:
    """Return the end ids of config.json, generation_config.json and the tokenizer's end token together.

    A multimodal config.json may name them in its text_config too.
    """
    tokenizer = load_tokenizer(text.tokenizer_json, str(folder / "tokenizer.json")) if text else None
    generation = read_optional_json(folder / "generation_config.json")
    settings = read_optional_json(folder / "tokenizer_config.json")
    files = {"config.json": config, "generation_config.json": generation, "tokenizer_config.json": settings}
    nested = config.get("text_config")
    if isinstance(nested, dict):
        files["config.json: text_config"] = nested
    eos: list[int] = []
    for name, values in files.items():
        eos += _ids(values.get("eos_token_id"), f"{folder / name}: eos_token_id", tokenizer, vocab)
    if tokenizer and text:
        eos += _known_ids(tokenizer, text.eos_token, vocab)
        bos = _known_ids(tokenizer, text.bos_token, vocab)
    else:
        bos = _ids(config.get("bos_token_id"), f"{folder / 'config.json'}: bos_token_id", None, vocab)
    return GenerationDefaults(eos_ids=tuple(sorted(set(eos))), bos_id=bos[0] if bos else None)


def gguf_generation(
    metadata: Mapping[str, object], file: str, text: TextAssets | None, vocab: int
) -> GenerationDefaults:
    """Return the end ids the metadata name, and the token that closes a turn in the file's own chat template."""
    eos: list[int] = []
    for name in GGUF_END_KEYS:
        key = f"tokenizer.ggml.{name}"
        eos += _ids(metadata.get(key), f"{file}: {key}", None, vocab)
    if text and text.chat_template:
        tokenizer = load_tokenizer(text.tokenizer_json, file)
        eos += [
            index
            for token in TURN_ENDS
            if token in text.chat_template and (index := tokenizer.token_to_id(token)) is not None
        ]
    key = "tokenizer.ggml.bos_token_id"
    bos = _ids(metadata.get(key), f"{file}: {key}", None, vocab)
    return GenerationDefaults(eos_ids=tuple(sorted(set(eos))), bos_id=bos[0] if bos else None)


def _known_ids(tokenizer: Tokenizer, token: str | None, vocab: int) -> list[int]:
    """Return the id of a special token; [] for one that the tokenizer names but lacks, as some published ones do."""
    index = tokenizer.token_to_id(token) if token else None
    return [] if index is None or index >= vocab else [index]


def _ids(value: object, field: str, tokenizer: Tokenizer | None, vocab: int) -> list[int]:
    """Return one id or several: each a number below `vocab`, or the text of a token."""
    items: Iterable[object] = value if isinstance(value, list) else [] if value is None else [value]
    found = []
    for item in items:
        index: object = item
        if isinstance(item, str):
            index = tokenizer.token_to_id(item) if tokenizer else None
            if index is None:
                raise CheckpointError(f"{field} = {item!r} is not a token of tokenizer.json")
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < vocab:
            raise CheckpointError(f"{field} = {item!r}, expected an id from 0 to {vocab - 1}")
        found.append(index)
    return found
