"""Measurements are kept once and trusted only when whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_engines.sensitivity.journal import Journal, open_journal
from edge_engines.sensitivity.measure import Effect

EFFECT = Effect(kl=0.1 + 0.2, kl_p99=1 / 3, kl_max=2.5e-9, same_top1=1.0)


class Measured:
    """A measurement that counts how often it is made."""

    def __init__(self, value: object = EFFECT) -> None:
        self.value, self.times = value, 0

    def __call__(self) -> object:
        self.times += 1
        return self.value


def opened(folder: Path | None, digest: str = "a" * 64) -> Journal:
    return open_journal(folder, digest, lambda text: None)


def file_of(folder: Path) -> Path:
    return next(folder.glob("*.journal"))


def test_a_result_is_measured_once_and_read_back_to_the_last_bit(tmp_path: Path) -> None:
    measure = Measured()
    for _ in range(3):
        assert opened(tmp_path).once("effect", Effect, measure) == EFFECT
    assert measure.times == 1


def test_bytes_and_tables_are_read_back(tmp_path: Path) -> None:
    raw, table = bytes(range(256)), {"a": EFFECT}
    opened(tmp_path).once("raw", bytes, lambda: raw)
    opened(tmp_path).once("table", dict[str, Effect], lambda: table)
    again = opened(tmp_path)
    assert again.once("raw", bytes, Measured()) == raw  # type: ignore[arg-type]
    assert again.once("table", dict[str, Effect], Measured()) == table  # type: ignore[arg-type]
    assert again.hits == 2


def test_results_of_other_scopes_and_checkpoints_are_not_mixed_up(tmp_path: Path) -> None:
    measure = Measured()
    opened(tmp_path).within("a", "b").once("effect", Effect, measure)
    opened(tmp_path).within("a", "c").once("effect", Effect, measure)
    opened(tmp_path).within("ab").once("effect", Effect, measure)
    opened(tmp_path, "b" * 64).within("a", "b").once("effect", Effect, measure)
    assert measure.times == 4


def test_without_a_folder_results_are_kept_for_the_run_only() -> None:
    journal, measure = opened(None), Measured()
    for _ in range(2):
        journal.once("effect", Effect, measure)
    assert measure.times == 1
    opened(None).once("effect", Effect, measure)
    assert measure.times == 2


def test_a_torn_last_line_is_ignored_and_what_follows_it_is_kept(tmp_path: Path) -> None:
    opened(tmp_path).once("first", Effect, Measured())
    opened(tmp_path).once("second", Effect, Measured())
    file = file_of(tmp_path)
    file.write_bytes(file.read_bytes()[:-7])
    again, second = opened(tmp_path), Measured()
    again.once("first", Effect, Measured())
    again.once("second", Effect, second)
    assert (again.hits, second.times) == (1, 1)
    third = opened(tmp_path)
    third.once("second", Effect, second)
    assert (third.hits, second.times) == (1, 1)


@pytest.mark.parametrize("place", [0.1, 0.35, 0.6, 0.95])
def test_an_altered_byte_is_never_trusted(tmp_path: Path, place: float) -> None:
    opened(tmp_path).once("effect", Effect, Measured())
    file = file_of(tmp_path)
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 1
    file.write_bytes(bytes(content))
    measure = Measured()
    assert opened(tmp_path).once("effect", Effect, measure) == EFFECT
    assert measure.times == 1


def test_a_whole_line_of_another_kind_is_measured_again(tmp_path: Path) -> None:
    opened(tmp_path).once("effect", Effect, Measured({"kl": "much"}))
    measure = Measured()
    assert opened(tmp_path).once("effect", Effect, measure) == EFFECT
    assert measure.times == 1


@pytest.mark.parametrize("content", [b"", b"\n\n", b"not a journal\n", b"\xff\xfe\x00" * 100])
def test_a_file_of_something_else_is_ignored(tmp_path: Path, content: bytes) -> None:
    opened(tmp_path).once("effect", Effect, Measured())
    file_of(tmp_path).write_bytes(content)
    measure = Measured()
    opened(tmp_path).once("effect", Effect, measure)
    opened(tmp_path).once("effect", Effect, measure)
    assert measure.times == 1


def test_a_cache_that_can_not_be_written_is_told_of_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    notes: list[str] = []
    journal = open_journal(tmp_path / "file", "a" * 64, notes.append)
    for name in ("first", "second"):
        assert journal.once(name, Effect, Measured()) == EFFECT  # type: ignore[arg-type]
    assert len(notes) == 1
    assert "not kept" in notes[0]
