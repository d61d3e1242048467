"""The three texts of a quantised build are full, disjoint, the same every time, and begin as they do in service."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from edge_engines.texts import domains
from edge_engines.texts.domains import SHIPPED, USER, shipped_domains
from edge_engines.texts.sets import DEFAULT_SIZES, SetSize, TextSet, TextSets, TextSizes, load_text_sets
from edge_runtime.errors import BuildError, UsageError
from edge_runtime.session.text import TextCodec

TOKENIZERS = Path(__file__).parents[1] / "data/tokenizers"
FAMILIES = {"chatml": [], "llama3": [128000], "gemma3": [2], "sentencepiece": []}  # BOS of raw prompts
VOCAB = 262_144
SMALL = TextSizes(SetSize(7, 96), SetSize(3, 80), SetSize(12, 96))
TURNS = [{"role": "user", "content": "Is the pump on?"}, {"role": "assistant", "content": "Yes, since six o'clock."}]


def codec_of(family: str) -> TextCodec:
    return TextCodec.load(TOKENIZERS / family, now=lambda: datetime(2026, 1, 2))


def load(family: str = "llama3", user_file: Path | None = None, sizes: TextSizes = SMALL) -> TextSets:
    codec = codec_of(family)
    return load_text_sets(codec.encode, codec.encode_chat, VOCAB, user_file=user_file, sizes=sizes)


def all_sets(sets: TextSets) -> tuple[TextSet, TextSet, TextSet]:
    """Return the sets in the order in which text is dealt to them."""
    return sets.gate, sets.ranking, sets.calibration


def rows_of(sets: TextSets, domain: str) -> list[list[int]]:
    """Return the sequences of one domain in the order in which they were dealt."""
    return [
        ids.tolist()
        for text in all_sets(sets)
        for ids, name in zip(text.ids, text.domains, strict=True)
        if name == domain
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_are_full_and_read_only(family: str) -> None:
    sets = load(family, sizes=DEFAULT_SIZES)
    assert [text.ids.shape for text in all_sets(sets)] == [(18, 512), (6, 128), (48, 128)]
    for text in all_sets(sets):
        assert text.ids.dtype == np.int64
        assert not text.ids.flags.writeable
        assert len(text.domains) == len(text.ids)
        assert 0 <= text.ids.min() <= text.ids.max() < VOCAB


def test_the_gate_judges_at_least_8192_tokens_from_every_domain_alike() -> None:
    gate = load(sizes=DEFAULT_SIZES).gate
    assert gate.ids[:, 1:].size >= 8192
    assert {name: gate.domains.count(name) for name in SHIPPED} == dict.fromkeys(SHIPPED, 3)


def test_domains_take_turns() -> None:
    sets = load()
    assert sets.calibration.domains == (*SHIPPED, SHIPPED[0])
    assert sets.ranking.domains == SHIPPED[:3]


@pytest.mark.parametrize(("family", "bos"), FAMILIES.items())
def test_c55_text_sequences_begin_with_the_prefix_of_the_model_once(family: str, bos: list[int]) -> None:
    rows = rows_of(load(family), "legal")
    assert all(row[: len(bos)] == bos for row in rows)
    assert not any(token in row[1:] for row in rows for token in bos)


@pytest.mark.parametrize("domain", [name for name in SHIPPED if name != "chat"])
def test_sequences_laid_end_to_end_are_the_text_so_none_overlap(domain: str) -> None:
    content = next(item.content for item in shipped_domains() if item.name == domain)
    assert isinstance(content, str)
    laid = [token for row in rows_of(load(), domain) for token in row[1:]]  # BOS in front of each
    assert laid == codec_of("llama3").encode(content)[1 : 1 + len(laid)]


@pytest.mark.parametrize("family", FAMILIES)
def test_chat_sequences_begin_with_the_rendering_of_the_template(family: str) -> None:
    codec = codec_of(family)
    content = next(item.content for item in shipped_domains() if item.name == "chat")
    first = content[0]
    assert not isinstance(first, str)
    asked = codec.encode_chat([{"role": "user", "content": first.turns[0].content}])
    row = rows_of(load(family, sizes=DEFAULT_SIZES), "chat")[0]
    shared = min(len(asked) - 3, len(row))  # line ends behind the assistant's header join with what follows them
    assert row[:shared] == asked[:shared]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_chat_is_in_two_sequences(family: str) -> None:
    codec = codec_of(family)
    texts = [codec.decode(row) for row in rows_of(load(family, sizes=DEFAULT_SIZES), "chat")]
    for chat in next(item.content for item in shipped_domains() if item.name == "chat"):
        assert not isinstance(chat, str)
        assert sum(chat.turns[0].content in text for text in texts) <= 1


def test_without_a_chat_template_conversations_are_plain_text() -> None:
    codec = codec_of("llama3")
    sets = load_text_sets(codec.encode, None, VOCAB, sizes=SMALL)
    assert all(codec.decode(row).startswith("User: ") for row in rows_of(sets, "chat"))


def test_same_text_and_tokenizer_give_the_same_sets() -> None:
    first, second = load(), load()
    for one, other in zip(all_sets(first), all_sets(second), strict=True):
        assert one.digest == other.digest
        assert np.array_equal(one.ids, other.ids)


def test_the_three_digests_differ_and_so_do_those_of_two_tokenizers() -> None:
    digests = {text.digest for family in ("llama3", "gemma3") for text in all_sets(load(family))}
    assert len(digests) == 6


def test_one_changed_token_changes_the_digest_of_its_set_alone(tmp_path: Path) -> None:
    ids = distinct_ids()
    before = load_ids(tmp_path, ids)
    ids[-1, 5] += 1  # rows of calibration come last
    after = load_ids(tmp_path, ids)
    assert (before.gate.digest, before.ranking.digest) == (after.gate.digest, after.ranking.digest)
    assert before.calibration.digest != after.calibration.digest


def test_the_gate_stays_the_same_when_calibration_grows() -> None:
    grown = TextSizes(SetSize(13, 96), SMALL.ranking, SMALL.gate)
    assert load().gate.digest == load(sizes=grown).gate.digest


@pytest.mark.parametrize("capacity", [64, 256, 511, 512, 4096])
def test_a_small_context_gets_more_and_shorter_sequences(capacity: int) -> None:
    sizes = DEFAULT_SIZES.within(capacity)
    assert sizes.gate.length == min(capacity, 512)
    assert 18 * 512 <= sizes.gate.count * sizes.gate.length < 18 * 512 + capacity
    assert len(load(sizes=sizes).gate.ids) == sizes.gate.count


def test_a_domain_that_is_too_short_is_named() -> None:
    with pytest.raises(BuildError, match=r"domain records: records\.txt gives 0 of 1 sequences") as raised:
        load(sizes=TextSizes(SetSize(1, 16), SetSize(1, 16), SetSize(6, 10_500)))
    assert "--calibration" in raised.value.remedy


def test_an_id_that_the_model_has_no_row_for_is_refused() -> None:
    codec = codec_of("llama3")
    with pytest.raises(BuildError, match="the model knows 0 to 127999"):
        load_text_sets(codec.encode, codec.encode_chat, 128_000, sizes=SMALL)


def test_shipped_texts_are_listed_with_their_licence_and_are_plain_utf8() -> None:
    folder = Path(domains.__file__).parent
    readme = (folder / "README.md").read_text(encoding="utf-8")
    files = [folder / f"{name}.txt" if name != "chat" else folder / "chat.jsonl" for name in SHIPPED]
    for path in files:
        assert f"`{path.name}`" in readme
        text = path.read_text(encoding="utf-8")
        assert "\r" not in text
        assert "\ufffd" not in text
        assert text.endswith("\n")
    assert {path.suffix for path in folder.iterdir() if path.is_file()} == {".py", ".md", ".txt", ".jsonl"}
    assert 90_000 <= sum(path.stat().st_size for path in files) <= 120_000


def user_text(tmp_path: Path, words: int = 4000) -> Path:
    path = tmp_path / "logs.txt"
    path.write_text(" ".join(f"pump {i} at {i * 7 % 91} bar" for i in range(words)), encoding="utf-8")
    return path


def user_chats(tmp_path: Path, turns: Callable[[int], list[dict[str, str]]], count: int = 80) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps({"messages": turns(i)}) for i in range(count)), encoding="utf-8")
    return path


def asked_and_answered(i: int, system: str | None = None) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [
        *first,
        {"role": "user", "content": f"What is the state of machine {i}?"},
        {"role": "assistant", "content": f"Machine {i} runs at {i * 13 % 97} percent and was oiled {i} days ago."},
    ]


def test_the_users_text_takes_every_second_sequence_of_each_set(tmp_path: Path) -> None:
    sets = load(user_file=user_text(tmp_path))
    for text in all_sets(sets):
        assert set(text.domains[::2]) == {USER}
        assert text.domains[1::2] == tuple(SHIPPED[i % 6] for i in range(len(text.domains) // 2))


def test_a_byte_order_mark_and_windows_line_ends_make_no_tokens(tmp_path: Path) -> None:
    plain, marked = user_text(tmp_path), tmp_path / "marked.txt"
    text = plain.read_text(encoding="utf-8").replace(" pump", "\npump")
    plain.write_text(text, encoding="utf-8")
    marked.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load(user_file=plain).gate.digest == load(user_file=marked).gate.digest


def test_users_chats_go_through_the_template_with_one_system_message_a_sequence(tmp_path: Path) -> None:
    path = user_chats(tmp_path, lambda i: asked_and_answered(i, "Answer in one sentence."))
    rows = rows_of(load("chatml", user_file=path), USER)
    decoded = [codec_of("chatml").decode(row) for row in rows]
    assert len(rows) == 6 + 2 + 4
    assert all(text.startswith("system\nAnswer in one sentence.") for text in decoded)
    assert not any("Answer in one" in text[10:] for text in decoded)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"gr\xfc\xdfe", "not UTF-8 at byte 2"),
        (b"too few words", "gives 0 of 12 sequences .*too short"),
    ],
)
def test_a_broken_text_file_is_refused_by_name(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "own.txt"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=rf"own\.txt.*{message}") as raised:
        load(user_file=path)
    assert raised.value.remedy


@pytest.mark.parametrize("name", ["none.txt", "none.jsonl", "none.npy"])
def test_a_missing_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"none\..*: No such file") as raised:
        load(user_file=tmp_path / name)
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ([{"role": "robot", "content": "Hi"}], r"Invalid enum value 'robot' - at `\$\.messages\[0\]\.role`"),
        ([{"role": "user"}], "missing required field `content`"),
        ([TURNS[1]], "message 1 is from assistant, user is expected there"),
        ([TURNS[0], TURNS[0]], "message 2 is from user, assistant is expected there"),
        ([*TURNS, {"role": "system", "content": "Be brief."}], "message 3 is from system"),
        ([TURNS[0]], "the last message must be the assistant's answer"),
        ([], "the last message must be the assistant's answer"),
        ([TURNS[0], {"role": "assistant", "content": " "}], "message 2 is empty"),
    ],
)
def test_a_broken_chat_is_refused_with_its_line(tmp_path: Path, turns: list[dict[str, str]], message: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"messages": TURNS}) + "\n\n" + json.dumps({"messages": turns}) + "\n")
    with pytest.raises(UsageError, match=rf"own\.jsonl, line 3: .*{message}") as raised:
        load(user_file=path)
    assert "roles are system, user and assistant" in raised.value.remedy


def test_a_line_that_is_not_json_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text("user: hello\n")
    with pytest.raises(UsageError, match=r"own\.jsonl, line 1: "):
        load(user_file=path)


def test_a_chat_that_the_models_template_refuses_is_named(tmp_path: Path) -> None:
    def refuse_system(messages: object) -> list[int]:
        return strict.encode_chat([{"role": "assistant", "content": "first"}])

    strict = codec_of("gemma3")
    path = user_chats(tmp_path, asked_and_answered)
    with pytest.raises(UsageError, match=r"chats\.jsonl, line 1: .*template refuses"):
        load_text_sets(strict.encode, refuse_system, VOCAB, user_file=path, sizes=SMALL)


def test_a_file_that_repeats_itself_is_refused(tmp_path: Path) -> None:
    path = user_chats(tmp_path, lambda i: asked_and_answered(7))
    with pytest.raises(UsageError, match="the same sequence twice"):
        load(user_file=path)


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.truncate(domains.MAX_FILE_BYTES + 1)
    with pytest.raises(UsageError, match="more than 16 MiB"):
        load(user_file=path)


def distinct_ids(rows: int = 22, length: int = 96) -> np.ndarray:
    return np.arange(rows * length, dtype=np.int64).reshape(rows, length) % 5000


def load_ids(tmp_path: Path, ids: np.ndarray) -> TextSets:
    path = tmp_path / "ids.npy"
    np.save(path, ids)
    return load_text_sets(None, None, 5000, user_file=path, sizes=SMALL)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16])
def test_token_ids_need_no_tokenizer_and_are_dealt_in_order(tmp_path: Path, dtype: type) -> None:
    ids = distinct_ids()
    sets = load_ids(tmp_path, ids.astype(dtype))
    assert np.array_equal(sets.gate.ids, ids[:12])
    assert np.array_equal(sets.ranking.ids, ids[12:15, :80])
    assert np.array_equal(sets.calibration.ids, ids[15:])
    assert sets.gate.ids.dtype == np.int64


def test_a_model_without_a_tokenizer_is_told_to_bring_ids() -> None:
    with pytest.raises(BuildError, match="no tokenizer") as raised:
        load_text_sets(None, None, 5000)
    assert "--calibration FILE.npy" in raised.value.remedy


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (distinct_ids().astype(np.float32), r"holds float32 \[22, 96\]"),
        (distinct_ids().ravel(), r"holds int64 \[2112\]"),
        (distinct_ids(rows=21), "has 21 sequences of 96 ids; at least 22 sequences of 96 ids are needed"),
        (distinct_ids(rows=30, length=95), "has 30 sequences of 95 ids"),
        (distinct_ids() + 2900, r"id 5000 at \[\d+, \d+\] is outside the vocabulary 0\.\.4999"),
        (distinct_ids() - 1, r"id -1 at \[0, 0\] is outside the vocabulary"),
        (np.array([["a"]], object), "is not a .npy file of numbers"),
        (np.tile(distinct_ids(rows=11), (2, 1)), "the same sequence twice"),
    ],
)
def test_wrong_ids_are_refused(tmp_path: Path, ids: np.ndarray, message: str) -> None:
    with pytest.raises(UsageError, match=rf"ids\.npy.*{message}"):
        load_ids(tmp_path, ids)


@pytest.mark.parametrize("data", [b"", b"0 1 2 3", b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_no_array_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "ids.npy"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"ids\.npy is not a \.npy file of numbers"):
        load_text_sets(None, None, 5000, user_file=path, sizes=SMALL)


def test_an_archive_of_arrays_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", ids=distinct_ids())
    (tmp_path / "ids.npz").rename(tmp_path / "ids.npy")
    with pytest.raises(UsageError, match="is an archive of arrays"):
        load_text_sets(None, None, 5000, user_file=tmp_path / "ids.npy", sizes=SMALL)


@pytest.mark.model
def test_the_demo_models_own_tokenizer_fills_the_default_sets(smollm2_engine: Path) -> None:
    codec = TextCodec.load(smollm2_engine)
    sets = load_text_sets(codec.encode, codec.encode_chat, 49152)
    assert sets.gate.ids.shape == (18, 512)
    chat = codec.decode(rows_of(sets, "chat")[0])
    assert chat.startswith("system\nYou are a helpful AI assistant named SmolLM")
