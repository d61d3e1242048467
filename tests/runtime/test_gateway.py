"""What happens to an admitted request: order, numbers, duplicates, cancels, deadlines, worker deaths."""

from __future__ import annotations

import pytest

from edge_runtime.config import ByteLimits, Config, LimitsConfig, ReplayLimits, StreamConfig, TenantConfig
from edge_runtime.messages import ErrorFrame, Final, parse_reply
from edge_runtime.supervisor.ledger import EARLY_CANCELS_PER_TENANT
from edge_runtime.worker.frames import Cancel, Failed, Submit
from support.gateway import BOOT, MODEL, RESULT, TOPICS, Accepted, Chunk, Desk


def two_tenants() -> Config:
    return Config(tenants={"default": TenantConfig(), "other": TenantConfig()})


def test_a_stream_is_accepted_chunks_and_one_terminal_frame_numbered_from_zero() -> None:
    desk = Desk()
    desk.ask(stream=True, metadata={"a": "b"})
    (submit,) = desk.submitted()
    desk.start(submit.key)
    for text in ("one ", "two ", "three "):
        desk.text(submit.key, text)
    desk.finish(submit.key, "one two three ")
    accepted, *chunks, final = desk.replies()
    assert isinstance(accepted, Accepted)
    assert (accepted.boot_id, accepted.queue_pos, accepted.duplicate) == (BOOT, 0, False)
    assert isinstance(final, Final)
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert [frame.seq for frame in (accepted, *chunks, final)] == [0, 1, 2, 3, 4]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == final.choices[0].message.content
    assert (final.chunks, final.attempt, final.seed, final.metadata) == (3, 1, 1, {"a": "b"})
    assert final.usage.total_tokens == final.usage.prompt_tokens + final.usage.completion_tokens == 6


def test_without_stream_or_ack_there_is_only_the_answer() -> None:
    desk = Desk()
    desk.ask()
    (submit,) = desk.submitted()
    desk.text(submit.key, "a ")
    desk.finish(submit.key, "a ")
    frame = desk.reply()
    assert isinstance(frame, Final)
    assert frame.seq == 0


@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "deadline"])
@pytest.mark.parametrize("text", ["", "one two "])
def test_c42_every_final_carries_its_reason_and_the_counts_that_match(reason: str, text: str) -> None:
    desk = Desk()
    desk.ask()
    (submit,) = desk.submitted()
    desk.finish(submit.key, text, reason)
    (item,) = desk.taken()
    frame = parse_reply(item.message.payload)
    assert isinstance(frame, Final)
    assert (frame.choices[0].finish_reason, frame.choices[0].message.content) == (reason, text)
    assert frame.usage.completion_tokens == len(text.split())
    assert frame.usage.total_tokens == frame.usage.prompt_tokens + frame.usage.completion_tokens
    expected = "200" if reason in ("stop", "length") else "206"
    assert ("e-status", expected) in item.message.user_properties


def test_first_chunk_one_per_two_seconds_and_the_end_are_acknowledged() -> None:
    desk = Desk()
    desk.ask(stream=True)
    (submit,) = desk.submitted()
    for number in range(9):
        desk.now = 1000 + number * 0.5
        desk.text(submit.key, "a ")
    desk.finish(submit.key, "a " * 9)
    assert [item.message.qos for item in desk.taken()] == [1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 1]


def test_chunks_end_with_the_deadline_and_terminal_frames_a_minute_later() -> None:
    desk = Desk()
    desk.ask(stream=True, timeout_ms=5000)
    (submit,) = desk.submitted()
    desk.text(submit.key, "a ")
    desk.finish(submit.key, "a ")
    assert [item.expires_at for item in desk.taken()] == [1005.0, 1005.0, 1065.0]


def test_the_worker_holds_one_more_than_its_rows_and_the_rest_waits_in_order() -> None:
    desk = Desk()
    for number in range(5):
        desk.ask(f"r{number}")
    first = desk.submitted()
    assert [frame.key for frame in first] == [1, 2, 3]
    assert (desk.gateway.num_running, desk.gateway.num_queued) == (3, 2)
    desk.finish(2, "a ")
    assert [frame.key for frame in desk.submitted()] == [4]


