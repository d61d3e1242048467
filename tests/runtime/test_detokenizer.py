import json
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from edge_runtime.session.detokenizer import Detokenizer
from edge_runtime.session.text import TextCodec
from edge_runtime.session.token_bytes import TokenTable

FOLDERS = Path(__file__).parents[1] / "data" / "tokenizers"


@cache
def codec(folder: str) -> TextCodec:
    return TextCodec.load(FOLDERS / folder)


@cache
def library(folder: str) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(FOLDERS / folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    return tokenizer


def ids_of(folder: str, *tokens: str) -> list[int]:
    return [library(folder).token_to_id(token) for token in tokens]


def party_bytes(folder: str) -> list[int]:
    return ids_of(folder, "<0xF0>", "<0x9F>", "<0x8E>", "<0x89>")


def pieces(folder: str, ids: list[int]) -> list[str]:
    """Return what each id completes, the tail last."""
    detokenizer = Detokenizer(codec(folder))
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def test_c52_a_character_comes_out_whole_with_its_last_byte() -> None:
    assert pieces("chatml", ids_of("chatml", "æŃ", "ª")) == ["", "歪", ""]
    assert pieces("chatml", ids_of("chatml", "ðŁ", "İī")) == ["", "🎉", ""]
    assert pieces("chatml", ids_of("chatml", "ĠðŁ", "İī")) == [" ", "🎉", ""]
    for folder in ("gemma3", "sentencepiece"):
        assert pieces(folder, party_bytes(folder)) == ["", "", "", "🎉", ""]


@given(st.text(max_size=40))
def test_c52_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    for folder in ("chatml", "gemma3", "sentencepiece"):
        ids = library(folder).encode(text, add_special_tokens=False).ids
        parts = pieces(folder, ids)
        assert "".join(parts) == codec(folder).decode(ids) == library(folder).decode(ids) == text
        assert all("\ufffd" not in part for part in parts if "\ufffd" not in text)


@given(st.lists(st.integers(0, 400), max_size=30))
def test_c52_any_ids_join_to_what_the_library_decodes(ids: list[int]) -> None:
    marked = [token for token in ids if token != 3]  # a control token that its file forgot to call special
    assert "".join(pieces("chatml", ids)) == library("chatml").decode(marked)


def test_bytes_that_cannot_complete_become_one_replacement_each() -> None:
    lead, tail = ids_of("chatml", "æŃ", "a")
    assert pieces("chatml", [lead, tail]) == ["", "\ufffda", ""]
    assert pieces("chatml", [lead]) == ["", "\ufffd"]
    good_then_bad = [*party_bytes("gemma3"), *ids_of("gemma3", "<0xFF>", "▁x")]
    assert pieces("gemma3", good_then_bad) == ["", "", "", "🎉", "\ufffd", " x", ""]


def test_c54_sentencepiece_strips_one_leading_space_and_keeps_the_others() -> None:
    assert "".join(pieces("sentencepiece", ids_of("sentencepiece", "▁Hello", "▁world", "!"))) == "Hello world!"
    assert "".join(pieces("sentencepiece", ids_of("sentencepiece", "▁", "▁leading", "▁x"))) == " leading x"
    assert "".join(pieces("gemma3", ids_of("gemma3", "▁Hello", "▁world"))) == " Hello world"


def test_c54_metaspace_decoders_strip_the_same_space(tmp_path: Path) -> None:
    for scheme, expected in (("always", "Hello world"), ("first", "Hello world"), ("never", " Hello world")):
        data = json.loads((FOLDERS / "sentencepiece" / "tokenizer.json").read_text(encoding="utf-8"))
        data["decoder"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": True}
        tokenizer = Tokenizer.from_str(json.dumps(data))
        detokenizer = Detokenizer(TokenTable(tokenizer, frozenset()))
        ids = ids_of("sentencepiece", "▁Hello", "▁world")
        assert "".join(map(detokenizer.push, ids)) == tokenizer.decode(ids) == expected


def test_c54_byte_level_keeps_its_first_space() -> None:
    assert pieces("chatml", ids_of("chatml", "ĠHello", "Ġworld"))[0] == " Hello"


@pytest.mark.parametrize("every", [1, 2, 8])
def test_c54_result_does_not_depend_on_the_emit_interval(every: int) -> None:
    ids = codec("sentencepiece").encode("Hello world! 歪 leading x 🎉 the quick brown fox")
    detokenizer = Detokenizer(codec("sentencepiece"))
    chunks = ["".join(map(detokenizer.push, ids[i : i + every])) for i in range(0, len(ids), every)]
    assert "".join(chunks) + detokenizer.flush() == codec("sentencepiece").decode(ids)
    assert "".join(chunks) == "Hello world! 歪 leading x 🎉 the quick brown fox"


def test_control_tokens_and_unknown_ids_give_no_text_and_break_no_character() -> None:
    lead, tail, end = ids_of("chatml", "æŃ", "ª", "<|im_end|>")
    assert "".join(pieces("chatml", [1, lead, end, 99_999, tail, 3])) == "歪"


def test_c42_end_token_first_gives_empty_text() -> None:
    assert pieces("chatml", [2]) == ["", ""]


def test_decoder_of_another_kind_is_refused() -> None:
    data = json.loads((FOLDERS / "chatml" / "tokenizer.json").read_text(encoding="utf-8"))
    for decoder in (None, {"type": "WordPiece", "prefix": "##", "cleanup": True}):
        tokenizer = Tokenizer.from_str(json.dumps({**data, "decoder": decoder}))
        with pytest.raises(ValueError, match="neither byte-level nor SentencePiece"):
            TokenTable(tokenizer, frozenset())
