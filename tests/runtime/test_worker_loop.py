"""The worker's step loop, played turn by turn over a real socket pair."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psutil
import pytest

from edge_runtime.backends import Int64
from edge_runtime.errors import BackendError
from edge_runtime.messages import ERROR_TABLE
from edge_runtime.worker.frames import Cancel, Failed, Finished, FrameError, Started, Stop
from edge_runtime.worker.link import LinkClosedError
from support.scripted_engine import BABBLE, END, answers, solo_answer
from support.worker_peer import Clock, Desk

SHORT, LONG = "abc", "The quick brown fox jumps over the lazy dog, again and again"


@pytest.fixture
def desk() -> Iterator[Desk]:
    with closing(Desk(chunk=8)) as made:
        yield made


def outcome(frame: Any) -> tuple[str, str, int]:
    """Return what C42 asks of a finished frame: reason, text, completion tokens."""
    assert isinstance(frame, Finished)
    return frame.reason, frame.text, frame.completion_tokens


# ---- one request


def test_an_answer_has_all_its_numbers(desk: Desk) -> None:
    done = desk.answer(LONG, max_tokens=30)
    assert outcome(done) == ("length", solo_answer(LONG, 30), 30)
    assert done.prompt_tokens == len(LONG)
    started = desk.wait_for(Started)
    assert (started.key, started.prompt_tokens, started.seed) == (1, len(LONG), done.seed)


def test_a_chat_goes_through_the_template(desk: Desk) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert outcome(desk.answer(messages=messages, max_tokens=5)) == ("length", solo_answer("user: hi\n", 5), 5)


def test_a_stream_is_the_answer_in_whole_code_points() -> None:
    text = "né 1€\nund 😀 dann"
    with closing(Desk(answers({SHORT: text}))) as desk:
        key = desk.submit(SHORT, stream=True, chunk_tokens=3, chunk_ms=1000, max_tokens=len(text.encode()))
        done = desk.finish(key)[0]
        chunks = desk.chunks(key)
    assert desk.streamed(key) == done.text == text
    assert chunks[0].text == "n"
    assert sum(chunk.count for chunk in chunks) == done.completion_tokens
    assert all("\ufffd" not in chunk.text for chunk in chunks)


def test_no_tokens_are_sent_of_an_answer_that_is_not_streamed(desk: Desk) -> None:
    desk.answer(SHORT, max_tokens=20)
    assert not desk.chunks(1)


def test_the_same_seed_gives_the_same_answer_in_any_slot(desk: Desk) -> None:
    options = {"max_tokens": 40, "temperature": 2.0, "seed": 11}
    alone = desk.answer(LONG, **options)
    keys = desk.submit(SHORT, max_tokens=90), desk.submit(LONG, **options)
    assert desk.finish(*keys)[1].text == alone.text != solo_answer(LONG, 40)
    assert alone.seed == 11


def test_times_are_those_of_the_clock() -> None:
    clock = Clock()

    def slow(history: Int64) -> int:
        clock.now += 0.1
        return BABBLE(history)

    with closing(Desk(slow, clock=clock, slots=1)) as desk:
        keys = desk.submit(SHORT, max_tokens=3), desk.submit(SHORT, max_tokens=1)
        first, second = desk.finish(*keys)
    ms = pytest.approx
    assert (first.queue_ms, first.prefill_ms, first.ttft_ms, first.tpot_ms) == (ms(0), ms(100), ms(100), ms(100))
    assert (second.queue_ms, second.prefill_ms, second.ttft_ms, second.tpot_ms) == (ms(300), ms(100), ms(400), 0.0)


# ---- limits of the context


def test_c39_prompt_and_output_never_exceed_the_capacity() -> None:
    with closing(Desk(capacity=1024)) as desk:
        done = desk.answer("x" * 900, max_tokens=124)
        assert outcome(done)[::2] == ("length", 124)
        refused = desk.answer("x" * 900, max_tokens=512)
    assert (refused.code, refused.param) == ("context_length_exceeded", "$.max_tokens")
    assert all(number in refused.message for number in ("900", "512", "1024", "124"))


def test_c40_a_prompt_that_leaves_room_for_one_token_works() -> None:
    with closing(Desk(capacity=50)) as desk:
        assert outcome(desk.answer("x" * 49, max_tokens=1))[::2] == ("length", 1)


@pytest.mark.parametrize("num_prompt", [50, 51])
def test_c40_a_prompt_that_leaves_no_room_is_refused_before_any_step(num_prompt: int) -> None:
    with closing(Desk(capacity=50)) as desk:
        refused = desk.answer("x" * num_prompt, max_tokens=1)
        assert refused.code == "context_length_exceeded"
        assert str(num_prompt) in refused.message
        assert "50" in refused.message
        assert desk.pulse.step_count == 0
        assert outcome(desk.answer(SHORT, max_tokens=5)) == ("length", solo_answer(SHORT, 5), 5)


# ---- finish reasons


def test_c42_every_end_has_its_reason_and_counts_that_match() -> None:
    script = answers({"eos": [END], "stop": "hello", "late": [*b"hi", END]})
    with closing(Desk(script, capacity=20)) as desk:
        assert outcome(desk.answer(SHORT, max_tokens=1))[::2] == ("length", 1)
        assert outcome(desk.answer("eos", max_tokens=1)) == ("stop", "", 0)
        assert outcome(desk.answer("late", max_tokens=9)) == ("stop", "hi", 2)
        assert outcome(desk.answer("stop", max_tokens=5, stop=["lo"])) == ("stop", "hel", 5)
        assert outcome(desk.answer("stop", max_tokens=16))[::2] == ("length", 16)
        key = desk.submit(SHORT, max_tokens=10)
        desk.turn(4)
        desk.send(Cancel(key))
        assert outcome(desk.finish(key)[0]) == ("cancelled", solo_answer(SHORT, 4), 4)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [("The quick brown fox", "own fox", "The quick br"), ("\nUser: and so on", "\nUser:", ""), ("éé€ fin", "€", "éé")],
)
def test_c49_a_stop_string_over_tokens_never_shows(stream: bool, said: str, stop: str, text: str) -> None:
    with closing(Desk(answers({SHORT: said}))) as desk:
        key = desk.submit(SHORT, stream=stream, stop=[stop], max_tokens=len(said.encode()), chunk_tokens=1)
        done = desk.finish(key)[0]
    assert (done.reason, done.text) == ("stop", text)
    assert desk.streamed(key) == (text if stream else "")


def test_c49_text_held_back_is_released_at_the_end() -> None:
    with closing(Desk(answers({SHORT: "The brown"}))) as desk:
        key = desk.submit(SHORT, stream=True, stop=["own fox", "never"], max_tokens=9)
        assert outcome(desk.finish(key)[0]) == ("length", "The brown", 9)
    assert desk.streamed(key) == "The brown"


# ---- two at a time


def test_c32_two_requests_are_each_what_they_are_alone(desk: Desk) -> None:
    keys = desk.submit("abc", max_tokens=40), desk.submit("hello world", max_tokens=25)
    assert [f.text for f in desk.finish(*keys)] == [solo_answer("abc", 40), solo_answer("hello world", 25)]
    twins = desk.submit(LONG, max_tokens=30), desk.submit(LONG, max_tokens=30)
    assert {f.text for f in desk.finish(*twins)} == {solo_answer(LONG, 30)}


def test_c32_a_request_that_joins_changes_nothing(desk: Desk) -> None:
    first = desk.submit(SHORT, max_tokens=60)
    desk.turn(9)
    second = desk.submit(LONG, max_tokens=20)
    assert [f.text for f in desk.finish(first, second)] == [solo_answer(SHORT, 60), solo_answer(LONG, 20)]


def test_a_long_prompt_holds_a_running_answer_up_by_one_chunk(desk: Desk) -> None:
    running = desk.submit(SHORT, max_tokens=60, stream=True, chunk_tokens=1)
    desk.turn(3)
    desk.submit("y" * 80, max_tokens=1)
    desk.turn(20)  # ten chunks of eight, ten decode steps
    assert len(desk.chunks(running)) == 3 + 10


def test_c38_fifty_rounds_of_start_cancel_and_finish_never_mix_two_answers(desk: Desk) -> None:
    seed = 20240607
    draw = random.Random(seed)
    held: dict[int, tuple[str, int]] = {}
    done: dict[int, tuple[str, int]] = {}
    for number in range(50):
        prompt = f"<sentinel-{number}>" + "z" * draw.randrange(60)
        wanted = draw.randrange(1, 40)
        key = desk.submit(prompt, max_tokens=wanted, stream=draw.random() < 0.5)
        held[key] = (prompt, wanted)
        desk.turn(draw.randrange(1, 30))
        if draw.random() < 0.4:
            desk.send(Cancel(draw.choice(list(held))))
            desk.turn()
        while len(held) > 2:
            desk.turn()
            done |= {key: held.pop(key) for key in list(held) if desk.terminal(key)}
    desk.finish(*held)
    done |= held
    assert len(done) == 50
    for key, (prompt, wanted) in done.items():
        frame = desk.terminal(key)
        assert isinstance(frame, Finished), f"seed {seed}"
        assert frame.text == solo_answer(prompt, frame.completion_tokens), f"seed {seed}"
        assert frame.reason == ("length" if frame.completion_tokens == wanted else "cancelled")
        assert desk.streamed(key) in ("", frame.text)
    assert {desk.terminal(key).reason for key in done} == {"length", "cancelled"}  # type: ignore[union-attr]


def test_c36_a_thousand_requests_leave_no_memory_behind(desk: Desk) -> None:
    for _ in range(200):  # warm-up
        desk.answer(SHORT, max_tokens=2)
    desk.frames.clear()
    before = psutil.Process().memory_info().rss
    for _ in range(1000):
        desk.answer(SHORT, max_tokens=2)
        desk.frames.clear()
    assert psutil.Process().memory_info().rss - before < 5e6  # budget of the case: 5 MB per 100 cycles


# ---- what a model or a bug does to one request


class SpoiltError(Exception):
    """A bug of ours, for the test."""


@pytest.mark.parametrize("bad", [[float("nan")], [float("inf")], [-float("inf")] * 257], ids=["nan", "inf", "-inf"])
def test_c43_bad_logits_at_step_3_end_that_request_after_2_tokens(desk: Desk, bad: list[float]) -> None:
    spoil_logits(desk, slot=1, position=len(LONG) + 1, values=bad)
    good, broken = desk.submit(SHORT, max_tokens=30), desk.submit(LONG, max_tokens=30, stream=True)
    done, failed = desk.finish(good, broken)
    assert outcome(done) == ("length", solo_answer(SHORT, 30), 30)
    assert isinstance(failed, Failed)
    assert (failed.code, failed.completion_tokens) == ("numeric_error", 2)
    assert failed.text == desk.streamed(broken) == solo_answer(LONG, 2)
    assert "step 3" in failed.message
    assert desk.pulse.nan_count == 1


def test_c43_bad_logits_in_prefill_end_the_request_at_step_1(desk: Desk) -> None:
    spoil_logits(desk, slot=0, position=7, values=[float("nan")])
    failed = desk.answer(LONG)
    assert (failed.code, failed.text, failed.completion_tokens) == ("numeric_error", "", 0)
    assert "step 1" in failed.message


def spoil_logits(desk: Desk, *, slot: int, position: int, values: list[float]) -> None:
    """Make the backend return `values` as the first logits of the row that ends at `position` in `slot`."""
    backend = desk.session._backend
    step = backend.step

    def spoilt(slots: Any, ids: Any, starts: Any, rows: int) -> Any:
        logits = step(slots, ids, starts, rows)
        for i, s in enumerate(slots):
            if s == slot and starts[i] + ids.shape[1] - 1 == position:
                logits[i, -1, : len(values)] = values
        return logits

    backend.step = spoilt  # type: ignore[method-assign]


@pytest.mark.parametrize("error", [SpoiltError("no"), BackendError("no")])
def test_an_exception_in_a_step_ends_only_the_request_that_caused_it(error: Exception) -> None:
    def script(history: Int64) -> int:
        if bytes(history[:3].tolist()) == b"bad" and len(history) > 6:
            raise error
        return BABBLE(history)

    with closing(Desk(script)) as desk:
        good, bad = desk.submit(SHORT, max_tokens=30), desk.submit("bad", max_tokens=30, stream=True)
        done, failed = desk.finish(good, bad)
        assert outcome(done) == ("length", solo_answer(SHORT, 30), 30)
        assert (failed.code, failed.completion_tokens) == ("internal_error", 4)
        assert desk.streamed(bad) == failed.text == solo_answer("bad", 4)
        assert [(call.method_name, call.kwargs["exc_info"]) for call in desk.log.calls] == [("error", error)]
        assert outcome(desk.answer(LONG, max_tokens=9)) == ("length", solo_answer(LONG, 9), 9)


def test_out_of_host_memory_ends_the_worker() -> None:
    def script(history: Int64) -> int:
        raise MemoryError

    with closing(Desk(script)) as desk:
        desk.submit(SHORT)
        with pytest.raises(MemoryError):
            desk.turn()


@pytest.mark.parametrize(
    ("options", "param"),
    [({"max_tokens": 0}, "$.max_tokens"), ({"temperature": -1.0}, "$.temperature"), ({"stop": [""]}, "$.stop")],
)
def test_a_bad_request_is_refused_by_field(desk: Desk, options: dict[str, Any], param: str) -> None:
    refused = desk.answer(SHORT, **options)
    assert (refused.code, refused.param) == ("invalid_request", param)


def test_an_engine_without_a_tokenizer_says_so() -> None:
    with closing(Desk(has_text=False)) as desk:
        refused = desk.answer(SHORT)
    assert (refused.code, refused.param) == ("invalid_request", "$.prompt")
    assert "tokenizer" in refused.message


def test_more_than_the_worker_can_hold_is_refused_at_once(desk: Desk) -> None:
    keys = [desk.submit(SHORT, max_tokens=2) for _ in range(12)]
    ends = desk.finish(*keys)
    codes = [frame.code for frame in ends if isinstance(frame, Failed)]
    assert codes == ["queue_full", "queue_full"]


def test_every_code_of_the_worker_is_on_the_wire_table(desk: Desk) -> None:
    desk.answer(SHORT, max_tokens=0)
    desk.answer(SHORT, max_tokens=9999)
    assert {frame.code for frame in desk.frames if isinstance(frame, Failed)} <= ERROR_TABLE.keys()


# ---- cancel, deadline, stop


def test_a_cancel_in_the_queue_costs_no_step(desk: Desk) -> None:
    for _ in range(2):
        desk.submit(SHORT, max_tokens=60)
    waiting = desk.submit(LONG, max_tokens=60)
    desk.turn()
    desk.send(Cancel(waiting))
    desk.turn()
    frame = desk.terminal(waiting)
    assert outcome(frame) == ("cancelled", "", 0)
    assert not [f for f in desk.frames if isinstance(f, Started) and f.key == waiting]


def test_a_cancel_in_prefill_frees_the_slot_for_the_next(desk: Desk) -> None:
    key = desk.submit("y" * 400, max_tokens=60)
    desk.turn(3)
    desk.send(Cancel(key))
    desk.turn()
    assert outcome(desk.terminal(key)) == ("cancelled", "", 0)
    assert desk.pulse.kv_tokens == 0
    assert outcome(desk.answer(SHORT, max_tokens=9)) == ("length", solo_answer(SHORT, 9), 9)


def test_a_cancel_in_decode_keeps_the_text_so_far(desk: Desk) -> None:
    key = desk.submit(SHORT, max_tokens=60, stream=True, chunk_tokens=64, chunk_ms=1000)
    desk.turn(11)
    desk.send(Cancel(key))
    desk.turn()
    assert outcome(desk.terminal(key)) == ("cancelled", solo_answer(SHORT, 11), 11)
    assert desk.streamed(key) == solo_answer(SHORT, 11)


def test_a_cancel_of_an_unknown_request_is_ignored(desk: Desk) -> None:
    desk.answer(SHORT, max_tokens=2)
    desk.send(Cancel(1), Cancel(99))
    assert outcome(desk.answer(SHORT, max_tokens=2))[0] == "length"


def test_a_deadline_in_decode_gives_the_text_so_far() -> None:
    clock = Clock()
    with closing(Desk(clock=clock)) as desk:
        key = desk.submit(SHORT, max_tokens=60, deadline_s=5.0)
        desk.turn(4)
        clock.now += 4.9
        desk.turn()
        clock.now += 0.2
        desk.turn()
        assert outcome(desk.terminal(key)) == ("deadline", solo_answer(SHORT, 5), 5)


def test_a_deadline_in_the_queue_costs_no_step() -> None:
    clock = Clock()
    with closing(Desk(clock=clock, slots=1)) as desk:
        desk.submit(SHORT, max_tokens=60)
        waiting = desk.submit(LONG, max_tokens=60, deadline_s=1.5)
        desk.turn(4)
        clock.now += 2.0
        desk.turn()
        frame = desk.terminal(waiting)
    assert isinstance(frame, Failed)
    assert frame.code == "deadline_exceeded"


def test_a_deadline_that_has_passed_on_arrival_costs_no_step(desk: Desk) -> None:
    assert desk.answer(SHORT, deadline_s=0.0).code == "deadline_exceeded"
    assert desk.pulse.step_count == 0


@pytest.mark.parametrize("turns", [1, 12], ids=["in prefill", "in decode"])
def test_c71_a_stop_without_grace_ends_everything_as_cancelled(desk: Desk, turns: int) -> None:
    keys = desk.submit("y" * 40, max_tokens=60), desk.submit(SHORT, max_tokens=60), desk.submit(LONG)
    desk.turn(turns)
    desk.send(Stop())
    desk.loop.run()
    desk.read()
    assert [desk.terminal(key).reason for key in keys] == ["cancelled"] * 3  # type: ignore[union-attr]


def test_a_stop_with_grace_lets_running_requests_finish_and_takes_no_new_ones(desk: Desk) -> None:
    key = desk.submit(SHORT, max_tokens=60)
    desk.turn(3)
    desk.send(Stop(grace_s=60.0))
    late = desk.submit(SHORT)
    desk.loop.run()
    desk.read()
    assert outcome(desk.terminal(key)) == ("length", solo_answer(SHORT, 60), 60)
    refused = desk.terminal(late)
    assert isinstance(refused, Failed)
    assert refused.code == "shutting_down"


def test_c71_a_stop_when_idle_ends_the_loop(desk: Desk) -> None:
    desk.send(Stop(grace_s=60.0))
    desk.loop.run()


def test_the_end_of_the_stream_ends_the_loop_between_steps(desk: Desk) -> None:
    desk.submit(SHORT, max_tokens=400)
    desk.turn(3)
    desk.sock.close()
    with pytest.raises(LinkClosedError):
        desk.loop.run()


def test_a_key_in_use_is_a_protocol_error(desk: Desk) -> None:
    desk.submit(SHORT, max_tokens=60)
    desk._next_key = 1
    desk.submit(SHORT)
    with pytest.raises(FrameError, match="key 1"):
        desk.turn()


def test_the_pulse_counts_steps_rows_and_tokens(desk: Desk) -> None:
    desk.submit(SHORT, max_tokens=4)
    desk.turn(3)
    beat = desk.pulse.beat(5, 1000)
    assert (beat.seq, beat.step_count, beat.rows_busy, beat.kv_tokens) == (5, 3, 1, len(SHORT) + 2)
    assert (beat.useful_tokens, beat.computed_tokens, beat.step_age_s) == (5, 5, 0.0)
    assert len(beat.step_ms) == 3
    desk.finish(1)
    assert (desk.pulse.rows_busy, desk.pulse.kv_tokens) == (0, 0)
    assert len(desk.pulse.beat(6, 1000).step_ms) == 1