def test_chunk_sizes_come_from_the_request_or_the_configuration() -> None:
    desk = Desk(Config(stream=StreamConfig(chunk_tokens=16, chunk_ms=200)))
    desk.ask("r1")
    desk.ask("r2", stream_options={"chunk_tokens": 1, "chunk_ms": 0})
    assert [(s.chunk_tokens, s.chunk_ms) for s in desk.submitted()] == [(16, 200), (1, 0)]


def test_c65_a_duplicate_of_a_waiting_or_running_request_is_only_acknowledged() -> None:
    desk = Desk()
    desk.ask()
    desk.ask()
    waiting = desk.reply()
    assert isinstance(waiting, Accepted)
    assert waiting.duplicate
    assert len(desk.submitted()) == 1
    desk.ask()
    running = desk.reply()
    assert isinstance(running, Accepted)
    assert running.duplicate
    assert desk.submitted() == []


@pytest.mark.fault("R4")
def test_five_deliveries_are_one_execution_and_the_result_is_sent_again() -> None:
    desk = Desk()
    desk.ask()
    desk.ask()
    (submit,) = desk.submitted()
    desk.ask()
    desk.finish(submit.key, "a ")
    first = desk.replies()[-1]
    desk.ask()
    desk.ask()
    replays = desk.replies()
    assert desk.submitted() == []
    assert isinstance(first, Final)
    assert not first.cached
    for replay in replays:
        assert isinstance(replay, Final)
        assert replay.cached
        assert (replay.seq, replay.choices) == (first.seq, first.choices)


@pytest.mark.fault("R4")
@pytest.mark.parametrize("when", ["waiting", "running", "finished"])
def test_c65_another_request_under_a_known_id_is_a_conflict(when: str) -> None:
    desk = Desk()
    desk.ask()
    if when != "waiting":
        (submit,) = desk.submitted()
        if when == "finished":
            desk.finish(submit.key, "a ")
    desk.taken()
    desk.ask(prompt="something else")
    assert desk.error().error.code == "id_conflict"
    assert len(desk.submitted()) == (when == "waiting")


def test_key_order_timeout_and_reply_topic_do_not_make_another_request() -> None:
    desk = Desk()
    desk.send(b'{"id":"r1","model":"tiny","prompt":"hi","seed":1}')
    desk.send(b'{"seed":1, "prompt":"hi", "model":"tiny", "id":"r1", "timeout_ms":5, "reply_to":"x"}')
    frame = desk.reply()
    assert isinstance(frame, Accepted)
    assert frame.duplicate


def test_later_frames_go_to_the_newest_response_topic() -> None:
    desk = Desk()
    desk.ask()
    desk.send({"id": "r1", "model": MODEL, "prompt": "hi"}, response_topic=TOPICS.result("default", "cli2"))
    (submit,) = desk.submitted()
    desk.finish(submit.key, "a ")
    assert [item.message.topic for item in desk.taken()] == [TOPICS.result("default", "cli2")] * 2


def test_a_finished_request_is_forgotten_a_minute_after_its_deadline() -> None:
    desk = Desk()
    desk.ask(timeout_ms=1000)
    (submit,) = desk.submitted()
    desk.finish(submit.key, "a ")
    desk.now += 60.9
    desk.ask(timeout_ms=1000)
    assert desk.submitted() == []
    desk.now += 0.2
    desk.ask(timeout_ms=1000)
    assert len(desk.submitted()) == 1


def test_replay_is_bounded_in_entries_and_bytes_and_never_forgets_live_requests() -> None:
    desk = Desk(Config(limits=LimitsConfig(replay=ReplayLimits(entries=3, bytes=2000))))
    for number in range(3):
        desk.ask(f"r{number}")
    desk.ask("r3")
    assert desk.error().error.code == "queue_full"
    for submit in desk.submitted():
        desk.finish(submit.key, "a ")
    desk.ask("r3")
    assert len(desk.submitted()) == 1
    desk.taken()
    desk.ask("r0")  # the oldest made room
    assert len(desk.submitted()) == 1


@pytest.mark.fault("R5")
def test_a_cancel_in_the_queue_ends_the_request_at_once() -> None:
    desk = Desk()
    desk.ask()
    desk.cancel()
    frame = desk.final()
    assert (frame.choices[0].finish_reason, frame.choices[0].message.content) == ("cancelled", "")
    assert desk.submitted() == []
    desk.cancel()
    assert desk.replies() == []


