"""Read tokenizer, chat template and special tokens of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from edge_engines.checkpoint.config import read_optional_json
from edge_engines.checkpoint.spec import TextAssets
from edge_runtime.errors import CheckpointError


def folder_text_assets(folder: Path) -> TextAssets | None:
    """Return the text half of a model, None if the folder has no tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    raw = path.read_bytes()
    tokenizer = load_tokenizer(raw, str(path))
    settings = read_optional_json(folder / "tokenizer_config.json")
    special = read_optional_json(folder / "special_tokens_map.json") | settings
    bos = token_text(special.get("bos_token"))
    return TextAssets(
        tokenizer_json=raw,
        chat_template=_read_template(folder, settings),
        bos_token=bos,
        eos_token=token_text(special.get("eos_token")),
        add_bos=_adds_bos(tokenizer, bos, settings),
        known_ids=max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
    )


def load_tokenizer(raw: bytes, file: str) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. Raises CheckpointError if it is broken."""
    try:
        return Tokenizer.from_str(raw.decode())
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file} is not a sound tokenizer ({error})", remedy="download it again") from error


def token_text(value: object) -> str | None:
    """Return the text of a special token: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_template(folder: Path, settings: Mapping[str, object]) -> str | None:
    """Return chat_template.jinja, else the key `chat_template`: one template or a list that names a default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{file} is not UTF-8 text", remedy="download it again") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _adds_bos(tokenizer: Tokenizer, bos: str | None, settings: Mapping[str, object]) -> bool:
    """Tell whether raw text gets one BOS in front: the stated flag, else what the tokenizer itself does (C55)."""
    if bos is None or tokenizer.token_to_id(bos) is None:
        return False
    stated = settings.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    return tokenizer.encode("", add_special_tokens=True).ids[:1] == [tokenizer.token_to_id(bos)]
