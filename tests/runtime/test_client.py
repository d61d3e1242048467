"""The Python client: answers, streams, errors with their remedy, retries, restarts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.client import Client, Options
from edge_runtime.client.order import PieceOrder
from edge_runtime.errors import EdgeError, RequestError, UsageError
from edge_runtime.messages import Accepted, Request, parse_request
from support.broker import BROKERS, Broker, free_port
from support.daemon import DaemonProcess, eventually
from support.peer import TOPICS, Peer


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with Broker(request.param, tmp_path) as broker:
        yield broker


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Broker]:
    with Broker("mosquitto", tmp_path) as broker:
        yield broker


def words(count: int) -> str:
    return "".join(f"w{number} " for number in range(count))


def accepted(seq: int, boot_id: str) -> Accepted:
    return Accepted(id="r", seq=seq, device="d", boot_id=boot_id, service_class="standard", queue_pos=0, deadline_ms=1)


def test_a_question_has_an_answer(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Client(port=broker.port) as client:
        daemon.wait_ready()
        answer = client.ask("hello", max_tokens=5, options=Options(metadata={"a": "b"}))
        assert (answer.text, answer.finish_reason, answer.seed) == (words(5), "length", 7)
        assert (answer.device, answer.model, answer.attempt, answer.metadata) == ("local", "tiny", 1, {"a": "b"})
        assert answer.usage.completion_tokens == 5
        assert answer.timings.e2e_ms > 0
        assert client.ask("hello", max_tokens=1, options=Options(seed=3)).seed == 3
        eventually(lambda: client.status().state == "online")
        assert client.info().limits["max_tokens"] == 256


def test_a_text_is_the_users_message_unless_it_is_raw(mosquitto: Broker, tmp_path: Path) -> None:
    user, system = {"role": "user", "content": "hello"}, {"role": "system", "content": "be brief"}
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port) as daemon,
        Client(port=mosquitto.port) as client,
        Peer(mosquitto.port, TOPICS.requests) as wire,
    ):
        daemon.wait_ready()
        client.ask("hello", max_tokens=1)
        client.ask("hello", system="be brief", max_tokens=1)
        client.ask([user, {"role": "assistant", "content": "hi"}, user], system="be brief", max_tokens=1)
        client.ask("hello", raw=True, max_tokens=1)
        wire.wait_for(lambda: len(wire.messages) == 4)
    requests = [parse_request(message.payload) for message in wire.messages]

    def turns(request: Request) -> list[dict[str, str]]:
        return [{"role": turn.role, "content": turn.content} for turn in request.messages or []]

    assert [turns(request) for request in requests[:2]] == [[user], [system, user]]
    assert turns(requests[2]) == [system, user, {"role": "assistant", "content": "hi"}, user]
    assert (requests[3].prompt, requests[3].messages) == ("hello", None)


def test_a_raw_prompt_takes_neither_turns_nor_a_system_message() -> None:
    client = Client()
    with pytest.raises(UsageError, match="raw"):
        client.ask("hello", raw=True, system="be brief")
    with pytest.raises(UsageError, match="raw"):
        client.ask([{"role": "user", "content": "hello"}], raw=True)


def test_every_option_reaches_the_device(mosquitto: Broker, tmp_path: Path) -> None:
    options = Options(
        temperature=0.5, top_p=0.25, top_k=3, seed=4, stop="end", service_class="background",
        metadata={"a": "b"}, request_id="mine",
    )  # fmt: skip
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port) as daemon,
        Client(port=mosquitto.port) as client,
        Peer(mosquitto.port, TOPICS.requests) as wire,
    ):
        daemon.wait_ready()
        client.ask("hello", max_tokens=2, timeout_s=9.0, options=options)
        wire.wait_for(lambda: wire.messages)
    request = parse_request(wire.messages[0].payload)
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (0.5, 0.25, 3, 4)
    assert (request.stops, request.service_class, request.metadata) == (("end",), "background", {"a": "b"})
    assert (request.id, request.max_tokens) == ("mine", 2)
    assert request.timeout_ms is not None
    assert 8000 < request.timeout_ms <= 9000
    assert wire.messages[0].expiry_s in (8, 9)


def test_a_stream_gives_pieces_and_then_the_answer(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Client(port=broker.port) as client:
        daemon.wait_ready()
        stream = client.stream("hello", max_tokens=20)
        with pytest.raises(EdgeError, match="has not ended"):
            _ = stream.answer
        pieces = list(stream)
        assert len(pieces) > 2
        assert "".join(pieces) == stream.answer.text == words(20)


def test_several_requests_are_open_at_once(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Client(port=broker.port) as client:
        daemon.wait_ready()
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda count: client.ask("hello", max_tokens=count).text, range(1, 17)))
        assert answers == [words(count) for count in range(1, 17)]


def test_a_refusal_is_an_error_with_code_and_field(mosquitto: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", mosquitto.port) as daemon, Client(port=mosquitto.port) as client:
        daemon.wait_ready()
        with pytest.raises(RequestError) as caught:
            client.ask("hello", max_tokens=257)
        assert (caught.value.code, caught.value.param) == ("invalid_request", "$.max_tokens")
        with pytest.raises(RequestError, match="too long"):
            client.ask("REFUSE")
        with pytest.raises(RequestError, match="role"):
            client.ask([{"role": "robot", "content": "x"}])
        with pytest.raises(RequestError, match="max_tokens"):
            client.ask("hello", max_tokens=0)
        assert client.ask("hello", max_tokens=1).text == "w0 "


@pytest.mark.fault("W1")
def test_what_was_generated_before_a_failure_is_streamed_and_kept(mosquitto: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", mosquitto.port) as daemon, Client(port=mosquitto.port) as client:
        daemon.wait_ready()
        pieces: list[str] = []
        with pytest.raises(RequestError) as caught:
            pieces.extend(client.stream("KILL AFTER some text", max_tokens=100))
        failure = caught.value
        assert failure.code == "worker_restarted"
        assert failure.partial is not None
        assert "".join(pieces) == failure.partial.text == words(failure.partial.completion_tokens)
        assert failure.partial.completion_tokens >= 5
        with pytest.raises(RequestError) as refused:
            client.ask("REFUSE")
        assert refused.value.partial is None


def test_a_request_that_the_broker_can_not_take_is_refused_at_once(tmp_path: Path) -> None:
    with (
        Broker("mosquitto", tmp_path, extra="max_packet_size 8000") as broker,
        DaemonProcess(tmp_path / "d", broker.port) as daemon,
        Client(port=broker.port, model="tiny") as client,
    ):
        daemon.wait_ready()
        with pytest.raises(RequestError, match="the broker takes 8000") as caught:
            client.ask("x" * 8000)
        assert caught.value.code == "payload_too_large"
        assert client.ask("hello", max_tokens=1).text == "w0 "


def test_without_a_broker_the_error_names_it_and_what_to_do() -> None:
    port = free_port()
    with pytest.raises(EdgeError) as caught:
        Client(port=port, connect_timeout_s=0.3).connect()
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "refused" in str(caught.value)
    assert "start a broker there" in str(caught.value)


def test_an_unknown_or_stopped_device_is_named(mosquitto: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port) as daemon,
        Client(port=mosquitto.port) as client,
        Client(port=mosquitto.port, device="other") as lost,
    ):
        daemon.wait_ready()
        with pytest.raises(EdgeError, match="'other' is not known"):
            lost.ask("hello")
        daemon.stop()
        eventually(lambda: client.status().state == "offline")
        with pytest.raises(EdgeError, match="offline \\(stopped\\)") as caught:
            client.ask("hello")
        assert "edge-runtime serve" in caught.value.remedy


def test_a_device_that_stops_meanwhile_ends_the_wait(mosquitto: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port, worker={"step_ms": 50}) as daemon,
        Client(port=mosquitto.port) as client,
    ):
        daemon.wait_ready()
        stream = client.stream("hello", max_tokens=200)
        pieces = iter(stream)
        first = next(pieces)
        daemon.stop()
        rest = "".join(pieces)
        assert stream.answer.finish_reason == "cancelled"
        assert first + rest == stream.answer.text


def test_a_request_during_the_start_waits_until_the_device_is_ready(mosquitto: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port, worker={"load_s": 1.5}) as daemon,
        Client(port=mosquitto.port) as client,
    ):
        eventually(lambda: daemon.events("broker_connected"), 10, daemon.text)
        assert client.ask("hello", max_tokens=2).text == words(2)
        assert any(event["reason"] == "not_ready" for event in daemon.events("request_refused"))


def test_a_cancel_ends_an_answer_with_its_text(mosquitto: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port, worker={"step_ms": 20}) as daemon,
        Client(port=mosquitto.port) as client,
    ):
        daemon.wait_ready()
        stream = client.stream("hello", max_tokens=200)
        text = ""
        for piece in stream:
            text += piece
            if len(text) > 20:
                stream.cancel()
        assert stream.answer.finish_reason == "cancelled"
        assert stream.answer.text == text


def test_leaving_a_stream_early_cancels_it(mosquitto: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port, worker={"step_ms": 20}) as daemon,
        Client(port=mosquitto.port) as client,
    ):
        daemon.wait_ready()
        pieces = iter(client.stream("hello", max_tokens=200))
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        eventually(lambda: daemon.events("request_ended"), 3, daemon.text)
        assert daemon.events("request_ended")[0]["outcome"] == "cancelled"


def test_an_answer_survives_a_restart_of_the_broker(mosquitto: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port, worker={"step_ms": 20}) as daemon,
        Client(port=mosquitto.port) as client,
    ):
        daemon.wait_ready()
        stream = client.stream("hello", max_tokens=100)
        pieces = iter(stream)
        text = next(pieces)
        mosquitto.stop(9)
        mosquitto.start()
        text += "".join(pieces)
        assert text == stream.answer.text == words(100)
        assert len(daemon.events("request_ended")) == 1


@pytest.mark.fault("W13")
def test_an_answer_survives_a_restart_of_the_daemon(mosquitto: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port, worker={"step_ms": 20}) as daemon,
        Client(port=mosquitto.port) as client,
    ):
        daemon.wait_ready()
        stream = client.stream("hello", max_tokens=60)
        pieces = iter(stream)
        text = next(pieces)
        daemon.signal(9)
        daemon.wait()
        daemon.start()
        text += "".join(pieces)
        assert text == stream.answer.text == words(60)  # the same words: the second run begins like the first


def test_no_answer_is_an_error_after_the_timeout(mosquitto: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port, worker={"load_s": 30}) as daemon,
        Client(port=mosquitto.port, model="tiny") as client,
    ):
        eventually(lambda: daemon.events("broker_connected"), 10, daemon.text)
        with pytest.raises(RequestError) as caught:
            client.ask("hello", timeout_s=1.0)
        assert caught.value.code == "not_ready"


def test_a_device_that_says_nothing_is_named_with_a_reason(mosquitto: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port) as daemon,
        Client(port=mosquitto.port, tenant="acme") as client,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("edge_runtime.client.answer_stream.GRACE_S", 0.2)
        daemon.wait_ready()
        with pytest.raises(RequestError, match=r"no answer within 0\.3 s; does the device serve tenant 'acme'\?"):
            client.ask("hello", timeout_s=0.3)


def test_the_same_id_can_not_be_open_twice(mosquitto: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port, worker={"step_ms": 20}) as daemon,
        Client(port=mosquitto.port) as client,
    ):
        daemon.wait_ready()
        mine = Options(request_id="mine")
        stream = client.stream("hello", max_tokens=50, options=mine)
        with pytest.raises(RequestError, match="mine"):
            client.ask("hello", options=mine)
        assert stream.wait().id == "mine"
        assert client.ask("hello", max_tokens=1).text == "w0 "


def test_closing_leaves_no_thread(mosquitto: Broker) -> None:
    before = set(threading.enumerate())
    with Client(port=mosquitto.port):
        pass
    eventually(lambda: set(threading.enumerate()) <= before, 3.0)


# ---- order of pieces


@given(st.permutations(list(range(8))), st.sets(st.integers(0, 7)))
def test_pieces_come_out_in_order_whatever_arrives_and_the_end_makes_up_for_the_lost(
    arrival: list[int], lost: set[int]
) -> None:
    order, text = PieceOrder(), ""
    for seq in arrival:
        if seq not in lost:
            text += order.add(seq, f"{seq},")
            text += order.add(seq, f"{seq},")  # delivered twice
    assert "".join(f"{n}," for n in range(8)).startswith(text)
    text += order.end("".join(f"{n}," for n in range(8)))
    assert text == "".join(f"{n}," for n in range(8))


def test_a_second_run_of_the_device_continues_or_is_an_error() -> None:
    order = PieceOrder()
    order.accept(accepted(0, "boot1"))
    assert order.add(1, "one ") == "one "
    order.accept(accepted(0, "boot2"))
    assert order.add(1, "one two ") == "two "
    order.accept(accepted(0, "boot3"))
    with pytest.raises(RequestError, match="differs"):
        order.add(1, "other ")


def test_a_cut_answer_does_not_take_pieces_back() -> None:
    order = PieceOrder()
    assert order.add(0, "one two ") == "one two "
    assert order.end("one ") == ""
