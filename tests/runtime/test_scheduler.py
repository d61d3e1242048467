"""Which request gets which slot, and what the next step computes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.errors import RequestError
from edge_runtime.serving.scheduler import Decode, Prefill, Scheduler, Step
from edge_runtime.serving.sequence import Sequence, State
from edge_runtime.session.detokenizer import Detokenizer
from edge_runtime.session.sampling import Sampler, SamplingParams
from edge_runtime.session.stops import StopFilter
from support.scripted_engine import VOCAB, byte_codec

CODEC = byte_codec()


def sequence(key: int, num_prompt: int = 3, max_tokens: int = 4) -> Sequence:
    return Sequence(
        key=key,
        prompt=[65] * num_prompt,
        sampler=Sampler(SamplingParams(), VOCAB, VOCAB),
        detokenizer=Detokenizer(CODEC),
        stops=StopFilter(()),
        stop_ids=frozenset(),
        max_tokens=max_tokens,
        capacity=1000,
    )


def scheduler(*, slots: int = 2, chunk: int = 4, max_waiting: int = 1) -> Scheduler:
    return Scheduler(slots=slots, chunk=chunk, max_waiting=max_waiting)


def run(step: Step, of: Scheduler) -> list[Sequence]:
    """Do what the loop does with a step; return the sequences that ended."""
    seqs = [step.seq] if isinstance(step, Prefill) else list(step.seqs)
    for seq in seqs:
        seq.advance(len(step.ids) if isinstance(step, Prefill) else 1)
        if seq.state is State.DECODING:
            seq.append(97)
    ended = [seq for seq in seqs if seq.is_done]
    for seq in ended:
        of.finish(seq)
    return ended


def shape(step: Step | None) -> str:
    """Write a step down: "P1:4" is 4 prompt tokens of request 1, "D12" a decode of requests 1 and 2."""
    if step is None:
        return "-"
    if isinstance(step, Prefill):
        return f"P{step.seq.key}:{len(step.ids)}"
    return "D" + "".join(str(seq.key) for seq in step.seqs)


def play(of: Scheduler, num_steps: int) -> list[str]:
    shapes = []
    for _ in range(num_steps):
        step = of.next_step()
        shapes.append(shape(step))
        if step is not None:
            run(step, of)
    return shapes


def test_a_request_alone_is_prefilled_in_chunks_and_decodes_as_one() -> None:
    s = scheduler(chunk=4)
    s.submit(sequence(1, num_prompt=9, max_tokens=3))
    assert play(s, 6) == ["P1:4", "P1:4", "P1:1", "D1", "D1", "-"]
    assert s.is_idle


def test_chunks_begin_where_the_last_one_ended() -> None:
    s = scheduler(chunk=4)
    s.submit(sequence(1, num_prompt=6))
    first = s.next_step()
    assert isinstance(first, Prefill)
    assert (first.start, first.is_last) == (0, False)
    run(first, s)
    second = s.next_step()
    assert isinstance(second, Prefill)
    assert (second.start, second.is_last) == (4, True)


def test_a_second_request_joins_while_the_first_decodes() -> None:
    s = scheduler(chunk=4)
    s.submit(sequence(1, num_prompt=3, max_tokens=9))
    assert play(s, 2) == ["P1:3", "D1"]
    s.submit(sequence(2, num_prompt=3, max_tokens=3))
    assert play(s, 4) == ["P2:3", "D12", "D12", "D1"]


def test_a_long_prompt_holds_a_running_answer_up_by_one_chunk() -> None:
    s = scheduler(chunk=4)
    s.submit(sequence(1, max_tokens=20))
    s.submit(sequence(2, num_prompt=14))
    assert play(s, 8) == ["P1:3", "D1", "P2:4", "D1", "P2:4", "D1", "P2:4", "D1"]


def test_two_prompts_are_prefilled_in_the_order_of_their_start() -> None:
    s = scheduler(chunk=4)
    s.submit(sequence(1, num_prompt=8))
    s.submit(sequence(2, num_prompt=4))
    assert play(s, 4) == ["P1:4", "P1:4", "D1", "P2:4"]


def test_decode_is_in_slot_order_whoever_started_first() -> None:
    s = scheduler(max_waiting=1)
    s.submit(sequence(1, max_tokens=2))
    s.submit(sequence(2, max_tokens=50))
    s.submit(sequence(3, max_tokens=50))
    for _ in range(20):
        step = s.next_step()
        assert step is not None
        if isinstance(step, Decode) and {seq.key for seq in step.seqs} == {2, 3}:
            assert [(seq.key, seq.slot) for seq in step.seqs] == [(3, 0), (2, 1)]
            return
        run(step, s)
    raise AssertionError("requests 2 and 3 never shared a step")


def test_full_queue_is_refused_at_once() -> None:
    s = scheduler(slots=2, max_waiting=1)
    for key in (1, 2, 3):
        s.submit(sequence(key))
    with pytest.raises(RequestError) as refusal:
        s.submit(sequence(4))
    assert refusal.value.code == "queue_full"
    assert s.cancel(3) is not None
    s.submit(sequence(4))


def test_cancel_finds_a_request_wherever_it_is() -> None:
    s = scheduler(slots=1, chunk=2, max_waiting=2)
    prefilling, waiting = sequence(1, num_prompt=9), sequence(2)
    s.submit(prefilling)
    s.submit(waiting)
    play(s, 1)
    assert s.cancel(2) is waiting
    assert s.cancel(1) is prefilling
    assert prefilling.slot is None
    assert s.cancel(1) is None
    assert s.is_idle


def test_a_freed_slot_goes_to_the_request_that_waits_longest() -> None:
    s = scheduler(slots=1, max_waiting=2)
    for key in (1, 2, 3):
        s.submit(sequence(key, max_tokens=1))
    assert play(s, 4) == ["P1:3", "P2:3", "P3:3", "-"]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 40), st.integers(1, 12)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(ACTIONS, st.integers(1, 2), st.integers(1, 9), st.integers(0, 3))
def test_any_history_keeps_the_promises(
    actions: list[tuple[str, int, int]], slots: int, chunk: int, max_waiting: int
) -> None:
    """No slot is shared, starts are first come first served, chunks alternate with decodes, everything ends."""
    s = scheduler(slots=slots, chunk=chunk, max_waiting=max_waiting)
    watch = Watch(s, slots, chunk)
    for what, a, b in actions:
        if what == "submit":
            watch.submit(num_prompt=a, max_tokens=b)
        elif what == "cancel":
            s.cancel(a)
        else:
            watch.steps(a)
    watch.steps(2000)
    assert s.is_idle


class Watch:
    """Run a scheduler and check every step against the promises."""

    def __init__(self, of: Scheduler, slots: int, chunk: int) -> None:
        self.of, self.slots, self.chunk = of, slots, chunk
        self.next_key = 0
        self.last_start = -1
        self.was_prefill = False

    def submit(self, num_prompt: int, max_tokens: int) -> None:
        held = len(self.of.running) + len(self.of.waiting)
        try:
            self.of.submit(sequence(self.next_key, num_prompt, max_tokens))
        except RequestError:
            assert held >= self.slots
        self.next_key += 1

    def steps(self, most: int) -> None:
        for _ in range(most):
            step = self.of.next_step()
            if step is None:
                assert self.of.is_idle
                return
            self.check(step)
            run(step, self.of)

    def check(self, step: Step) -> None:
        running = self.of.running
        assert len({seq.slot for seq in running}) == len(running) <= self.slots
        assert not self.of.waiting or len(running) == self.slots
        decoding = {seq.key for seq in running if seq.state is State.DECODING}
        if isinstance(step, Decode):
            assert {seq.key for seq in step.seqs} == decoding
        else:
            assert not (self.was_prefill and decoding), "a second chunk while an answer waits"
            assert 1 <= len(step.ids) <= self.chunk
            assert step.start == step.seq.position
            if step.start == 0:
                assert step.seq.key > self.last_start
                self.last_start = step.seq.key
        self.was_prefill = isinstance(step, Prefill)
