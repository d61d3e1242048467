"""When streamed text is sent on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.serving.chunks import ChunkBuffer


def opened(chunk_tokens: int = 4, chunk_ms: float = 50) -> ChunkBuffer:
    """Return a buffer whose first chunk has gone out at 10.0 s."""
    buffer = ChunkBuffer(chunk_tokens, chunk_ms)
    buffer.push("a", 1, 10.0)
    assert buffer.take(10.0) == ("a", 1)
    return buffer


def test_the_first_token_is_sent_at_once() -> None:
    buffer = ChunkBuffer(8, 50)
    buffer.push("a", 1, 10.0)
    assert buffer.take(10.0) == ("a", 1)
    assert buffer.take(99.0) is None


def test_the_first_chunk_waits_for_text_not_for_a_token() -> None:
    buffer = ChunkBuffer(8, 50)
    buffer.push("", 1, 10.0)
    assert buffer.take(11.0) is None
    buffer.push("é", 1, 11.0)
    assert buffer.take(11.0) == ("é", 2)


def test_a_chunk_is_complete_with_its_last_token() -> None:
    buffer = opened(chunk_tokens=3)
    buffer.push("b", 1, 10.0)
    buffer.push("c", 1, 10.0)
    assert buffer.take(10.0) is None
    buffer.push("d", 1, 10.0)
    assert buffer.take(10.0) == ("bcd", 3)


def test_a_chunk_is_complete_after_its_time() -> None:
    buffer = opened(chunk_ms=50)
    buffer.push("b", 1, 20.0)
    assert buffer.take(20.049) is None
    assert buffer.take(20.051) == ("b", 1)


def test_a_newline_completes_a_chunk() -> None:
    buffer = opened()
    buffer.push("b\nc", 1, 10.0)
    assert buffer.take(10.0) == ("b\nc", 1)


def test_the_end_completes_a_chunk() -> None:
    buffer = opened()
    buffer.push("b", 1, 10.0)
    assert buffer.take(10.0, is_end=True) == ("b", 1)


def test_no_chunk_is_empty() -> None:
    buffer = opened(chunk_tokens=1)
    buffer.push("", 1, 10.0)
    assert buffer.take(99.0) is None
    assert buffer.take(99.0, is_end=True) is None


TOKENS = st.lists(st.tuples(st.sampled_from(["", "a", "bc", "\n"]), st.floats(0, 0.2)))


@given(TOKENS, st.integers(1, 8), st.integers(0, 100))
def test_nothing_is_lost_and_no_chunk_waits_beyond_its_limits(
    tokens: list[tuple[str, float]], chunk_tokens: int, chunk_ms: int
) -> None:
    buffer = ChunkBuffer(chunk_tokens, chunk_ms)
    now, chunks = 0.0, []
    for text, pause in tokens:
        now += pause
        buffer.push(text, 1, now)
        if chunk := buffer.take(now):
            chunks.append(chunk)
    if chunk := buffer.take(now, is_end=True):
        chunks.append(chunk)
    assert "".join(text for text, _ in chunks) == "".join(text for text, _ in tokens)
    assert sum(count for _, count in chunks) <= len(tokens)
    assert all(text for text, _ in chunks)
