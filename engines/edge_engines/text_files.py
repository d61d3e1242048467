"""Copy what the runtime needs for text into an engine folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edge_engines.checkpoint.open import Checkpoint


def write_text_files(folder: Path, model: Checkpoint) -> None:
    """Write tokenizer.json, chat_template.jinja and generation.json; nothing for a model without a tokenizer."""
    text = model.text
    if text is None:
        return
    (folder / "tokenizer.json").write_bytes(text.tokenizer_json)
    if text.chat_template is not None:
        (folder / "chat_template.jinja").write_text(text.chat_template, encoding="utf-8")
    generation = {
        "eos_ids": list(model.generation.eos_ids),
        "bos_id": model.generation.bos_id,
        "bos_token": text.bos_token,
        "eos_token": text.eos_token,
        "add_bos": text.add_bos,
        "known_ids": text.known_ids,
    }
    (folder / "generation.json").write_bytes(msgspec.json.format(msgspec.json.encode(generation), indent=2) + b"\n")
