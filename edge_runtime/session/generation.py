"""Read generation.json: which ids begin and end a generation, and how many the tokenizer knows."""

from __future__ import annotations

import msgspec


class GenerationSettings(msgspec.Struct, frozen=True):
    """generation.json of an engine folder; ids are below `known_ids`."""

    eos_ids: tuple[int, ...]  # each of them ends a generation
    bos_id: int | None
    bos_token: str | None  # text, for the chat template
    eos_token: str | None
    add_bos: bool  # a prompt gets one BOS in front
    known_ids: int  # ids [known_ids, V) are padding and never sampled


def parse_generation(data: bytes) -> GenerationSettings:
    """Read and check the file's content.

    Raises:
        ValueError: not JSON, a missing key, a wrong type or values that contradict each other; the text names the key.
    """
    settings = msgspec.json.decode(data, type=GenerationSettings)
    if settings.known_ids < 1:
        raise ValueError(f"known_ids is {settings.known_ids}: at least 1 is needed")
    if settings.add_bos and settings.bos_id is None:
        raise ValueError("add_bos is true and bos_id is null: one of them is wrong")
    named = [("eos_ids", token) for token in settings.eos_ids]
    named += [("bos_id", settings.bos_id)] if settings.bos_id is not None else []
    for key, token in named:
        if not 0 <= token < settings.known_ids:
            raise ValueError(f"{key} holds {token}: allowed are 0 to {settings.known_ids - 1} (known_ids - 1)")
    return settings
