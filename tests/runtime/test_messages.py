"""Wire messages: what is accepted, what is refused and with which field, what is encoded."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.errors import RequestError
from edge_runtime.messages import (
    ERROR_TABLE,
    MAX_ERROR_TEXT,
    Accepted,
    ErrorFrame,
    Final,
    FinalChoice,
    FinalMessage,
    Info,
    Request,
    Status,
    Timings,
    Usage,
    encode,
    error_body,
    json_schemas,
    parse_cancel,
    parse_info,
    parse_reply,
    parse_request,
    parse_status,
    readable_id,
    readable_reply_to,
)

OK: dict[str, Any] = {"id": "r1", "model": "tiny", "prompt": "hi"}
SEVENTEEN = "abcdefghijklmnopq"
MESSAGES = [{"role": "user", "content": "hi"}]

any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def parsed(**fields: Any) -> Request:
    return parse_request(json.dumps({**OK, **fields}).encode())


def refused(**fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parsed(**fields)
    return caught.value


@pytest.mark.fault("R1")
@given(st.binary(max_size=200) | any_json.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=500, deadline=None)
def test_parsing_raises_request_errors_and_nothing_else(payload: bytes) -> None:
    for parse in (parse_request, parse_cancel, parse_reply, parse_status, parse_info):
        with suppress(RequestError):
            parse(payload)
    readable_id(payload)
    readable_reply_to(payload)


@pytest.mark.fault("R1")
@given(st.sampled_from(sorted(Request.__struct_encode_fields__)), any_json)
@settings(max_examples=500, deadline=None)
def test_any_value_in_any_field_is_bounded_or_names_the_field(name: str, value: Any) -> None:
    fault = None
    try:
        request = parse_request(json.dumps({**OK, name: value}).encode())
        assert 1 <= len(request.id) <= 64
        assert 0 <= request.temperature <= 2
    except RequestError as error:
        fault = error
    if fault is not None and fault.code != "invalid_json":
        assert fault.code == "invalid_request"
        assert (fault.param or "").startswith("$"), fault


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("id", ["a", "A.b:c_d-9", "x" * 64], ["", "x" * 65, "a b", "a\n", "é", 1, None]),
        ("model", ["m", "m" * 128], ["", "m" * 129, None]),
        ("max_tokens", [1, 1_000_000], [0, -1, 4.0, 4.5, True, "4", None, 1_000_001, 10**400]),
        ("temperature", [0, 2, 0.5], [-0.01, 2.01, "1", None, True]),
        ("top_p", [1, 0.01], [0, 1.01, None]),
        ("top_k", [0, 1000], [-1, 1001]),
        ("seed", [0, 2**63 - 1, None], [-1, 2**63]),
        ("stop", [[], ["a"], ["a"] * 4, "a", None], [["a"] * 5, [""], ["a" * 65], "", 1]),
        ("stream", [True, False], [1, "true", None]),
        ("timeout_ms", [1, 600_000, None], [0, 600_001]),
        ("class", ["realtime", "standard", "background"], ["urgent", "", None]),
        ("reply_to", ["cli-1_A", None], ["a/b", "", "a" * 65, "+", "#", "a\n"]),
        ("stream_options", [{}, {"chunk_tokens": 1, "chunk_ms": 0}], [{"chunk_tokens": 0}, {"chunk_ms": 1001}]),
        ("metadata", [{}, {"a" * 64: "b" * 256}], [{"a" * 65: ""}, {"a": "b" * 257}, dict.fromkeys(SEVENTEEN, "")]),
    ],
)  # fmt: skip
def test_bounds_hold_on_both_sides(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        parsed(**{name: value})
    for value in bad:
        error = refused(**{name: value})
        assert error.code == "invalid_request"
        assert (error.param or "").startswith(f"$.{name}"), f"{value!r}: {error.param}"


@pytest.mark.parametrize(
    ("fields", "count"),
    [({"prompt": None}, 0), ({"messages": MESSAGES}, 2), ({"prompt": None, "messages": MESSAGES}, 1)],
)
def test_exactly_one_input_is_given(fields: dict[str, Any], count: int) -> None:
    if count == 1:
        assert parsed(**fields).messages is not None
    else:
        assert "exactly one" in str(refused(**fields))


def test_the_field_at_fault_is_named_by_its_path() -> None:
    assert refused(prompt=None, messages=[{"role": "user", "content": 1}]).param == "$.messages[0].content"
    assert refused(prompt=None, messages=[{"role": "robot", "content": ""}]).param == "$.messages[0].role"
    assert refused(colour="red").param == "$.colour"
    assert refused(stream_options={"colour": 1}).param == "$.stream_options.colour"


@pytest.mark.parametrize(
    "payload",
    [
        b"\xef\xbb\xbf{}",
        b"{} {}",
        b'{"id":"\xff"}',
        b'{"id":"\\ud800"}',
        b'{"temperature":NaN}',
        b'{"temperature":Infinity}',
        b'{"id":"r1","model":"m","prompt":"p","seed":1' + b"0" * 5000 + b"}",
        b'{"id":' + b"[" * 100_000,
        b'{"x":' * 100_000,
    ],
)
def test_broken_json_is_refused(payload: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse_request(payload)
    assert caught.value.code in ("invalid_json", "invalid_request")


def test_of_duplicate_keys_the_last_wins_and_nul_is_a_character() -> None:
    request = parse_request(b'{"id":"a","id":"b","model":"m","prompt":"\\u0000"}')
    assert (request.id, request.prompt) == ("b", "\x00")


def test_the_id_of_a_broken_request_is_found_when_it_is_readable() -> None:
    assert readable_id(b'{"id":"r1","max_tokens":"x","colour":1}') == "r1"
    assert readable_id(b'{"id":"r 1"}') is None
    assert readable_id(b'{"id":"r1"') is None
    assert readable_reply_to(b'{"reply_to":"cli1","max_tokens":"x"}') == "cli1"
    assert readable_reply_to(b'{"reply_to":"a/b"}') is None


def test_a_final_keeps_its_fields_and_refuses_numbers_that_json_lacks() -> None:
    final = Final(
        id="r1",
        seq=3,
        model="m",
        created=1,
        choices=[FinalChoice(FinalMessage("text"), "stop")],
        usage=Usage(1, 2, 3),
        timings=Timings(),
    )
    assert parse_reply(encode(final)) == final
    body = json.loads(encode(final))
    assert (body["object"], body["last"], body["choices"][0]["message"]["role"]) == (
        "chat.completion",
        True,
        "assistant",
    )
    for number in (float("nan"), float("inf")):
        broken = Final(
            id="r1",
            seq=3,
            model="m",
            created=1,
            choices=final.choices,
            usage=final.usage,
            timings=Timings(ttft_ms=number),
        )
        with pytest.raises(ValueError, match="non-finite"):
            encode(broken)


def test_an_error_carries_the_facts_of_its_code_and_a_bounded_text() -> None:
    error = RequestError("queue_full", "x" * 10_000, param="$." + "y" * 10_000, retry_after_ms=5)
    frame = ErrorFrame(id=None, seq=0, error=error_body(error))
    body = json.loads(encode(frame))
    assert body["id"] is None
    assert (body["error"]["status"], body["error"]["retryable"], body["error"]["type"]) == (
        429,
        True,
        "rate_limit_error",
    )
    assert len(body["error"]["message"]) == len(body["error"]["param"]) == MAX_ERROR_TEXT
    assert parse_reply(encode(frame)) == frame


def test_a_newer_device_stays_readable() -> None:
    accepted = Accepted(id="r", seq=0, device="d", boot_id="b", service_class="standard", queue_pos=0, deadline_ms=1)
    body = json.loads(encode(accepted))
    assert body["class"] == "standard"
    assert parse_reply(json.dumps({**body, "new": 1}).encode()) == accepted


def test_the_will_is_a_status() -> None:
    status = parse_status(b'{"state":"offline","boot_id":"b","reason":"lost"}')
    assert (status.state, status.ready) == ("offline", False)
    assert parse_status(encode(Status(state="online", boot_id="b", ready=True))).ready


def test_schemas_cover_every_message_and_fit_into_info() -> None:
    schemas = json_schemas()
    assert {"Request", "Cancel", "Accepted", "Chunk", "Final", "ErrorFrame", "Status", "Info", "Event"} <= set(
        schemas["$defs"]
    )
    assert schemas["$defs"]["Request"]["additionalProperties"] is False
    info = Info(
        version="0",
        boot_id="b",
        device="d",
        model="m",
        backend={},
        engine={},
        limits={},
        features=[],
        schema=schemas,
    )
    assert parse_info(encode(info)).schema == json.loads(json.dumps(schemas))


def test_every_code_of_the_table_has_a_type_a_status_and_a_verdict() -> None:
    for code, kind in ERROR_TABLE.items():
        assert 400 <= kind.status < 600, code
        assert kind.retryable == (kind.status in (408, 429, 500, 503)), code
