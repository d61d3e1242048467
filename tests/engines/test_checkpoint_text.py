"""Tokenizer, template and end tokens of a Hugging Face folder are collected from all its files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, processors

from edge_engines.checkpoint.open import Checkpoint, open_checkpoint
from edge_runtime.errors import CheckpointError
from engines.tiny_files import load_golden, write_folder, write_json

VOCAB = 320  # rows of the golden models


def tokenizer(num_plain: int = 4, specials: tuple[str, ...] = ("<s>", "</s>", "<|im_end|>")) -> Tokenizer:
    """Plain tokens t0, t1 ... and then the special ones."""
    made = Tokenizer(models.WordLevel({f"t{i}": i for i in range(num_plain)}, unk_token="t0"))
    made.add_special_tokens([AddedToken(text, special=True) for text in specials])
    return made


def folder(tmp_path: Path, made: Tokenizer | None = None, **files: dict[str, object]) -> Path:
    """Write a tiny model; keywords are further JSON files by stem, "config" adds to config.json."""
    config, tensors = load_golden("llama-tied")
    path = write_folder(tmp_path, config | files.pop("config", {}), tensors)
    (path / "tokenizer.json").write_text((made or tokenizer()).to_str())
    for stem, values in files.items():
        write_json(path / f"{stem}.json", values)
    return path


def opened(path: Path) -> Checkpoint:
    with open_checkpoint(path) as checkpoint:
        return checkpoint


def test_c56_end_ids_are_the_union_of_all_three_files(tmp_path: Path) -> None:
    path = folder(
        tmp_path,
        config={"eos_token_id": 2},
        generation_config={"eos_token_id": [2, 3]},
        tokenizer_config={"eos_token": {"content": "<|im_end|>"}},
    )
    assert opened(path).generation.eos_ids == (2, 3, 6)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ([128, 129], 129, (128, 129)),
        (128, [128, 129], (128, 129)),
        (None, [1, 106], (1, 106)),
        ([1, 106], None, (1, 106)),
        ("<|im_end|>", None, (6,)),
    ],
)
def test_c56_scalar_list_null_and_text_are_all_read(
    tmp_path: Path, config: object, generation: object, expected: tuple[int, ...]
) -> None:
    path = folder(tmp_path, config={"eos_token_id": config}, generation_config={"eos_token_id": generation})
    assert opened(path).generation.eos_ids == expected


def test_c56_a_pad_token_equal_to_eos_keeps_eos(tmp_path: Path) -> None:
    path = folder(tmp_path, config={"eos_token_id": 2, "pad_token_id": 2})
    assert opened(path).generation.eos_ids == (2,)


@pytest.mark.parametrize("value", [VOCAB, -1, "<nowhere>", 1.5, True, [[1]]])
def test_c56_an_impossible_end_id_names_file_and_key(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id = "):
        open_checkpoint(folder(tmp_path, generation_config={"eos_token_id": value}))


def test_a_model_without_end_tokens_opens_with_a_warning(tmp_path: Path) -> None:
    checkpoint = opened(folder(tmp_path, config={"eos_token_id": None}))
    assert checkpoint.generation.eos_ids == ()
    assert "no end token" in checkpoint.warnings[0]


def test_c11_rows_beyond_the_tokenizer_are_not_known(tmp_path: Path) -> None:
    checkpoint = opened(folder(tmp_path, tokenizer(num_plain=300, specials=("<s>", "</s>"))))
    assert checkpoint.text is not None
    assert (checkpoint.text.known_ids, checkpoint.spec.vocab) == (302, VOCAB)


def test_c11_a_tokenizer_larger_than_the_head_is_cut_with_a_warning(tmp_path: Path) -> None:
    checkpoint = opened(folder(tmp_path, tokenizer(num_plain=VOCAB)))
    assert checkpoint.text is not None
    assert checkpoint.text.known_ids == VOCAB
    assert "323 ids" in checkpoint.warnings[0]


@pytest.mark.parametrize(("stated", "expected"), [(True, True), (False, False), (None, False)])
def test_bos_flag_is_taken_as_stated(tmp_path: Path, stated: bool | None, expected: bool) -> None:
    settings: dict[str, object] = {"bos_token": "<s>", "eos_token": "</s>"}
    if stated is not None:
        settings["add_bos_token"] = stated
    checkpoint = opened(folder(tmp_path, tokenizer_config=settings))
    assert checkpoint.text is not None
    assert (checkpoint.text.add_bos, checkpoint.text.bos_token) == (expected, "<s>")
    assert checkpoint.generation.bos_id == 4


def test_bos_of_the_post_processor_counts_where_no_flag_is_stated(tmp_path: Path) -> None:
    made = tokenizer()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 4)])
    checkpoint = opened(folder(tmp_path, made, tokenizer_config={"bos_token": "<s>"}))
    assert checkpoint.text is not None
    assert checkpoint.text.add_bos


def test_a_tokenizer_without_bos_gives_none_whatever_the_config_says(tmp_path: Path) -> None:
    """Qwen2 states an id for BOS in config.json, but its tokenizer has none."""
    checkpoint = opened(folder(tmp_path, config={"bos_token_id": 1}, tokenizer_config={"bos_token": None}))
    assert checkpoint.text is not None
    assert (checkpoint.text.bos_token, checkpoint.text.add_bos, checkpoint.generation.bos_id) == (None, False, None)


def test_special_tokens_the_tokenizer_lacks_are_not_used(tmp_path: Path) -> None:
    settings = {"bos_token": "<nowhere>", "eos_token": "<nowhere>", "add_bos_token": True}
    checkpoint = opened(folder(tmp_path, config={"eos_token_id": 2}, tokenizer_config=settings))
    assert checkpoint.text is not None
    assert (checkpoint.text.add_bos, checkpoint.generation.bos_id, checkpoint.generation.eos_ids) == (False, None, (2,))


def test_special_tokens_map_fills_what_tokenizer_config_leaves_out(tmp_path: Path) -> None:
    path = folder(tmp_path, special_tokens_map={"eos_token": "<|im_end|>", "bos_token": "<s>"})
    checkpoint = opened(path)
    assert checkpoint.text is not None
    assert (checkpoint.text.bos_token, checkpoint.text.eos_token) == ("<s>", "<|im_end|>")


def test_chat_template_is_found_in_each_place_and_the_file_wins(tmp_path: Path) -> None:
    path = folder(tmp_path)
    assert template(path) is None
    write_json(path / "tokenizer_config.json", {"chat_template": "from key"})
    assert template(path) == "from key"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "from list"}]
    write_json(path / "tokenizer_config.json", {"chat_template": named})
    assert template(path) == "from list"
    (path / "chat_template.jinja").write_text("from file")
    assert template(path) == "from file"


def template(path: Path) -> str | None:
    text = opened(path).text
    assert text is not None
    return text.chat_template


def test_a_broken_tokenizer_is_refused_with_its_path(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a sound tokenizer"):
        open_checkpoint(path)
