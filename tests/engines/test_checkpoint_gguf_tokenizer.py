"""A tokenizer rebuilt from GGUF metadata gives the ids of the publisher's tokenizer, or is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from edge_engines.checkpoint.generation import gguf_generation
from edge_engines.checkpoint.gguf_tokenizer import LLAMA3_MARKERS, LLAMA3_TOKENS, gguf_text_assets
from edge_engines.checkpoint.spec import TextAssets
from edge_runtime.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Digits merge up to four, so that each split rule gives other ids; "don't" has a merge across its apostrophe.
MERGES = ["2 0", "20 2", "202 3", "d o", "do n", "n '", "' t", "Ġ t", "Ġt he", "h e", "Ċ Ċ"]
TEXTS = ["2023", "don't", "the 2023\n\n 12345 DON'T", "  the", "é e\u0301 🎉", "a\r\n\r\nb", "x_y 1.5%\t!"]


def byte_level_tokens() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in sorted(MERGES)]


def metadata(pre: str | None, extra: Sequence[tuple[str, int]] = (), **more: object) -> dict[str, object]:
    """Return the tokenizer keys of a GGUF file with the tiny vocabulary, `extra` (text, kind) behind it."""
    tokens = byte_level_tokens()
    values: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens + [text for text, _ in extra],
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens) + [kind for _, kind in extra],
        "tokenizer.ggml.merges": [*MERGES[:8], "h e", "Ġt he", "Ċ Ċ"],
    }
    if pre is not None:
        values["tokenizer.ggml.pre"] = pre
    return values | {f"tokenizer.{key}": value for key, value in more.items()}


def assets(values: dict[str, object]) -> TextAssets:
    found = gguf_text_assets(values, "m.gguf")
    assert found is not None
    return found


def rebuilt(values: dict[str, object]) -> Tokenizer:
    return Tokenizer.from_str(assets(values).tokenizer_json.decode())


# As the publishers' tokenizer.json files have them.
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_REGEX = LLAMA3_REGEX.replace("{1,3}", "")


def reference(pre: str) -> Tokenizer:
    values = metadata(pre)
    vocab = {token: index for index, token in enumerate(values["tokenizer.ggml.tokens"])}  # type: ignore[arg-type,var-annotated]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]  # type: ignore[attr-defined]
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if pre in ("qwen2", "deepseek-r1-qwen"):
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = {
        "gpt-2": ByteLevel(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
        ),
        "llama-bpe": split_first(LLAMA3_REGEX),
        "qwen2": split_first(QWEN2_REGEX),
        "deepseek-r1-qwen": split_first(QWEN2_REGEX),
    }[pre]
    return made


def split_first(regex: str) -> pre_tokenizers.Sequence:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(regex), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2", "deepseek-r1-qwen"])
def test_c12_ids_equal_those_of_the_publishers_tokenizer(pre: str) -> None:
    tokenizer, expected = rebuilt(metadata(pre)), reference(pre)
    for text in TEXTS:
        assert tokenizer.encode(text).ids == expected.encode(text).ids, text
        assert tokenizer.decode(tokenizer.encode(text).ids) == (expected.normalizer or Plain()).normalize_str(text)


class Plain:
    def normalize_str(self, text: str) -> str:
        return text


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["2023"]),
        ("llama-bpe", ["202", "3"]),
        ("smollm", ["2", "0", "2", "3"]),
        ("qwen2", ["2", "0", "2", "3"]),
    ],
)
def test_c12_split_rules_differ_in_digits(pre: str, pieces: list[str]) -> None:
    assert rebuilt(metadata(pre)).encode("2023").tokens == pieces


@pytest.mark.parametrize("pre", ["default", "tekken", "", "deepseek-coder"])
def test_c12_an_unknown_pre_is_refused(pre: str) -> None:
    with pytest.raises(CheckpointError, match=rf"tokenizer\.ggml\.pre = '{pre}' is not supported"):
        gguf_text_assets(metadata(pre), "m.gguf")


def test_c12_a_missing_pre_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf: tokenizer\.ggml\.pre is missing"):
        gguf_text_assets(metadata(None), "m.gguf")


def llama3_like(markers: dict[int, str]) -> dict[str, object]:
    """Return a file without a split rule, of the size of Llama 3."""
    tokens = byte_level_tokens()
    tokens += [f"filler{index}" for index in range(len(tokens), LLAMA3_TOKENS)]
    kinds = [NORMAL] * LLAMA3_TOKENS
    for index, text in markers.items():
        tokens[index], kinds[index] = text, CONTROL
    return metadata(None) | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}


def test_c12_a_missing_pre_is_accepted_for_the_exact_llama_3_signature_only() -> None:
    tokenizer, expected = rebuilt(llama3_like(dict(LLAMA3_MARKERS))), reference("llama-bpe")
    for text in TEXTS:
        assert tokenizer.encode(text).ids == expected.encode(text).ids, text
    assert assets(llama3_like(dict(LLAMA3_MARKERS))).add_bos
    with pytest.raises(CheckpointError, match="pre is missing"):
        gguf_text_assets(llama3_like(dict(LLAMA3_MARKERS) | {128009: "<|other|>"}), "m.gguf")


def test_llama3_takes_a_whole_token_before_merging() -> None:
    """No merge gives "zq", but it is a token: Llama 3's tokenizer takes it, others can't."""
    assert rebuilt(metadata("llama-bpe", [("zq", NORMAL)])).encode("zq").tokens == ["zq"]
    assert rebuilt(metadata("qwen2", [("zq", NORMAL)])).encode("zq").tokens == ["z", "q"]


def test_control_tokens_are_special_and_user_defined_ones_are_not() -> None:
    tokenizer = rebuilt(metadata("qwen2", [("<|im_end|>", CONTROL), ("<tool>", USER)]))
    encoded = tokenizer.encode("the<|im_end|><tool>the")
    size = len(byte_level_tokens())
    assert [index for index in encoded.ids if index >= size] == [size, size + 1]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == "the<tool>the"
    assert tokenizer.get_added_tokens_decoder()[size] == AddedToken("<|im_end|>", special=True, normalized=False)


def test_c11_padding_at_the_end_is_not_known() -> None:
    padded = metadata("qwen2", [("<|im_end|>", CONTROL), ("[PAD1]", UNUSED), ("[PAD2]", UNUSED)])
    found = assets(padded)
    assert found.known_ids == len(byte_level_tokens()) + 1
    assert rebuilt(padded).get_vocab_size() == found.known_ids


def test_bos_follows_the_flag_and_else_the_kind() -> None:
    for pre, expected in (("llama-bpe", True), ("qwen2", False), ("smollm", False)):
        assert assets(metadata(pre)).add_bos is expected
    assert not assets(metadata("llama-bpe", **{"ggml.add_bos_token": False})).add_bos
    assert assets(metadata("qwen2", **{"ggml.add_bos_token": True})).add_bos


def test_c56_end_ids_hold_eos_eot_and_the_turn_end_of_the_template() -> None:
    size = len(byte_level_tokens())
    extra = [("<|endoftext|>", CONTROL), ("<|eot|>", CONTROL), ("<|im_end|>", CONTROL), ("<|end|>", CONTROL)]
    keys = {"ggml.eos_token_id": size, "ggml.eot_token_id": size + 1, "ggml.bos_token_id": size}
    values = metadata("qwen2", extra, **keys, chat_template="{{ messages }}<|im_end|>")
    found = gguf_generation(values, "m.gguf", assets(values), vocab=size + 10)
    assert found.eos_ids == (size, size + 1, size + 2)
    assert found.bos_id == size


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ggml.model": "t5"}, "tokenizer.ggml.model = 't5' is not supported"),
        ({"ggml.token_type": [1]}, r"token_type has 1 entries for \d+ tokens"),
        ({"ggml.token_type": None}, "token_type is missing"),
        ({"ggml.tokens": [1, 2]}, "tokens is not a list of str"),
        ({"ggml.merges": ["2 0", "20"]}, "merges holds '20', expected two tokens"),
        ({"ggml.merges": ["2 nowhere"]}, "no tokenizer can be built"),
        ({"ggml.merges": []}, "merges is missing or empty"),
        ({"ggml.eos_token_id": 5000}, "eos_token_id = 5000, expected an id below"),
    ],
)
def test_a_broken_vocabulary_names_the_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        gguf_text_assets(metadata("qwen2", **change), "m.gguf")


def test_a_token_that_stands_twice_is_refused() -> None:
    with pytest.raises(CheckpointError, match="holds 'A' twice"):
        gguf_text_assets(metadata("qwen2", [("A", NORMAL)]), "m.gguf")


def test_a_file_without_vocabulary_has_no_text() -> None:
    assert gguf_text_assets({"general.architecture": "llama"}, "m.gguf") is None


PIECES = ["▁", "t", "h", "e", "o", "r", "▁t", "he", "▁the", "re", "▁o", "er", "the", "r▁", "o▁"]


def sentencepiece(**more: object) -> dict[str, object]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES)
    scores = [0.0] * 259 + [-1e3] * 6 + [-float(rank) for rank in range(len(PIECES) - 6)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": scores,
        **more,
    }


def merge_by_score(text: str) -> list[str]:
    """SentencePiece in plain words: always join the two neighbours that form the piece with the best score."""
    scores = dict(zip(PIECES[6:], range(len(PIECES) - 6), strict=True))
    pieces = list("▁" + text.replace(" ", "▁"))
    while candidates := [(scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]:
        _, i = min(candidates)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return list(fall_back(pieces))


def fall_back(pieces: list[str]) -> Iterator[str]:
    for piece in pieces:
        yield from [piece] if piece in PIECES else [f"<0x{byte:02X}>" for byte in piece.encode()]


@pytest.mark.parametrize("text", ["the other", "there there", "or the  there", "threeee", "hot", "né 歪 the🎉"])
def test_sentencepiece_ids_equal_those_of_the_plain_algorithm(text: str) -> None:
    tokenizer = rebuilt(sentencepiece())
    encoded = tokenizer.encode(text)
    assert encoded.tokens == merge_by_score(text)
    assert tokenizer.decode(encoded.ids) == text


def test_sentencepiece_defaults_to_bos_and_a_space_in_front() -> None:
    assert assets(sentencepiece()).add_bos
    tokenizer = rebuilt(sentencepiece(**{"tokenizer.ggml.add_space_prefix": False}))
    assert tokenizer.encode("the").tokens == ["the"]
    assert rebuilt(sentencepiece()).encode("<s>").ids == [1]


def test_sentencepiece_without_scores_is_refused() -> None:
    values = sentencepiece()
    del values["tokenizer.ggml.scores"]
    with pytest.raises(CheckpointError, match="scores has 0 entries"):
        gguf_text_assets(values, "m.gguf")
