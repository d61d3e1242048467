"""Networks that lose, delay, stall and cut: what daemon and clients notice, repeat and never run twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.messages import Final
from edge_runtime.supervisor.mqtt import Outbound
from support.broker import Broker
from support.daemon import DaemonProcess, eventually
from support.peer import Peer
from support.proxy import PUBACK, Proxy


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker("mosquitto", tmp_path) as broker:
        yield broker


@pytest.fixture
def proxy(broker: Broker) -> Iterator[Proxy]:
    with Proxy(broker.port) as proxy:
        yield proxy


def words(count: int) -> str:
    return "".join(f"w{number} " for number in range(count))


def text_of(peer: Peer, request_id: str) -> str:
    return "".join(chunk.choices[0].delta.content for chunk in peer.chunks(request_id))


def wait_online(peer: Peer, past: int = 0) -> None:
    peer.wait_for(lambda: peer.states()[past:][-1:] == ["online"])


@pytest.mark.fault("B5")
def test_a_half_open_connection_is_noticed_within_one_and_a_half_keepalives(
    broker: Broker, proxy: Proxy, tmp_path: Path
) -> None:
    config = {"mqtt": {"session": {"keepalive_s": 4}}}
    with (
        DaemonProcess(tmp_path / "d", proxy.port, worker={"step_ms": 20}, config=config) as daemon,
        Peer(broker.port) as peer,
    ):
        daemon.wait_ready()
        wait_online(peer)
        peer.ask("r1", stream=True, max_tokens=100)
        peer.wait_for(lambda: len(peer.chunks("r1")) >= 2)
        num_states = len(peer.states())
        proxy.stall()
        began = time.monotonic()
        eventually(lambda: daemon.events("broker_away"), 10, daemon.text)
        assert time.monotonic() - began < 1.5 * 4
        assert peer.terminals("r1") == []  # the proof that nothing came through
        proxy.resume()
        assert peer.final("r1").choices[0].message.content == words(100)
        wait_online(peer, num_states)
        assert len(daemon.events("request_ended")) == 1


@pytest.mark.fault("B5")
def test_on_a_slow_way_streams_are_complete_only_later(broker: Broker, tmp_path: Path) -> None:
    with (
        Proxy(broker.port, delay_s=0.2) as proxy,
        DaemonProcess(tmp_path / "d", proxy.port) as daemon,
        Peer(broker.port) as peer,
    ):
        daemon.wait_ready()
        wait_online(peer)
        began = time.monotonic()
        for name in ("r1", "r2", "r3"):
            peer.ask(name, stream=True, max_tokens=80)
        for name in ("r1", "r2", "r3"):
            final = peer.final(name)
            assert final.choices[0].message.content == text_of(peer, name) == words(80)
            assert [frame.seq for frame in peer.frames(name)] == list(range(final.seq + 1))
        assert time.monotonic() - began > 0.4  # there and back
        assert not daemon.events("broker_away")


@pytest.mark.fault("B7")
def test_a_request_whose_acknowledgement_was_lost_runs_once(broker: Broker, proxy: Proxy, tmp_path: Path) -> None:
    payload = b'{"id":"r1","model":"tiny","prompt":"hi","ack":true,"max_tokens":50}'
    with (
        DaemonProcess(tmp_path / "d", broker.port, worker={"step_ms": 20}) as daemon,
        Peer(proxy.port) as peer,
    ):
        daemon.wait_ready()
        proxy.drop_next("broker", PUBACK)
        peer.transport.publish(Outbound(peer.topics.request("default"), payload, qos=1, response_topic=peer.result))
        eventually(lambda: proxy.dropped["broker", PUBACK] == 1)
        proxy.cut()
        final = peer.final("r1")
        assert (final.choices[0].message.content, final.attempt, final.cached) == (words(50), 1, False)
        assert [frame.duplicate for frame in peer.accepted("r1")] == [False, True]  # it did arrive twice
        assert len(peer.terminals("r1")) == 1
        assert len(daemon.events("request_ended")) == 1


@pytest.mark.fault("B7")
def test_an_answer_whose_acknowledgement_was_lost_comes_twice_with_one_number(
    broker: Broker, proxy: Proxy, tmp_path: Path
) -> None:
    with DaemonProcess(tmp_path / "d", proxy.port) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        wait_online(peer)
        proxy.drop_next("broker", PUBACK)
        peer.ask("r1", max_tokens=5)  # its only frame at QoS 1 is the last
        eventually(lambda: proxy.dropped["broker", PUBACK] == 1)
        proxy.cut()
        peer.wait_for(lambda: len(peer.terminals("r1")) == 2)
        first, second = peer.terminals("r1")
        assert isinstance(first, Final)
        assert first == second
        assert len(daemon.events("request_ended")) == 1


@pytest.mark.fault("B10")
def test_a_short_drop_shows_no_offline_and_online_comes_back(broker: Broker, proxy: Proxy, tmp_path: Path) -> None:
    config = {"mqtt": {"session": {"will_delay_s": 3}}}
    with DaemonProcess(tmp_path / "d", proxy.port, config=config) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        wait_online(peer)
        count = len(peer.states())
        proxy.cut()
        eventually(lambda: len(daemon.events("broker_connected")) == 2, 10, daemon.text)
        wait_online(peer, count)
        assert "offline" not in peer.states()


@pytest.mark.fault("B10")
def test_a_long_drop_shows_offline_then_online_and_the_answer_arrives(
    broker: Broker, proxy: Proxy, tmp_path: Path
) -> None:
    with DaemonProcess(tmp_path / "d", proxy.port, worker={"step_ms": 20}) as daemon, Peer(broker.port) as peer:
        daemon.wait_ready()
        wait_online(peer)
        peer.ask("r1", stream=True, max_tokens=50)
        peer.wait_for(lambda: peer.chunks("r1"))
        count = len(peer.states())
        proxy.down()
        peer.wait_for(lambda: peer.states()[count:] == ["offline"])
        eventually(lambda: daemon.events("request_ended"), 5, daemon.text)  # it ran on without the broker
        proxy.up()
        assert peer.final("r1").choices[0].message.content == words(50)
        wait_online(peer, count)
        assert "offline" not in peer.states()[count + 1 :]
