"""Which messages are admitted, which are refused and how, which are not answered at all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.config import ByteLimits, Config, LimitsConfig, TenantConfig
from edge_runtime.messages import ERROR_TABLE, ErrorFrame, Final, parse_reply
from support.gateway import MODEL, RESULT, TOPICS, Desk

OK = {"id": "r1", "model": MODEL, "prompt": "hi"}
REFUSALS = [
    (b"{", "invalid_json", None, None),
    (b'\xff{"id":"r1"}', "invalid_json", None, None),
    (b'{"id":"r1","model":"tiny","prompt":"hi"} x', "invalid_json", None, None),
    (b'{"id":"r1","model":"tiny","prompt":"hi","temperature":NaN}', "invalid_json", None, None),
    (b'\xef\xbb\xbf{"id":"r1","model":"tiny","prompt":"hi"}', "invalid_json", None, None),
    (b"[" * 100_000, "invalid_request", None, None),
    (b"", "invalid_json", None, None),
    (b"[1]", "invalid_request", None, None),
    (b"7", "invalid_request", None, None),
    (b'{"id":"r1","model":"tiny","prompt":7}', "invalid_request", "$.prompt", "r1"),
    (b'{"id":"r1","model":"tiny"}', "invalid_request", "$.messages", "r1"),
    (b'{"id":"r1","prompt":"hi"}', "invalid_request", "$.model", "r1"),
    (b'{"id":"r1","model":"tiny","prompt":"hi","colour":1}', "invalid_request", "$.colour", "r1"),
    (b'{"id":"r1\\n","model":"tiny","prompt":"hi"}', "invalid_request", "$.id", None),
    (b'{"id":"r1","model":"tiny","prompt":"hi","max_tokens":4.5}', "invalid_request", "$.max_tokens", "r1"),
    (b'{"id":"r1","model":"tiny","prompt":"hi","max_tokens":true}', "invalid_request", "$.max_tokens", "r1"),
    (b'{"id":"r1","model":"tiny","prompt":"hi","max_tokens":257}', "invalid_request", "$.max_tokens", "r1"),
    (b'{"id":"r1","model":"other","prompt":"hi"}', "model_not_found", "$.model", "r1"),
    (b'{"id":"r1","model":"tiny","inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}',
     "invalid_request", "$.inputs", "r1"),
]  # fmt: skip


@pytest.mark.fault("R1")
@pytest.mark.parametrize(("payload", "code", "param", "request_id"), REFUSALS)
def test_each_wrong_request_gets_its_code_its_field_and_its_id(
    payload: bytes, code: str, param: str | None, request_id: str | None
) -> None:
    desk = Desk()
    desk.send(payload)
    frame = desk.error()
    assert (frame.error.code, frame.error.param, frame.id) == (code, param, request_id)
    assert frame.error.status == ERROR_TABLE[code].status
    assert desk.submitted() == []


@given(st.binary(max_size=400) | st.text().map(lambda text: f'{{"id":{text!r}}}'.encode("utf-8", "replace")))
@settings(max_examples=300, deadline=None)
def test_no_payload_raises_or_is_left_without_an_answer(payload: bytes) -> None:
    desk = Desk()
    desk.send(payload)
    assert isinstance(desk.reply(), ErrorFrame)


def test_c62_after_every_kind_of_nonsense_the_next_request_is_served() -> None:
    desk = Desk()
    for payload, *_ in REFUSALS:
        desk.send(payload)
    assert len(desk.replies()) == len(REFUSALS)
    desk.ask()
    assert [frame.prompt for frame in desk.submitted()] == ["hi"]


def test_an_unknown_field_of_any_length_does_not_fill_the_error() -> None:
    desk = Desk()
    desk.send({**OK, "x" * 200_000: 1})
    item = desk.taken()[0]
    assert len(item.message.payload) < 2000


def test_the_size_is_checked_before_the_payload_is_parsed() -> None:
    config = Config(limits=LimitsConfig(bytes=ByteLimits(payload=256)))
    for size, code in ((256, "invalid_json"), (257, "payload_too_large")):
        desk = Desk(config)
        desk.send(b"x" * size)
        assert desk.error().error.code == code


@pytest.mark.parametrize("content_type", ["text/plain", "application/cbor", ""])
def test_only_json_is_taken(content_type: str) -> None:
    desk = Desk()
    desk.send(OK, content_type=content_type or "application/xml")
    assert desk.error().error.code == "unsupported_media_type"


@pytest.mark.parametrize("content_type", [None, "application/json", "Application/JSON; charset=utf-8"])
def test_json_content_types_are_taken(content_type: str | None) -> None:
    desk = Desk()
    desk.send(OK, content_type=content_type)
    assert len(desk.submitted()) == 1


@pytest.mark.parametrize(
    "properties",
    [
        {"correlation": b"x" * 65},
        {"user_properties": tuple((f"k{i}", "v") for i in range(17))},
        {"user_properties": (("k", "v" * 2048),)},
        {"user_properties": tuple(("k", "v") for _ in range(2000))},
    ],
)
def test_properties_over_their_limit_are_refused(properties: dict[str, object]) -> None:
    desk = Desk()
    desk.send(OK, **properties)
    assert desk.error().error.code == "invalid_request"


def test_correlation_and_trace_are_echoed_in_every_frame() -> None:
    desk = Desk()
    desk.send({**OK, "stream": True}, correlation=b"\x00c", user_properties=(("traceparent", "00-1"), ("x", "y")))
    (submit,) = desk.submitted()
    desk.text(submit.key, "a ")
    desk.finish(submit.key, "a ")
    items = desk.taken()
    assert len(items) == 3
    for item in items:
        assert item.message.correlation == b"\x00c"
        assert ("traceparent", "00-1") in item.message.user_properties
        assert ("x", "y") not in item.message.user_properties


@pytest.mark.fault("R2")
@pytest.mark.parametrize(
    "response_topic",
    [
        "edge/v1/d/local/t/other/res/cli1",
        "edge/v1/d/local/t/default/res/+",
        "edge/v1/d/local/t/default/res/#",
        "edge/v1/d/local/t/default/res/a/b",
        "edge/v1/d/local/t/default/res/",
        "edge/v1/d/local/t/default/req",
        "edge/v1/d/elsewhere/t/default/res/cli1",
        "$SYS/broker",
        "",
        "x/edge/v1/d/local/t/default/res/cli1",
    ],
)
def test_a_response_topic_outside_the_tenants_results_is_never_answered(response_topic: str) -> None:
    desk = Desk()
    desk.send(OK, response_topic=response_topic)
    desk.send(b"{", response_topic=response_topic)
    assert desk.replies() == []
    assert desk.submitted() == []
    assert desk.gateway.counts["ignored:response_topic"] == 2
    assert desk.notices[0] == ("message_ignored", {"reason": "response_topic", "tenant": "default"})


def test_without_a_response_topic_the_body_or_the_underscore_decides() -> None:
    desk = Desk()
    desk.send({**OK, "reply_to": "cli9", "ack": True}, response_topic=None)
    desk.send({**OK, "id": "r2", "ack": True}, response_topic=None)
    desk.send({**OK, "id": "r3", "reply_to": "cli9", "max_tokens": 0}, response_topic=None)
    assert [item.message.topic for item in desk.taken()] == [
        TOPICS.result("default", "cli9"),
        TOPICS.result("default", "_"),
        TOPICS.result("default", "cli9"),
    ]


@pytest.mark.fault("B9")
def test_a_retained_request_is_dropped_and_counted() -> None:
    desk = Desk()
    desk.send(OK, retain=True)
    assert desk.replies() == []
    assert desk.submitted() == []
    assert desk.gateway.counts["ignored:retained"] == 1


def test_an_unknown_tenant_is_not_answered() -> None:
    desk = Desk(Config(tenants={"acme": TenantConfig()}))
    desk.send(OK)
    assert desk.replies() == []
    assert desk.notices == [("message_ignored", {"reason": "unknown_tenant", "tenant": "other"})]


def test_a_class_that_the_tenant_may_not_use_is_refused() -> None:
    desk = Desk(Config(tenants={"default": TenantConfig(classes=("background",))}))
    desk.ask()
    assert (frame := desk.error()).error.code == "class_not_allowed"
    assert frame.error.param == "$.class"


@pytest.mark.parametrize(
    ("state", "code"),
    [("starting", "not_ready"), ("failed", "model_unavailable"), ("draining", "shutting_down")],
)
def test_the_state_decides_about_new_requests(state: str, code: str) -> None:
    desk = Desk()
    desk.gateway.set_state(state, desk.now)  # type: ignore[arg-type]
    desk.ask()
    frame = desk.error()
    assert frame.error.code == code
    assert frame.error.retryable
    assert frame.error.retry_after_ms


def test_while_recovering_requests_wait() -> None:
    desk = Desk()
    desk.gateway.set_state("recovering", desk.now)
    desk.ask()
    assert desk.submitted() == []
    desk.gateway.set_state("ready", desk.now)
    assert len(desk.submitted()) == 1


def test_full_queue_is_refused_at_once() -> None:
    desk = Desk(Config(limits=LimitsConfig(queue=2)))
    for number in range(3):
        desk.ask(f"r{number}")
    frame = desk.error()
    assert (frame.id, frame.error.code) == ("r2", "queue_full")
    assert frame.error.retry_after_ms


@pytest.mark.parametrize(
    ("timeout_ms", "expiry_s", "expected_s"),
    [(None, None, 60), (5000, None, 5), (None, 3, 3), (5000, 3, 3), (2000, 30, 2), (None, 100_000, 600)],
)
def test_the_deadline_is_the_shortest_of_what_was_said(
    timeout_ms: int | None, expiry_s: int | None, expected_s: float
) -> None:
    desk = Desk()
    desk.send({**OK, **({} if timeout_ms is None else {"timeout_ms": timeout_ms})}, expiry_s=expiry_s)
    (submit,) = desk.submitted()
    assert submit.deadline_s == pytest.approx(expected_s)


def test_an_expired_message_is_not_run() -> None:
    desk = Desk()
    desk.send(OK, expiry_s=0)
    assert desk.error().error.code == "deadline_exceeded"


def test_every_refusal_is_a_terminal_frame_with_its_properties() -> None:
    desk = Desk()
    desk.send({**OK, "max_tokens": 0}, correlation=b"c")
    (item,) = desk.taken()
    frame = parse_reply(item.message.payload)
    assert isinstance(frame, ErrorFrame)
    assert frame.last is True
    assert (item.message.topic, item.message.qos, item.message.correlation) == (RESULT, 1, b"c")
    assert set(item.message.user_properties) == {
        ("e-id", "r1"), ("e-seq", "0"), ("e-dev", "local"), ("e-last", "1"), ("e-status", "400"),
    }  # fmt: skip


def test_a_bad_cancel_is_refused_and_harms_nobody() -> None:
    desk = Desk()
    desk.ask()
    desk.send(b"nonsense", topic=TOPICS.cancel("default"))
    assert desk.error().error.code == "invalid_json"
    (submit,) = desk.submitted()
    desk.finish(submit.key, "a ")
    assert isinstance(desk.reply(), Final)
