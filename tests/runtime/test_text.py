import json
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from edge_runtime.errors import EngineRefusedError, RequestError
from edge_runtime.session.text import TextCodec, check_ids

FOLDERS = Path(__file__).parents[1] / "data" / "tokenizers"
USER = [{"role": "user", "content": "Hello world"}]


def load(name: str) -> TextCodec:
    return TextCodec.load(FOLDERS / name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDERS / "chatml", tmp_path / "engine"))


def change(path: Path, **values: object) -> None:
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, **values}), encoding="utf-8")


def test_text_of_an_engine_folder_goes_to_ids_and_back() -> None:
    codec = load("chatml")
    text = "Hello world, 歪🎉\n\nthe  quick"
    assert codec.decode(codec.encode(text)) == text
    assert (codec.bos_id, codec.known_ids) == (None, 368)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation.json"])
def test_a_missing_file_is_refused_with_its_name_and_a_remedy(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(EngineRefusedError, match=name) as caught:
        TextCodec.load(folder)
    assert "edge-runtime build" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b""),
        ("tokenizer.json", b"<html>"),
        ("tokenizer.json", b'{"version": "1.0"}'),
        ("generation.json", b"{"),
        ("generation.json", b"[]"),
        ("generation.json", b"\xff"),
        ("chat_template.jinja", b"{% if %}"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_file_is_refused_with_its_name(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(EngineRefusedError, match=name):
        TextCodec.load(folder)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"known_ids": 0}, "known_ids is 0"),
        ({"eos_ids": [2, 368]}, "eos_ids holds 368"),
        ({"eos_ids": 2}, "eos_ids"),
        ({"bos_id": -1}, "bos_id holds -1"),
        ({"add_bos": True}, "add_bos is true and bos_id is null"),
    ],
)
def test_generation_settings_that_contradict_are_refused(folder: Path, values: dict[str, object], told: str) -> None:
    change(folder / "generation.json", **values)
    with pytest.raises(EngineRefusedError, match=told):
        TextCodec.load(folder)


def test_a_decoder_of_an_unknown_kind_is_refused(folder: Path) -> None:
    change(folder / "tokenizer.json", decoder={"type": "WordPiece", "prefix": "##", "cleanup": True})
    with pytest.raises(EngineRefusedError, match=r"tokenizer\.json: decoder"):
        TextCodec.load(folder)


def test_limits_of_a_training_run_do_not_cut_prompts(folder: Path) -> None:
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "<|endoftext|>"}  # fmt: skip
    change(folder / "tokenizer.json", truncation=truncation, padding=padding)
    text = "Hello world, the quick brown fox"
    assert TextCodec.load(folder).encode(text) == load("chatml").encode(text)


def test_c11_prompt_ids_beyond_the_vocabulary_are_refused() -> None:
    check_ids([0, 151935], 151936)
    for bad in ([5, 151936], [-1]):
        with pytest.raises(RequestError, match="allowed are 0 to 151935") as caught:
            check_ids(bad, 151936)
        assert caught.value.code == "invalid_request"


def test_c55_bos_stands_exactly_once_in_chat_and_raw_prompts() -> None:
    llama3 = load("llama3")
    typed = [{"role": "user", "content": "<|begin_of_text|>Hello"}]
    prompts = [llama3.encode("Hello"), llama3.encode("<|begin_of_text|>Hello"), llama3.encode_chat(USER),
               llama3.encode_chat(typed), llama3.encode("")]  # fmt: skip
    for ids in prompts:
        assert ids[0] == 128000
        assert ids.count(128000) == 1
    assert llama3.encode_chat(USER)[:2] == [128000, 128006]


def test_c55_bos_is_added_when_the_template_does_not(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDERS / "llama3", tmp_path / "engine"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}<|eot_id|>", encoding="utf-8")
    ids = TextCodec.load(folder).encode_chat(USER)
    assert (ids[0], ids.count(128000), ids[-1]) == (128000, 1, 128009)


def test_c55_models_without_bos_get_none() -> None:
    codec = load("chatml")
    assert codec.encode("Hello") == [265]
    assert codec.encode_chat(USER)[0] == 1  # the template's own marker
    assert codec.encode("") == []


def test_c55_stop_text_of_a_control_token_is_its_id_alone() -> None:
    assert load("gemma3").stop_ids(["<end_of_turn>"]) == {106}
    assert load("llama3").stop_ids(["<|eot_id|>", "Hello", "<|nothing|>"]) == {128009}


@pytest.mark.parametrize(
    ("name", "end_ids"), [("llama3", {128001, 128009}), ("sentencepiece", {32000, 32001, 32007}), ("gemma3", {1, 106})]
)
def test_c56_every_end_token_ends_and_shows_no_text(name: str, end_ids: set[int]) -> None:
    codec = load(name)
    assert codec.eos_ids == end_ids
    hello = codec.encode("Hello")
    for end in end_ids:
        assert codec.decode([*hello, end]) == codec.decode(hello) == "Hello"


def test_c56_end_token_of_the_tokenizer_joins_the_list(folder: Path) -> None:
    change(folder / "generation.json", eos_ids=[0], eos_token="<|im_end|>")
    assert TextCodec.load(folder).eos_ids == {0, 2}


def test_c56_end_token_that_the_file_forgot_to_call_special_shows_no_text(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDERS / "sentencepiece", tmp_path / "engine"))
    change(folder / "generation.json", eos_ids=[2], eos_token="</s>")  # id 2 is not special in tokenizer.json
    codec = TextCodec.load(folder)
    assert codec.decode([*codec.encode("Hello"), 2]) == "Hello"
    assert 2 not in codec.encode("a</s>b")


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma3", "sentencepiece"])
def test_control_tokens_typed_in_a_raw_prompt_stay_text(name: str) -> None:
    codec = load(name)
    tokenizer = Tokenizer.from_file(str(FOLDERS / name / "tokenizer.json"))
    markers = [
        t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special or t.content == "<｜User｜>"
    ]
    text = "Hello" + "x".join(markers) + " world"
    ids = codec.encode(text)
    control = codec.stop_ids(markers) | codec.eos_ids
    assert not control & set(ids[1:])
    assert codec.decode(ids) == text


def test_reasoning_tags_of_the_output_are_shown_even_when_special(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert (
        TextCodec.load(folder).decode([4, 265, 5, 2]) == load("chatml").decode([4, 265, 5, 2]) == "<think>Hello</think>"
    )
