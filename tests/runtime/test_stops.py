import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.errors import RequestError
from edge_runtime.session.stops import StopFilter, check_stops


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """Return all the text a client would get, and whether a stop was found."""
    stop_filter = StopFilter(stops)
    out = ""
    for piece in pieces:
        text, is_matched = stop_filter.push(piece)
        out += text
        if is_matched:
            return out, True
    return out + stop_filter.flush(), False


def test_c49_a_stop_split_over_pieces_is_never_streamed() -> None:
    stop_filter = StopFilter(["\nUser:"])
    assert stop_filter.push("\nUser") == ("", False)
    assert stop_filter.push(":") == ("", True)
    assert run(["own fox"], ["The quick brown fox"]) == ("The quick br", True)


def test_c49_every_split_gives_the_same_text() -> None:
    for stop, text, expected in (("\nUser:", "\nUser:", ""), ("own fox", "The quick brown fox jumps", "The quick br")):
        for first in range(len(text) + 1):
            for second in range(first, len(text) + 1):
                pieces = [text[:first], text[first:second], text[second:]]
                assert run([stop], pieces) == (expected, True)


def test_c49_no_endpoint_is_forgotten() -> None:
    for stops in (["never", "fox"], ["fox", "never"], ["x", "fox"]):
        assert run(stops, list("The quick brown fox jumps"))[1]


def test_c49_only_a_tail_that_could_begin_a_stop_is_held_back() -> None:
    stop_filter = StopFilter(["own fox", "end"])
    assert stop_filter.push("The quick br") == ("The quick br", False)
    assert stop_filter.push("own f") == ("", False)
    assert stop_filter.push("arm e") == ("own farm ", False)
    assert stop_filter.push("x") == ("ex", False)
    assert stop_filter.push("en") == ("", False)
    assert stop_filter.flush() == "en"
    assert stop_filter.flush() == ""


@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    data=st.data(),
)
def test_c49_result_does_not_depend_on_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(stops, pieces) == run(stops, [text]) == run(stops, list(text))


def test_stop_complete_first_wins_and_the_longest_of_those_that_end_together() -> None:
    assert run(["bcd", "c"], ["abcd"]) == run(["bcd", "c"], list("abcd")) == ("ab", True)
    assert run(["c", "bc"], ["abcd"]) == run(["c", "bc"], list("abcd")) == ("a", True)


def test_nothing_comes_out_after_a_match() -> None:
    stop_filter = StopFilter(["x"])
    assert stop_filter.push("axb") == ("a", True)
    assert stop_filter.push("more") == ("", True)
    assert stop_filter.flush() == ""


def test_c42_stop_on_the_very_last_token_is_a_stop() -> None:
    assert run(["!"], ["Hello", " world", "!"]) == ("Hello world", True)


def test_c51_null_and_empty_list_mean_none_and_a_string_is_one_stop() -> None:
    assert check_stops([]) == check_stops(None) == ()
    assert check_stops("abc") == ("abc",)
    assert check_stops(["a", "bc"]) == ("a", "bc")
    assert run([], ["text"]) == ("text", False)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ([""], "empty"),
        ("", "empty"),
        (["a", ""], "stop[1]"),
        ([str(i) for i in range(17)], "at most 4"),
        ([str(i) for i in range(5)], "holds 5"),
        (["x" * 65], "at most 64"),
        ([3], "int"),
        ({"a": 1}, "dict"),
    ],
)
def test_c51_other_stops_are_refused_with_the_limit(value: object, told: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_stops(value)
    assert (caught.value.code, caught.value.param) == ("invalid_request", "$.stop")
    assert told in str(caught.value)
