"""The connection over paho, against real brokers: subscriptions, faults, limits, threads."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.errors import ConfigError
from edge_runtime.supervisor.mqtt import (
    BrokerLimits,
    Inbound,
    MqttSettings,
    MqttTransport,
    Outbound,
    Subscription,
    Will,
    tls_context,
)
from support.broker import BROKERS, Broker, free_port
from support.certificates import Authority
from support.daemon import eventually
from support.peer import Peer


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[Broker]:
    with Broker("mosquitto", tmp_path) as broker:
        yield broker


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Broker]:
    with Broker(request.param, tmp_path) as broker:
        yield broker


class Seen:
    """A listener that remembers; `handler` may do anything."""

    def __init__(self) -> None:
        self.connected = threading.Event()
        self.connections = 0
        self.ends: list[str] = []
        self.warnings: list[str] = []
        self.taken = threading.Event()
        self.handler = lambda message: None

    def on_connected(self, limits: BrokerLimits) -> None:
        self.connections += 1
        self.connected.set()

    def on_disconnected(self, reason: str) -> None:
        self.ends.append(reason)

    def on_message(self, message: Inbound) -> None:
        self.handler(message)  # type: ignore[no-untyped-call]

    def on_published(self, token: int, code: int) -> None: ...

    def on_dropped(self, tokens: tuple[int, ...]) -> None: ...

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)

    def on_client_id_taken(self) -> None:
        self.taken.set()


def settings(port: int, *topics: str, **fields: object) -> MqttSettings:
    plain: dict[str, object] = {
        "host": "127.0.0.1",
        "port": port,
        "client_id": "device",
        "subscriptions": tuple(Subscription(topic, own=True) for topic in topics),
        "backoff_s": 0.1,
    }
    return MqttSettings(**{**plain, **fields})  # type: ignore[arg-type]


def test_properties_cross_the_broker_unchanged(broker: Broker) -> None:
    message = Outbound(
        "a/b",
        b"{}",
        qos=1,
        response_topic="a/res",
        correlation=b"\x00\xff",
        expiry_s=30,
        user_properties=(("k", "1"), ("k", "2"), ("é", "😀")),
    )
    with Peer(broker.port, "a/#") as peer:
        assert peer.publish(message) < 0x80
        peer.wait_for(lambda: peer.messages)
        got = peer.messages[0]
    assert (got.topic, got.payload, got.qos, got.retain) == ("a/b", b"{}", 1, False)
    assert (got.response_topic, got.correlation, got.content_type) == ("a/res", b"\x00\xff", "application/json")
    assert got.expiry_s in (29, 30)
    assert got.user_properties == message.user_properties


def test_c60_after_a_broker_restart_the_subscriptions_are_back(broker: Broker) -> None:
    with Peer(broker.port, "a/#") as peer:
        broker.stop(signal.SIGKILL)
        peer.wait_for(lambda: not peer.transport.is_connected)
        broker.start()
        peer.wait_connected()
        peer.publish(Outbound("a/b", b"1", qos=1))
        peer.wait_for(lambda: peer.messages)


@pytest.mark.fault("B2")
def test_c68_a_broker_that_comes_late_is_found(tmp_path: Path) -> None:
    broker = Broker("mosquitto", tmp_path)
    seen, transport = Seen(), MqttTransport(settings(broker.port, "a/#"))
    transport.start(seen)
    try:
        eventually(lambda: seen.ends)
        assert not transport.is_connected
        assert transport.has_thread()
        assert "refused" in seen.ends[0].lower()
        with broker:
            assert seen.connected.wait(10)
    finally:
        transport.stop(2.0)


def test_c61_handlers_may_publish_while_other_threads_publish_too(mosquitto: Broker) -> None:
    seen, count = Seen(), [0]
    transport = MqttTransport(settings(mosquitto.port, "in/#", "out/#"))

    def echo(message: Inbound) -> None:
        count[0] += 1
        if message.topic.startswith("in/"):
            transport.publish(Outbound("out/x", message.payload, qos=int(message.topic[-1])))

    seen.handler = echo
    transport.start(seen)
    try:
        assert seen.connected.wait(10)

        def many(topic: str) -> None:
            for number in range(500):
                transport.publish(Outbound(topic, str(number).encode(), qos=1))

        threads = [threading.Thread(target=many, args=(topic,)) for topic in ("in/0", "in/1")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        eventually(lambda: count[0] >= 2000, 20)
    finally:
        transport.stop(2.0)


def test_c62_an_exception_in_a_handler_is_reported_and_survived(mosquitto: Broker) -> None:
    seen, got = Seen(), threading.Event()

    def explode(message: Inbound) -> None:
        if message.payload == b"bad":
            raise ValueError("surprise")
        got.set()

    seen.handler = explode
    transport = MqttTransport(settings(mosquitto.port, "a/#", receive_maximum=2))
    transport.start(seen)
    try:
        assert seen.connected.wait(10)
        for _ in range(5):  # more than may be unacknowledged
            transport.publish(Outbound("a/b", b"bad", qos=1))
        transport.publish(Outbound("a/b", b"good", qos=1))
        assert got.wait(10)
        assert transport.has_thread()
        assert transport.is_alive(time.monotonic())
        assert any("surprise" in text for text in seen.warnings)
    finally:
        transport.stop(2.0)


@pytest.mark.fault("B4")
def test_c67_of_two_with_one_client_id_one_gives_up_and_one_stays(broker: Broker) -> None:
    sides = [(Seen(), MqttTransport(settings(broker.port, "a"))) for _ in range(2)]
    try:
        for seen, transport in sides:
            transport.start(seen)
            assert seen.connected.wait(10)
        eventually(lambda: any(seen.taken.is_set() for seen, _ in sides), 20)
        (winner,) = [(seen, transport) for seen, transport in sides if not seen.taken.is_set()]
        eventually(lambda: winner[1].is_connected, 10)
        assert all(seen.connections <= 6 for seen, _ in sides)
    finally:
        for _, transport in sides:
            transport.stop(2.0)


@pytest.mark.fault("B10")
def test_c68_a_lost_connection_publishes_the_will_and_a_normal_end_does_not(mosquitto: Broker) -> None:
    will = Will("a/status", b"gone", delay_s=0)
    with Peer(mosquitto.port, "a/#") as peer:
        seen, transport = Seen(), MqttTransport(settings(mosquitto.port, "b", will=will))
        transport.start(seen)
        assert seen.connected.wait(10)
        transport.stop(2.0)
        peer.publish(Outbound("a/mark", b"1", qos=1))
        peer.wait_for(lambda: peer.messages)
        assert [message.topic for message in peer.messages] == ["a/mark"]
        seen, transport = Seen(), MqttTransport(settings(mosquitto.port, "b", will=will))
        transport.start(seen)
        assert seen.connected.wait(10)
        sock = transport._client.socket()
        assert sock is not None
        sock.shutdown(2)  # type: ignore[attr-defined]
        peer.wait_for(lambda: len(peer.messages) == 2)
        assert peer.messages[1].payload == b"gone"
        transport.stop(2.0)


def test_c69_the_brokers_largest_packet_is_known_and_kept(tmp_path: Path) -> None:
    with Broker("mosquitto", tmp_path, extra="max_packet_size 1000") as broker, Peer(broker.port, "a/#") as peer:
        assert peer.transport.limits.packet_bytes == 1000
        assert peer.transport.publish(Outbound("a/b", b"x" * 1000, qos=1)) is None
        assert "1000" in peer.faults[-1]
        fits = Outbound("a/b", b"", qos=1, user_properties=(("k", "v"),))
        room = 1000 - fits.wire_bytes
        peer.publish(Outbound("a/b", b"x" * room, qos=1, user_properties=(("k", "v"),)))
        peer.wait_for(lambda: peer.messages)
        assert len(peer.messages[0].payload) == room


def test_c61_a_message_is_acknowledged_although_nobody_waits_for_delivery(mosquitto: Broker) -> None:
    with Peer(mosquitto.port, "a/#") as peer:
        assert peer.publish(Outbound("nobody/listens", b"1", qos=1)) == 0x10
        assert peer.publish(Outbound("a/b", b"1", qos=1)) == 0


def test_stopping_ends_the_thread_whether_the_broker_is_there_or_not(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with Broker("mosquitto", tmp_path) as broker:
        for port in (broker.port, free_port()):
            seen, transport = Seen(), MqttTransport(settings(port, "a"))
            transport.start(seen)
            eventually(lambda seen=seen: seen.ends or seen.connections)
            transport.stop(2.0)
            eventually(lambda: set(threading.enumerate()) <= before, 3.0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # it is made to die
def test_a_dead_network_thread_is_noticed(mosquitto: Broker) -> None:
    seen, transport = Seen(), MqttTransport(settings(mosquitto.port, "a/#"))
    transport.start(seen)
    assert seen.connected.wait(10)

    def die(message: Inbound) -> None:
        raise SystemExit

    seen.handler = die
    transport.publish(Outbound("a/b", b"1", qos=1))
    eventually(lambda: not transport.has_thread())
    assert not transport.is_alive(time.monotonic())


def test_a_host_name_that_can_not_exist_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="host"):
        MqttTransport(settings(1, "a", host="a..b"))


@pytest.mark.parametrize("name", ["ca_file", "cert_file", "key_file"])
def test_a_missing_certificate_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        tls_context(**{name: str(tmp_path / "none.pem")})


def test_a_file_that_is_no_certificate_is_a_configuration_error(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("nonsense")
    with pytest.raises(ConfigError, match="not usable"):
        tls_context(str(file))


def test_tls_verifies_the_ca_and_the_host_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    server = authority.issue("broker", address="127.0.0.1")
    extra = f"certfile {server.file}\nkeyfile {server.key}"
    with Broker("mosquitto", tmp_path, extra=extra) as broker:
        for host, ca_file, expected in (
            ("127.0.0.1", str(authority.file), True),
            ("127.0.0.1", "", False),  # the system does not know this CA
            ("localhost", str(authority.file), False),  # the certificate is for the address only
        ):
            seen = Seen()
            transport = MqttTransport(settings(broker.port, "a", host=host, tls=tls_context(ca_file)))
            transport.start(seen)
            eventually(lambda seen=seen: seen.ends or seen.connections)
            transport.stop(2.0)
            assert bool(seen.connections) == expected
            assert expected or "certificate" in seen.ends[0].lower()