@pytest.mark.fault("R5")
def test_a_cancel_while_running_goes_to_the_worker_once() -> None:
    desk = Desk()
    desk.ask(stream=True)
    (submit,) = desk.submitted()
    desk.text(submit.key, "a ")
    desk.cancel()
    desk.cancel()
    assert desk.cancels() == [Cancel(submit.key, "cancelled")]
    assert desk.cancels() == []
    desk.finish(submit.key, "a ", "cancelled")
    assert desk.final().choices[0].finish_reason == "cancelled"


@pytest.mark.fault("R5")
def test_a_cancel_that_arrives_first_is_remembered_for_a_minute() -> None:
    for wait_s, is_cancelled in ((59, True), (61, False)):
        desk = Desk()
        desk.cancel()
        desk.now += wait_s
        desk.ask()
        assert (len(desk.submitted()) == 0) == is_cancelled
        if is_cancelled:
            frame = desk.final()
            assert frame.choices[0].finish_reason == "cancelled"
            assert frame.usage.total_tokens == 0


@pytest.mark.fault("R5")
def test_another_tenant_can_neither_cancel_nor_probe() -> None:
    desk = Desk(two_tenants())
    desk.ask()
    desk.cancel(tenant="other")
    (submit,) = desk.submitted()
    assert desk.cancels() == []
    desk.finish(submit.key, "a ")
    assert desk.final().choices[0].finish_reason == "stop"
    desk.send(
        {"id": "r1", "model": MODEL, "prompt": "else"},
        topic=TOPICS.request("other"),
        response_topic=TOPICS.result("other", "x"),
    )
    assert desk.final().choices[0].finish_reason == "cancelled"  # its own early cancel, not our request


def test_early_cancels_are_bounded_per_tenant() -> None:
    desk = Desk()
    for number in range(EARLY_CANCELS_PER_TENANT + 1):
        desk.cancel(f"r{number}")
    desk.ask("r0")
    desk.ask("r1")
    assert len(desk.submitted()) == 1


@pytest.mark.fault("R6")
def test_a_deadline_in_the_queue_costs_no_computing() -> None:
    desk = Desk()
    desk.gateway.set_state("recovering", desk.now)
    desk.ask(timeout_ms=1000)
    desk.now += 0.999
    desk.collect()
    assert desk.replies() == []
    desk.now += 0.001
    desk.gateway.set_state("ready", desk.now)
    assert desk.submitted() == []
    assert desk.error().error.code == "deadline_exceeded"


@pytest.mark.fault("R6")
def test_a_deadline_that_the_worker_forgets_is_remembered_for_it() -> None:
    desk = Desk()
    desk.ask(timeout_ms=1000)
    (submit,) = desk.submitted()
    desk.now += 1.2
    assert desk.cancels() == []
    desk.now += 0.1
    assert desk.cancels() == [Cancel(submit.key, "deadline")]
    desk.finish(submit.key, "a ", "deadline")
    (item,) = desk.taken()
    assert ("e-status", "206") in item.message.user_properties


@pytest.mark.fault("R6")
def test_sixty_seconds_of_suspend_expire_what_waits() -> None:
    desk = Desk()
    desk.gateway.set_state("recovering", desk.now)
    desk.ask("short", timeout_ms=30_000)
    desk.ask("long", timeout_ms=120_000)
    desk.now += 60
    desk.gateway.set_state("ready", desk.now)
    (submit,) = desk.submitted()
    assert submit.deadline_s == pytest.approx(60)
    assert desk.error().id == "short"


@pytest.mark.fault("W1")
def test_a_request_without_output_runs_again_and_one_with_output_ends() -> None:
    desk = Desk()
    desk.ask("silent", prompt="a", stream=True)
    desk.ask("speaking", prompt="b", stream=True)
    silent, speaking = desk.submitted()
    desk.start(silent.key)
    desk.start(speaking.key)
    desk.text(speaking.key, "some ")
    desk.taken()
    desk.gateway.set_state("recovering", desk.now)
    desk.gateway.worker_died(desk.now)
    frame = desk.error()
    assert (frame.id, frame.error.code, frame.error.retryable) == ("speaking", "worker_restarted", True)
    assert frame.partial is not None
    assert (frame.partial.content, frame.partial.completion_tokens) == ("some ", 1)
    desk.gateway.set_state("ready", desk.now)
    (again,) = desk.submitted()
    assert again.key == silent.key
    desk.finish(again.key, "all ")
    assert desk.final().attempt == 2


