"""Progress: bars for a terminal, one line per step for everything else."""

from __future__ import annotations

import io

import pytest

from edge_tools.places import cache_folder
from edge_tools.progress import shown_progress


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run_two_steps(stream: io.StringIO) -> str:
    with shown_progress(stream) as progress:
        progress.step("reading", 2)
        progress.advance(1)
        progress.advance(1)
        progress.note("half way")
        progress.step("writing", None)
    return stream.getvalue()


def test_a_log_gets_one_line_per_step_with_its_time() -> None:
    lines = run_two_steps(io.StringIO()).splitlines()
    assert [line.partition("] ")[2] for line in lines] == ["reading", "half way", "writing"]
    assert lines[0].startswith("[   0.0 s]")


def test_a_terminal_gets_bars_that_end_full() -> None:
    last = run_two_steps(Terminal()).split("reading")[-1]
    assert "100%" in last
    assert "writing" in last


def test_a_failed_step_is_not_shown_as_done() -> None:
    def fail(stream: Terminal) -> None:
        with shown_progress(stream) as progress:
            progress.step("reading", 2)
            raise ValueError("broken")

    stream = Terminal()
    with pytest.raises(ValueError, match="broken"):
        fail(stream)
    assert "100%" not in stream.getvalue()


def test_the_cache_is_where_the_desktop_standard_says() -> None:
    assert str(cache_folder({"XDG_CACHE_HOME": "/somewhere"})) == "/somewhere/edge-runtime"
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == cache_folder({})
    assert cache_folder({}).parts[-2:] == (".cache", "edge-runtime")
