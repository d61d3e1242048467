"""One request from its prompt to its finish reason."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.serving.sequence import Sequence, State
from edge_runtime.session.detokenizer import Detokenizer
from edge_runtime.session.sampling import Sampler, SamplingParams
from edge_runtime.session.stops import StopFilter
from support.scripted_engine import END, VOCAB, byte_codec


def sequence(
    prompt: str = "abc", *, stops: tuple[str, ...] = (), max_tokens: int = 10, capacity: int = 100
) -> Sequence:
    codec = byte_codec()
    return Sequence(
        key=1,
        prompt=codec.encode(prompt),
        sampler=Sampler(SamplingParams(), VOCAB, VOCAB),
        detokenizer=Detokenizer(codec),
        stops=StopFilter(stops),
        stop_ids=codec.eos_ids,
        max_tokens=max_tokens,
        capacity=capacity,
    )


def feed(seq: Sequence, answer: str | bytes) -> str:
    """Append the bytes of `answer` until the sequence ends; return the text it gave out."""
    text = ""
    for token in answer.encode() if isinstance(answer, str) else answer:
        if seq.is_done:
            break
        text += seq.append(token)
    return text


def test_c42_one_token_ends_with_length() -> None:
    seq = sequence(max_tokens=1)
    assert feed(seq, "hello") == "h"
    assert (seq.finish_reason, seq.text, len(seq.output)) == ("length", "h", 1)


def test_c42_an_end_token_at_once_is_stop_with_empty_text() -> None:
    seq = sequence(max_tokens=1)
    assert seq.append(END) == ""
    assert (seq.finish_reason, seq.text, seq.output) == ("stop", "", [])


def test_c42_a_stop_string_on_the_last_allowed_token_is_stop() -> None:
    seq = sequence(stops=("lo",), max_tokens=5)
    assert feed(seq, "hello") == "hel"
    assert (seq.finish_reason, seq.text, len(seq.output)) == ("stop", "hel", 5)


def test_c42_a_full_slot_ends_with_length() -> None:
    seq = sequence("abc", capacity=5)
    assert feed(seq, "hello") == "he"
    assert (seq.finish_reason, len(seq.prompt) + len(seq.output)) == ("length", 5)


@pytest.mark.parametrize("reason", ["cancelled", "deadline"])
def test_c42_an_early_end_keeps_the_text_so_far(reason: str) -> None:
    seq = sequence()
    given = feed(seq, "hel")
    assert given + seq.finish(reason) == seq.text == "hel"  # type: ignore[arg-type]
    assert (seq.finish_reason, seq.state) == (reason, State.DONE)


def test_finishing_again_changes_nothing() -> None:
    seq = sequence()
    feed(seq, "hel")
    seq.finish("cancelled")
    assert seq.finish("deadline") == ""
    assert seq.finish_reason == "cancelled"


def test_the_beginning_of_a_stop_is_held_back_and_released_at_the_end() -> None:
    seq = sequence(stops=("own fox",), max_tokens=9)
    given = feed(seq, "The brown")
    assert given == seq.text == "The brown"
    assert seq.finish_reason == "length"
    held = sequence(stops=("own fox",), max_tokens=20)
    assert feed(held, "The brown") == "The br"


def test_a_character_cut_by_the_limit_shows_once() -> None:
    seq = sequence(max_tokens=2)
    assert feed(seq, "€".encode()) == seq.text == "\ufffd"


def test_a_failure_has_no_finish_reason() -> None:
    seq = sequence(stops=("lot",))
    assert feed(seq, "hello") + seq.finish(None) == seq.text == "hello"
    assert seq.finish_reason is None
    assert seq.is_done


def test_the_prompt_is_complete_with_its_last_row() -> None:
    seq = sequence("abcde")
    seq.state = State.PREFILLING
    seq.advance(3)
    assert seq.state is State.PREFILLING
    seq.advance(2)
    assert (seq.state, seq.position) == (State.DECODING, 5)


def test_greedy_sampling_takes_the_highest_logit() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[65] = 1.0
    assert sequence().sample(logits) == 65