def test_a_cancelled_request_is_not_run_again_after_a_worker_death() -> None:
    desk = Desk()
    desk.ask()
    desk.submitted()
    desk.cancel()
    desk.gateway.worker_died(desk.now)
    assert desk.final().choices[0].finish_reason == "cancelled"
    assert desk.submitted() == []


def test_a_rerun_keeps_the_order_of_the_queue() -> None:
    desk = Desk()
    for number in range(4):
        desk.ask(f"r{number}", prompt=f"p{number}")
    desk.submitted()
    desk.gateway.worker_died(desk.now)
    order = []
    while submits := desk.submitted():
        for submit in submits:
            order.append(submit.prompt)
            desk.finish(submit.key, "a ")
    assert order == ["p0", "p1", "p2", "p3"]


@pytest.mark.fault("W9")
def test_a_request_running_at_two_deaths_is_refused_from_then_on_and_takes_no_neighbour_along() -> None:
    desk = Desk()
    desk.ask("poison", prompt="bad")
    desk.ask("neighbour", prompt="good")
    for submit in desk.submitted():
        desk.start(submit.key)
    desk.gateway.worker_died(desk.now)
    (alone,) = desk.submitted()  # a suspect runs alone
    assert alone.prompt == "bad"
    desk.start(alone.key)
    desk.gateway.worker_died(desk.now)
    assert desk.error().error.code == "request_quarantined"
    (neighbour,) = desk.submitted()
    desk.finish(neighbour.key, "a ")
    assert desk.final().id == "neighbour"
    desk.ask("poison2", prompt="bad")
    assert desk.error().error.code == "request_quarantined"


def test_a_waiting_request_is_not_blamed_for_the_death_of_a_running_one() -> None:
    desk = Desk()
    desk.ask("r1", prompt="a")
    desk.ask("r2", prompt="b")
    first, _ = desk.submitted()
    for _ in range(2):
        desk.start(first.key)
        desk.gateway.worker_died(desk.now)
        desk.collect()
    assert desk.error().id == "r1"
    desk.ask("r3", prompt="b")
    assert len(desk.submitted()) == 1


def test_an_answer_acquits_a_suspect() -> None:
    desk = Desk()
    desk.ask("r1")
    desk.submitted()
    desk.gateway.worker_died(desk.now)
    (submit,) = desk.submitted()
    desk.finish(submit.key, "a ")
    desk.taken()
    desk.ask("r2")
    desk.submitted()
    desk.gateway.worker_died(desk.now)
    assert desk.replies() == []  # one death, not two


def test_a_failure_of_the_worker_keeps_its_code_and_text() -> None:
    desk = Desk()
    desk.ask(metadata={"a": "b"})
    (submit,) = desk.submitted()
    failed = Failed(key=submit.key, code="numeric_error", message="NaN", text="half ", completion_tokens=1)
    desk.gateway.on_worker_frame(failed, desk.now)
    frame = desk.error()
    assert (frame.error.code, frame.error.status, frame.metadata) == ("numeric_error", 500, {"a": "b"})
    assert frame.partial is not None
    assert frame.partial.content == "half "


def test_a_code_that_the_wire_does_not_know_is_an_internal_error() -> None:
    desk = Desk()
    desk.ask()
    (submit,) = desk.submitted()
    desk.gateway.on_worker_frame(Failed(key=submit.key, code="surprise", message="?"), desk.now)
    assert desk.error().error.code == "internal_error"


def test_frames_about_ended_requests_are_ignored() -> None:
    desk = Desk()
    desk.ask()
    (submit,) = desk.submitted()
    desk.finish(submit.key, "a ")
    desk.finish(submit.key, "a ")
    desk.text(submit.key, "late ")
    assert len(desk.replies()) == 1


