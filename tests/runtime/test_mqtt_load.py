"""More than a connection, a subscriber or a queue can hold: memory stays flat, losses are counted, answers arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from paho.mqtt.client import Client as Paho
from paho.mqtt.client import DisconnectFlags, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

from edge_runtime.supervisor.mqtt import Outbound
from support.broker import HOST, Broker
from support.daemon import DaemonProcess, eventually
from support.peer import Peer
from support.proxy import Proxy

FLAT_BYTES = 5 << 20  # of invariant 5: resident memory stays within this of where it began
FILLER_BYTES = 100_000
FILLERS = 100  # 10 MB: more than the kernel holds of a connection (4 MB) and the broker behind it (20 packets)
BIG_TOKENS = 1200  # 241 KB of text, just below the largest answer
FLOOD = 10_000
LIMIT_S = 5.0  # an answer takes 10 ms; in the flood its request waits behind those that the broker holds


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker("mosquitto", tmp_path) as broker:
        yield broker


def memory_of(daemon: DaemonProcess) -> int:
    assert daemon.process is not None
    return psutil.Process(daemon.process.pid).memory_info().rss


def big_answer(num_tokens: int) -> str:
    return ("x" * 200 + " ") * num_tokens


@pytest.mark.fault("B6")
def test_a_subscriber_that_never_reads_costs_the_daemon_nothing_and_gets_the_end_when_it_comes_back(
    tmp_path: Path,
) -> None:
    names = [f"r{number}" for number in range(4)]
    with (
        Broker("mosquitto", tmp_path, extra="max_queued_messages 20") as broker,
        DaemonProcess(tmp_path / "d", broker.port, worker={"step_ms": 1}) as daemon,
        Proxy(broker.port) as proxy,
        Peer(broker.port) as reader,
        Peer(proxy.port, reader.result, "filler") as stalled,
    ):
        daemon.wait_ready()
        proxy.stall()
        for _ in range(FILLERS):  # then the broker has no room left on the way to the stalled one
            reader.transport.publish(Outbound("filler", b"x" * FILLER_BYTES))
        before = memory_of(daemon)
        for name in names:
            reader.ask(name, stream=True, max_tokens=200)
        finals = [reader.final(name) for name in names]
        assert abs(memory_of(daemon) - before) < FLAT_BYTES
        assert all(len(reader.chunks(final.id)) == final.chunks for final in finals)
        proxy.resume()
        proxy.cut()  # mosquitto sends what it dropped at QoS 1 when the subscriber comes back
        for final in finals:
            assert stalled.final(final.id) == final
        assert sum(len(stalled.chunks(name)) for name in names) < sum(final.chunks for final in finals)
        assert len(daemon.events("broker_connected")) == 1


@pytest.mark.fault("B6")
def test_while_nothing_gets_through_chunks_are_dropped_and_counted_and_answers_wait(
    broker: Broker, tmp_path: Path
) -> None:
    config = {"limits": {"max_tokens": BIG_TOKENS}, "mqtt": {"outbox": {"chunks_per_request": 8}}}
    fillers, streams = [f"filler{number}" for number in range(20)], [f"stream{number}" for number in range(10)]
    with (
        Proxy(broker.port) as proxy,
        DaemonProcess(tmp_path / "d", proxy.port, worker={"step_ms": 0}, config=config) as daemon,
        Peer(broker.port) as peer,
    ):
        daemon.wait_ready()
        peer.wait_for(lambda: peer.states()[-1:] == ["online"])
        proxy.stall("client")
        for name in fillers:  # 4.8 MB of answers: more than the kernel holds of a connection
            peer.ask(name, "BIG", max_tokens=BIG_TOKENS)
        eventually(lambda: len(daemon.events("request_ended")) == 20, 20, daemon.text)
        before = memory_of(daemon)
        for name in streams:
            peer.ask(name, "BIG", stream=True, max_tokens=256)
        eventually(lambda: len(daemon.events("request_ended")) == 30, 20, daemon.text)
        assert abs(memory_of(daemon) - before) < FLAT_BYTES
        assert peer.frames(streams[-1]) == []  # the proof that nothing got through
        proxy.resume()
        finals = [peer.final(name, 20) for name in streams]
        assert all(final.choices[0].message.content == ("x" * 200 + " ") * 256 for final in finals)
        assert all(len(peer.terminals(name)) == 1 for name in fillers)
        missing = sum(final.chunks - len(peer.chunks(final.id)) for final in finals)
        assert daemon.stop() == 0
        assert daemon.events("served")[0]["dropped_chunks"] == missing > 0


@pytest.mark.fault("B8")
def test_a_message_over_our_limit_is_refused_and_one_over_the_brokers_ends_only_its_sender(
    broker: Broker, tmp_path: Path
) -> None:
    with DaemonProcess(tmp_path / "d", broker.port) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        peer.send(b"x" * 262_145)
        assert peer.error(None).error.code == "payload_too_large"
        reason = disconnected_for(broker.port, peer.topics.request("default"), b"x" * 300_001)
        assert reason == "Packet too large"
        peer.ask("after", max_tokens=2)
        assert peer.final("after").choices[0].message.content == "w0 w1 "
        assert len(daemon.events("broker_connected")) == 1
        assert not daemon.events("broker_away")
        assert peer.faults == []


@pytest.mark.fault("R3")
def test_ten_thousand_messages_of_one_tenant_do_not_keep_another_from_being_served(
    broker: Broker, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"tenants": {"acme": {}, "globex": {}}}
    with (
        DaemonProcess(tmp_path / "d", broker.port, config=config) as daemon,
        Peer(broker.port, "nothing", tenant="acme") as flood,
        Peer(broker.port, tenant="globex") as served,
    ):
        daemon.wait_ready()
        answer_in_time(served, "before")
        before = memory_of(daemon)
        sender = threading.Thread(target=send_nonsense, args=(flood,))
        sender.start()
        number = 0
        while sender.is_alive() or len(flood.acks) < FLOOD:
            answer_in_time(served, f"r{number}")
            number += 1
        sender.join()
        assert number >= 3  # it was served while the flood came
        assert abs(memory_of(daemon) - before) < FLAT_BYTES
        answer_in_time(served, "after")
        assert daemon.stop() == 0
        (totals,) = daemon.events("served")
        assert totals["requests"]["refused:invalid_json"] > FLOOD / 10  # what the broker did not drop itself
        assert totals["requests"]["ended:length"] == number + 2
        assert len(daemon.events("broker_connected")) == 1
        assert len(daemon.events("request_refused")) < 20  # the log is not flooded either
        for name in (f"r{n}" for n in range(number)):  # what came late was asked for again, and sent again
            assert [frame.cached for frame in served.terminals(name)].count(False) == 1


def send_nonsense(peer: Peer) -> None:
    for _ in range(FLOOD):
        peer.transport.publish(Outbound(peer.topics.request("acme"), b"x", qos=1, response_topic=peer.result))


def answer_in_time(peer: Peer, request_id: str) -> None:
    """Ask, and ask again under the same id: a broker whose queue is full drops requests without a word."""
    began = time.monotonic()
    while not peer.terminals(request_id):
        peer.ask(request_id, max_tokens=3)
        try:
            peer.terminal(request_id, 1.0)
        except AssertionError:
            assert time.monotonic() - began < LIMIT_S
    assert time.monotonic() - began < LIMIT_S


def disconnected_for(port: int, topic: str, payload: bytes) -> str:
    """Publish with a client that heeds no limit, and return why the broker ends its connection."""
    ended = threading.Event()
    reasons: list[str] = []
    client = Paho(CallbackAPIVersion.VERSION2, "careless", protocol=MQTTv5)

    def note(client: Paho, userdata: object, flags: DisconnectFlags, reason: ReasonCode, properties: object) -> None:
        reasons.append(str(reason))
        ended.set()

    client.on_disconnect = note
    client.on_connect = lambda client, *_: client.publish(topic, payload, qos=1)
    client.connect(HOST, port)
    client.loop_start()
    assert ended.wait(10)
    client.on_connect = None
    client.disconnect()
    client.loop_stop()
    return reasons[0]
