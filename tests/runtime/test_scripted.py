"""The engine without a model."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from edge_runtime.backends import Float32
from edge_runtime.backends.scripted import PEAK, ScriptedBackend
from edge_runtime.errors import BackendError, RequestError
from edge_runtime.session.session import Session
from support.scripted_engine import BABBLE, VOCAB, answers, byte_manifest

PROMPT = list(b"The quick brown fox")


def session(capacity: int = 64) -> Session:
    return Session(ScriptedBackend(byte_manifest(capacity=capacity), BABBLE))


def chosen(logits: Float32) -> int:
    """Return the scripted id of logits [V]."""
    assert logits.shape == (VOCAB,)
    assert logits.max() == PEAK
    return int(logits.argmax())


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_prefill_in_chunks_equals_the_whole() -> None:
    whole = chosen(session().prefill(0, PROMPT))
    other = session()
    other.prefill(0, PROMPT[:7])
    other.prefill(0, PROMPT[7:8], 7)
    assert chosen(other.prefill(0, PROMPT[8:], 8)) == whole


def test_c32_two_slots_give_what_each_gives_alone() -> None:
    both = session()
    a, b = chosen(both.prefill(0, PROMPT)), chosen(both.prefill(1, PROMPT[:3]))
    logits = both.decode([0, 1], [a, b], [len(PROMPT), 3])
    after_a, after_b = chosen(logits[0]), chosen(logits[1])
    alone = session()
    alone.prefill(1, PROMPT)
    assert chosen(alone.decode([1], [a], [len(PROMPT)])[0]) == after_a
    alone.prefill(0, PROMPT[:3])
    assert chosen(alone.decode([0], [b], [3])[0]) == after_b


def test_c31_rows_beyond_the_position_have_no_influence() -> None:
    fresh = chosen(session().prefill(0, PROMPT[:5]))
    used = session()
    used.prefill(0, [1] * 60)
    assert chosen(used.prefill(0, PROMPT[:5])) == fresh


def test_a_wrong_position_changes_the_answer_or_is_refused() -> None:
    right = session()
    right.prefill(0, PROMPT)
    after = chosen(right.decode([0], [97], [len(PROMPT)])[0])
    assert chosen(right.decode([0], [97], [len(PROMPT) - 1])[0]) != after
    with pytest.raises(BackendError, match="holes"):
        right.decode([0], [97], [len(PROMPT) + 5])


def test_verify_gives_the_logits_of_every_position() -> None:
    step = session()
    singles = [chosen(step.prefill(0, PROMPT[i : i + 1], i)) for i in range(5)]
    assert [chosen(row) for row in session().verify(0, PROMPT[:5], 0)] == singles


def test_saved_rows_continue_in_the_other_slot() -> None:
    s = session()
    s.prefill(0, PROMPT)
    s.copy_rows(0, 1, len(PROMPT))
    there = chosen(s.decode([1], [97], [len(PROMPT)])[0])
    assert chosen(s.decode([0], [97], [len(PROMPT)])[0]) == there


def test_answers_follow_their_prompt_and_nothing_else() -> None:
    s = Session(ScriptedBackend(byte_manifest(), answers({"ab": "xyz"})))
    assert chosen(s.prefill(0, list(b"ab"))) == ord("x")
    assert chosen(s.decode([0], [ord("x")], [2])[0]) == ord("y")
    other = chosen(s.prefill(1, list(b"ax")))
    assert other == BABBLE(ids(*b"ax"))


def test_c37_a_call_from_another_thread_is_refused() -> None:
    s = session()
    errors: list[Exception] = []

    def call() -> None:
        try:
            s.prefill(0, PROMPT)
        except BackendError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "thread" in str(errors[0])
    chosen(s.prefill(0, PROMPT))  # the owner goes on


def test_a_full_slot_is_refused() -> None:
    with pytest.raises(RequestError, match="capacity of 8"):
        session(capacity=8).prefill(0, PROMPT)


@pytest.mark.parametrize(
    ("slots", "tokens", "starts", "rows"),
    [
        ((2,), [[1]], [0], 1),
        ((1, 0), [[1], [1]], [0, 0], 1),
        ((0, 1), [[1, 2], [1, 2]], [0, 0], 1),
        ((0,), [[1], [2]], [0], 1),
        ((0,), [[VOCAB]], [0], 1),
        ((0,), [[1]], [64], 1),
        ((0,), [[1]], [0, 0], 1),
        ((0,), [[1, 2]], [0], 3),
        ((0,), [[1, 2]], [0], 0),
    ],
)
def test_a_breach_of_the_contract_is_refused(
    slots: tuple[int, ...], tokens: list[list[int]], starts: list[int], rows: int
) -> None:
    backend = ScriptedBackend(byte_manifest(capacity=64), BABBLE)
    with pytest.raises(BackendError, match="contract"):
        backend.step(slots, np.array(tokens, np.int64), np.array(starts, np.int64), rows)


def test_a_closed_backend_is_refused() -> None:
    s = session()
    s.close()
    s.close()
    with pytest.raises(BackendError, match="closed"):
        s.prefill(0, PROMPT)
