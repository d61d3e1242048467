"""The daemon at a real broker: restarts, duplicates, cancels, limits, retained messages, foreign topics."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.messages import Accepted, Final, Info, parse_info, parse_status
from edge_runtime.supervisor.mqtt import Outbound
from support.broker import BROKERS, Broker
from support.daemon import DaemonProcess, eventually
from support.peer import Peer

TRAP = b'{"id":"trap","model":"tiny","prompt":"hi"}'
SECRET = "zanzibar"  # a prompt that must not appear anywhere but in the request


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with Broker(request.param, tmp_path) as broker:
        yield broker


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Broker]:
    with Broker("mosquitto", tmp_path) as broker:
        yield broker


def assert_serves(peer: Peer, request_id: str) -> None:
    peer.ask(request_id, max_tokens=2)
    assert peer.final(request_id).choices[0].message.content == "w0 w1 "


def whole(peer: Peer, request_id: str) -> str:
    return "".join(chunk.choices[0].delta.content for chunk in peer.chunks(request_id))


def test_a_stream_arrives_in_order_and_whole(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        peer.ask(prompt=SECRET, stream=True, max_tokens=40)
        final = peer.final()
        frames = sorted(peer.frames(), key=lambda frame: frame.seq)
        assert isinstance(frames[0], Accepted)
        assert [frame.seq for frame in frames] == list(range(len(frames)))
        assert whole(peer, "r1") == final.choices[0].message.content
        assert final.usage.completion_tokens == 40
        assert SECRET not in daemon.text()
        assert "w39" not in daemon.text()
        assert not any(SECRET.encode() in message.payload for message in peer.messages)


def test_info_is_retained_with_limits_and_schemas(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon:
        daemon.wait_ready()
        with Peer(broker.port, "edge/v1/d/local/info") as late:
            infos: list[Info] = []
            late.wait_for(lambda: infos.extend(parse_info(m.payload) for m in late.messages) or infos)
            info = infos[-1]
            assert late.messages[0].retain
        assert (info.model, info.limits["context"], info.backend) == ("tiny", 512, {"name": "fake"})
        assert "Request" in info.schema["$defs"]


@pytest.mark.fault("B1")
def test_c60_a_broker_killed_mid_stream_costs_chunks_but_not_the_answer(broker: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", broker.port, worker={"step_ms": 20}) as daemon,
        Peer(broker.port) as peer,
    ):
        daemon.wait_ready()
        peer.ask(stream=True, max_tokens=60)
        peer.wait_for(lambda: len(peer.chunks()) >= 2)
        broker.stop(signal.SIGKILL)
        eventually(lambda: daemon.events("broker_away"), 5, daemon.text)
        broker.start()
        peer.wait_connected()
        # The broker has lost its memory: an answer that left before our subscription is back must be asked for again.
        eventually(lambda: len(daemon.events("broker_connected")) == 2, 10, daemon.text)
        eventually(lambda: daemon.events("request_ended"), 10, daemon.text)
        peer.ask(stream=True, max_tokens=60)
        final = peer.final()
        assert final.choices[0].message.content == "".join(f"w{n} " for n in range(60))
        assert len(daemon.events("request_ended")) == 1  # it ran once
        assert_serves(peer, "after")
        peer.wait_for(lambda: peer.states()[-1] == "online")


@pytest.mark.fault("B2")
def test_c68_a_broker_that_is_absent_at_boot_is_awaited_with_one_line(tmp_path: Path) -> None:
    broker = Broker("mosquitto", tmp_path)
    with DaemonProcess(tmp_path / "d", broker.port) as daemon:
        daemon.wait_ready()  # ready without the broker
        assert len(daemon.events("broker_away")) == 1
        assert str(broker.port) in daemon.events("broker_away")[0]["reason"]
        with broker, Peer(broker.port) as peer:
            peer.wait_for(lambda: peer.states()[-1:] == ["online"])
            assert_serves(peer, "r1")
            assert len(daemon.events("broker_away")) == 1


def test_c63_long_answers_do_not_cost_the_connection_and_cancels_get_through(mosquitto: Broker, tmp_path: Path) -> None:
    config = {"mqtt": {"session": {"keepalive_s": 2}}}
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port, worker={"step_ms": 100}, config=config) as daemon,
        Peer(mosquitto.port) as peer,
    ):
        daemon.wait_ready()
        peer.ask("long", max_tokens=45)  # 4.5 s, more than twice the keepalive
        peer.ask("victim", max_tokens=200, stream=True)
        peer.wait_for(lambda: len(peer.chunks("victim")) >= 2)
        began = time.monotonic()
        peer.cancel("victim")
        assert peer.final("victim").choices[0].finish_reason == "cancelled"
        assert time.monotonic() - began < 1.0
        assert peer.final("long").choices[0].finish_reason == "length"
        assert len(daemon.events("broker_connected")) == 1
        assert not daemon.events("broker_away")


@pytest.mark.fault("R4")
def test_c65_five_deliveries_run_once(broker: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", broker.port, worker={"step_ms": 20}) as daemon,
        Peer(broker.port) as peer,
    ):
        daemon.wait_ready()
        for _ in range(3):
            peer.ask(max_tokens=10)
        peer.ask(prompt="something else", max_tokens=10)
        peer.wait_for(lambda: len(peer.accepted()) == 2)
        peer.wait_for(lambda: [t for t in peer.terminals() if isinstance(t, Final)])
        for _ in range(2):
            peer.ask(max_tokens=10)
        peer.wait_for(lambda: len([t for t in peer.terminals() if isinstance(t, Final)]) == 3)
        finals = [t for t in peer.terminals() if isinstance(t, Final)]
        assert [final.cached for final in finals] == [False, True, True]
        assert len({final.seq for final in finals}) == 1
        (conflict,) = [t for t in peer.terminals() if not isinstance(t, Final)]
        assert conflict.error.code == "id_conflict"
        assert len(daemon.events("request_ended")) == 1


@pytest.mark.fault("R5")
def test_cancels_before_and_after_a_request(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        peer.cancel("early")
        peer.ask("early")
        assert peer.final("early").choices[0].finish_reason == "cancelled"
        assert_serves(peer, "done")
        peer.cancel("done")
        assert_serves(peer, "after")
        assert len(peer.terminals("done")) == 1


@pytest.mark.fault("R1")
def test_c62_nonsense_is_answered_and_the_next_request_served(broker: Broker, tmp_path: Path) -> None:
    nonsense = [b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000, b'{"id":"n1"}', b'{"id":"n2","model":"tiny","prompt":3}']
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        for payload in nonsense:
            peer.send(payload)
        peer.wait_for(lambda: len([m for m in peer.messages if m.topic == peer.result]) == len(nonsense))
        assert {frame.error.code for frame in peer.terminals(None)} == {"invalid_json", "invalid_request"}  # type: ignore[union-attr]
        assert peer.error("n1").error.param == "$.model"
        assert peer.error("n2").error.param == "$.prompt"
        assert_serves(peer, "after")
        assert "internal error" not in daemon.text()


@pytest.mark.fault("R2")
def test_nothing_appears_on_a_foreign_response_topic(broker: Broker, tmp_path: Path) -> None:
    foreign = ["edge/v1/d/local/t/other/res/x", "edge/v1/d/elsewhere/t/default/res/x", "private/x"]
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Peer(broker.port, "edge/v1/#", "private/#") as peer:
        daemon.wait_ready()
        for number, topic in enumerate(foreign):
            peer.send({"id": f"x{number}", "model": "tiny", "prompt": "hi"}, response_topic=topic)
        assert_serves(peer, "after")
        assert not [message for message in peer.messages if message.topic in foreign]
        assert daemon.events("message_ignored")[0]["reason"] == "response_topic"


@pytest.mark.fault("B9")
def test_a_request_that_the_broker_retains_is_not_run_at_a_start(broker: Broker, tmp_path: Path) -> None:
    with Peer(broker.port) as peer:
        trap = peer.topics.request("default")
        peer.publish(Outbound(trap, TRAP, qos=1, retain=True, response_topic=peer.result))
        with Peer(broker.port, trap) as proof:
            proof.wait_for(lambda: proof.messages)
            assert proof.messages[0].retain
        for number in range(3):
            with DaemonProcess(tmp_path / f"d{number}", broker.port) as daemon:
                daemon.wait_ready()
                assert_serves(peer, f"after{number}")
                daemon.stop()
                assert [event["req_id"] for event in daemon.events("request_ended")] == [f"after{number}"]
        assert peer.frames("trap") == []


@pytest.mark.fault("B9")
def test_a_retained_request_is_dropped_and_logged_where_the_broker_keeps_the_flag(
    mosquitto: Broker, tmp_path: Path
) -> None:
    with DaemonProcess(tmp_path / "d", mosquitto.port) as daemon, Peer(mosquitto.port) as peer:
        daemon.wait_ready()
        peer.publish(Outbound(peer.topics.request("default"), TRAP, qos=1, retain=True, response_topic=peer.result))
        assert_serves(peer, "after")
        assert peer.frames("trap") == []
        assert daemon.events("message_ignored")[0]["reason"] == "retained"


@pytest.mark.fault("B10")
def test_a_stale_offline_is_contradicted_once(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        peer.wait_for(lambda: peer.states()[-1:] == ["online"])
        boot_id = parse_status(peer.messages[-1].payload).boot_id
        stale = f'{{"state":"offline","boot_id":"{boot_id}","reason":"lost"}}'.encode()
        count = len(peer.states())
        for _ in range(3):
            peer.publish(Outbound(peer.topics.status, stale, qos=1, retain=True))
        peer.wait_for(lambda: peer.states()[-1] == "online")
        assert_serves(peer, "r1")
        answers = [state for state in peer.states()[count:] if state == "online"]
        assert len(answers) == 1  # at most one in five seconds
    with Peer(broker.port) as late:
        late.wait_for(late.states)


@pytest.mark.fault("B4")
def test_c67_of_two_daemons_with_one_name_one_says_so_and_ends(mosquitto: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "a", mosquitto.port) as first,
        DaemonProcess(tmp_path / "b", mosquitto.port) as second,
    ):
        daemons = [first, second]
        eventually(lambda: any(d.process and d.process.poll() is not None for d in daemons), 30)
        (loser,) = [d for d in daemons if d.process and d.process.poll() is not None]
        assert loser.wait() == 75
        (line,) = loser.events("refused")
        assert "'edge-local'" in line["error"]
        assert "device.name" in line["error"]
        assert len(loser.events("broker_connected")) <= 6  # no fight at full speed
        with Peer(mosquitto.port) as peer:
            peer.wait_for(lambda: peer.states()[-1:] == ["online"])
            assert_serves(peer, "after")


@pytest.mark.fault("B8")
def test_c69_a_request_over_our_limit_is_refused_and_an_answer_over_the_brokers_is_cut(tmp_path: Path) -> None:
    with (
        Broker("mosquitto", tmp_path, extra="max_packet_size 4000") as broker,
        DaemonProcess(tmp_path / "d", broker.port, config={"limits": {"bytes": {"payload": 1000}}}) as daemon,
        Peer(broker.port) as peer,
    ):
        daemon.wait_ready()
        peer.send(b"x" * 1001)
        assert peer.error(None).error.code == "payload_too_large"
        peer.ask("big", "BIG", max_tokens=200)
        final = peer.final("big")
        assert final.truncated
        assert 3000 < len(final.choices[0].message.content) < 4000
        assert len(daemon.events("broker_connected")) == 1
        assert_serves(peer, "after")


def test_c69_a_limit_that_the_broker_does_not_name_is_found_out(tmp_path: Path) -> None:
    # mosquitto 2.0.11 answers such a message with a PUBACK that paho takes for a protocol error: without a remedy the
    # message, here the device's own info, would be sent at every connection for ever.
    with (
        Broker("mosquitto", tmp_path, extra="message_size_limit 6000") as broker,
        DaemonProcess(tmp_path / "d", broker.port) as daemon,
        Peer(broker.port) as peer,
    ):
        daemon.wait_ready()
        eventually(lambda: daemon.events("frames_too_large"), 10, daemon.text)
        count = len(daemon.events("broker_connected"))
        eventually(lambda: len(daemon.events("broker_connected")) > count, 10, daemon.text)
        peer.ask("big", "BIG", max_tokens=100)
        assert peer.final("big").truncated
        assert len(daemon.events("broker_connected")) == count + 1
        assert_serves(peer, "after")


def test_c69_a_subscriber_that_reads_slowly_still_gets_the_end(mosquitto: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", mosquitto.port, worker={"step_ms": 1}) as daemon, Peer(mosquitto.port) as peer:
        daemon.wait_ready()
        slow = Peer(mosquitto.port, peer.result)
        with slow:
            peer.ask("long", stream=True, max_tokens=200)
            final = slow.final("long")
            chunks = slow.chunks("long")
        assert final.chunks >= len(chunks)
        gaps = final.chunks - len(chunks)
        assert gaps > 0 or "".join(c.choices[0].delta.content for c in chunks) == final.choices[0].message.content


@pytest.mark.fault("R7")
def test_an_answer_that_nobody_hears_is_cancelled(mosquitto: Broker, tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "d", mosquitto.port, worker={"step_ms": 30}) as daemon,
        Peer(mosquitto.port, "nothing") as deaf,
    ):
        daemon.wait_ready()
        deaf.ask("unheard", stream=True, max_tokens=250)  # 7.5 s if it ran to its end
        eventually(lambda: daemon.events("request_ended"), 6, daemon.text)
        assert daemon.events("request_ended")[0]["outcome"] == "cancelled"


@pytest.mark.fault("R8")
def test_chunks_hold_whole_code_points(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        peer.ask(prompt="SPLIT", stream=True, max_tokens=20)
        final = peer.final()
        assert whole(peer, "r1") == final.choices[0].message.content == "é€😀 " * 20


@pytest.mark.fault("R6")
def test_a_deadline_ends_an_answer_with_its_text(broker: Broker, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "d", broker.port, worker={"step_ms": 50}) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        peer.ask("late", timeout_ms=400, max_tokens=200)
        final = peer.final("late")
        assert final.choices[0].finish_reason == "deadline"
        assert 1 <= final.usage.completion_tokens < 20
        assert_serves(peer, "after")