def test_c64_two_unheard_chunks_in_a_row_cancel_unless_configured_otherwise() -> None:
    for policy, expected in (("cancel", 1), ("finish", 0)):
        desk = Desk(Config(stream=StreamConfig(on_no_subscriber=policy)))  # type: ignore[arg-type]
        desk.ask(stream=True)
        (submit,) = desk.submitted()
        desk.taken()
        codes = (0x10, 0, 0x10, 0x10)
        for code in codes:
            assert desk.cancels() == []
            desk.now += 2.0
            desk.text(submit.key, "a ")
            (item,) = desk.taken()
            desk.gateway.acknowledged(item, code)
        assert len(desk.cancels()) == expected


@pytest.mark.fault("R8")
@pytest.mark.parametrize("letter", ["a", "é", "😀", '"', "\x01"])
def test_an_answer_over_the_limit_is_cut_at_a_code_point_and_marked(letter: str) -> None:
    desk = Desk(Config(limits=LimitsConfig(bytes=ByteLimits(response=1000))))
    desk.ask()
    (submit,) = desk.submitted()
    desk.finish(submit.key, letter * 5000)
    (item,) = desk.taken()
    frame = parse_reply(item.message.payload)
    assert isinstance(frame, Final)
    assert frame.truncated
    content = frame.choices[0].message.content
    assert content == letter * len(content)
    assert 1000 - 8 <= len(item.message.payload) <= 1000  # one more letter needs at most 6 bytes


def test_an_answer_at_the_limit_is_whole() -> None:
    desk = Desk()
    desk.ask()
    (submit,) = desk.submitted()
    desk.finish(submit.key, "a" * 200_000)
    frame = desk.final()
    assert not frame.truncated
    assert len(frame.choices[0].message.content) == 200_000


def test_c69_the_brokers_packet_limit_cuts_answers_too() -> None:
    desk = Desk()
    desk.gateway.limit_packet(2000)
    desk.ask()
    (submit,) = desk.submitted()
    desk.finish(submit.key, "a" * 5000)
    (item,) = desk.taken()
    assert item.message.wire_bytes <= 2000
    assert b'"truncated":true' in item.message.payload


@pytest.mark.fault("D1")
def test_a_drain_refuses_what_waits_and_ends_what_runs_with_its_text() -> None:
    desk = Desk()
    for number in range(4):
        desk.ask(f"r{number}", stream=True)
    running = desk.submitted()
    desk.text(running[0].key, "some ")
    desk.taken()
    desk.gateway.set_state("draining", desk.now)
    frame = desk.error()
    assert (frame.id, frame.error.code) == ("r3", "shutting_down")
    desk.gateway.cancel_running()
    assert len(desk.cancels()) == 3
    desk.gateway.end_running(desk.now)
    finals = desk.replies()
    assert [f.choices[0].finish_reason for f in finals if isinstance(f, Final)] == ["cancelled"] * 3
    assert isinstance(finals[0], Final)
    assert finals[0].choices[0].message.content == "some "


def test_times_add_the_wait_in_our_queue() -> None:
    desk = Desk(two_tenants())
    desk.gateway.set_state("recovering", desk.now)
    desk.ask()
    desk.now += 2.0
    desk.gateway.set_state("ready", desk.now)
    (submit,) = desk.submitted()
    desk.now += 1.0
    desk.finish(submit.key, "a b ")
    timings = desk.final().timings
    assert timings.queue_ms == pytest.approx(2001)
    assert timings.ttft_ms == pytest.approx(2003)
    assert timings.e2e_ms == pytest.approx(3000)


def test_exactly_one_terminal_frame_whatever_happens_twice() -> None:
    desk = Desk()
    desk.ask(stream=True)
    (submit,) = desk.submitted()
    desk.text(submit.key, "a ")
    desk.cancel()
    desk.collect()
    desk.gateway.worker_died(desk.now)
    desk.gateway.end_running(desk.now)
    desk.gateway.set_state("draining", desk.now)
    terminals = [f for f in desk.replies() if isinstance(f, Final | ErrorFrame)]
    assert len(terminals) == 1


def test_all_frames_stay_below_the_tenants_results() -> None:
    desk = Desk()
    desk.ask(stream=True)
    for frame in desk.collect():
        assert isinstance(frame, Submit)
        desk.text(frame.key, "a ")
        desk.finish(frame.key, "a ")
    assert {item.message.topic for item in desk.taken()} == {RESULT}
