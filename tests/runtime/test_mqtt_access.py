"""Who may do what at a broker that asks: passwords, the access list of docs/protocol.md, client certificates."""

from __future__ import annotations

import itertools
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from edge_runtime.client import Client
from edge_runtime.errors import EdgeError
from edge_runtime.supervisor.mqtt import MqttSettings, MqttTransport, Outbound, Subscription, tls_context
from edge_runtime.supervisor.transport import BrokerLimits, Inbound
from edge_runtime.topics import DeviceTopics
from support.broker import Broker
from support.certificates import Authority
from support.command import edge_runtime
from support.daemon import DaemonProcess, eventually
from support.peer import Peer

DOCUMENT = Path(__file__).parents[2] / "docs/protocol.md"
TOPICS = DeviceTopics("edge/v1", "jetson-01")
DEVICE_USER = "edge-jetson-01"
NOT_AUTHORIZED = 0x87
TENANTS: dict[str, dict[str, str]] = {"acme": {}, "globex": {}}
FORGED = b'{"object":"error","id":"r1","seq":9,"error":{"code":"internal_error","type":"x","message":"x","status":500}}'


def documented_access() -> str:
    """The access list that docs/protocol.md tells people to install."""
    blocks: list[str] = re.findall(
        r"```\n# /etc/mosquitto/edge-runtime\.acl[^\n]*\n(.*?)```", DOCUMENT.read_text(), re.S
    )
    assert len(blocks) == 1
    return blocks[0]


def words(count: int) -> str:
    return "".join(f"w{number} " for number in range(count))


@dataclass(frozen=True)
class Site:
    """A broker with users, and what a daemon needs to be one of them. A password is the user's name, reversed."""

    broker: Broker
    folder: Path

    def set_password(self, user: str, password: str) -> None:
        command = ["mosquitto_passwd", "-b", str(self.folder / "pw"), user, password]
        subprocess.run(command, check=True, capture_output=True)

    def daemon(self, *, step_ms: int = 5, password: str = DEVICE_USER[::-1]) -> DaemonProcess:
        file = self.folder / "device-password"
        file.touch(mode=0o600)
        file.write_text(password)
        mqtt = {"username": DEVICE_USER, "password_file": str(file)}
        config = {"device": {"name": TOPICS.device}, "tenants": TENANTS, "mqtt": mqtt}
        return DaemonProcess(self.folder / "d", self.broker.port, worker={"step_ms": step_ms}, config=config)

    def peer(self, tenant: str, *filters: str) -> Peer:
        return Peer(self.broker.port, *filters, tenant=tenant, username=tenant, password=tenant[::-1], topics=TOPICS)


def open_site(folder: Path, access: str) -> Site:
    (folder / "acl").write_text(access)
    (folder / "pw").touch(mode=0o600)
    extra = f"allow_anonymous false\npassword_file {folder / 'pw'}\nacl_file {folder / 'acl'}"
    site = Site(Broker("mosquitto", folder, extra=extra), folder)
    for user in (DEVICE_USER, *TENANTS):
        site.set_password(user, user[::-1])
    return site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = open_site(tmp_path, documented_access())
    with site.broker:
        yield site


class Attempts:
    """A listener that notes when attempts ended, and why."""

    def __init__(self) -> None:
        self.connected = threading.Event()
        self.times: list[float] = []
        self.reasons: list[str] = []

    def on_connected(self, limits: BrokerLimits) -> None:
        self.connected.set()

    def on_disconnected(self, reason: str) -> None:
        self.times.append(time.monotonic())
        self.reasons.append(reason)

    def on_message(self, message: Inbound) -> None: ...

    def on_published(self, token: int, code: int) -> None: ...

    def on_dropped(self, tokens: tuple[int, ...]) -> None: ...

    def on_warning(self, text: str) -> None: ...

    def on_client_id_taken(self) -> None:
        self.reasons.append("taken")


# ---- passwords


@pytest.mark.fault("B3")
def test_a_wrong_password_is_tried_again_slowly_until_it_is_right(site: Site) -> None:
    attempts = Attempts()
    transport = MqttTransport(
        MqttSettings(
            "127.0.0.1", site.broker.port, "device", (Subscription("a"),),
            username="acme", password="wrong", backoff_s=0.1, refused_s=1.0,
        )
    )  # fmt: skip
    transport.start(attempts)
    try:
        eventually(lambda: len(attempts.times) == 3)
        assert all(later - before >= 1.0 for before, later in itertools.pairwise(attempts.times))
        assert re.search(r"refuses the connection: .* \(0x8[67]\); check user name and password", attempts.reasons[0])
        assert not attempts.connected.is_set()
        site.set_password("acme", "wrong")
        site.broker.reload()
        assert attempts.connected.wait(5)
    finally:
        transport.stop(2.0)


@pytest.mark.fault("B3")
def test_a_daemon_with_a_wrong_password_says_so_in_one_line_and_lives(site: Site) -> None:
    with site.daemon(password="wrong") as daemon:
        daemon.wait_ready()
        (line,) = daemon.events("broker_away")
        assert "0x87" in line["reason"]
        assert "check user name and password" in line["reason"]
        assert "the broker is away" in daemon.events("ready")[0]["hint"]
        assert daemon.stop() == 0
        assert len(daemon.events("broker_away")) == 1
        assert "wrong" not in daemon.text()


def test_a_client_with_a_wrong_password_is_told_what_to_check(site: Site) -> None:
    with pytest.raises(EdgeError, match="check user name and password"):
        Client(port=site.broker.port, username="acme", password="wrong", connect_timeout_s=0.5).connect()


# ---- the access list


@pytest.mark.fault("B3")
def test_refused_results_are_counted_by_code_and_the_daemon_goes_on(tmp_path: Path) -> None:
    access = documented_access().replace(
        f"topic readwrite {TOPICS.root}/#",
        f"topic read {TOPICS.root}/#\ntopic write {TOPICS.status}\ntopic write {TOPICS.info}",
    )
    assert access != documented_access()
    site = open_site(tmp_path, access)
    with site.broker, site.daemon() as daemon, site.peer("acme") as peer:
        daemon.wait_ready()
        for number in range(3):
            peer.ask(f"r{number}", max_tokens=2)
        eventually(lambda: len(daemon.events("request_ended")) == 3, 5, daemon.text)
        (line,) = daemon.events("publish_refused")
        assert (line["reason"], line["topic"]) == ("0x87", peer.result)
        assert daemon.stop() == 0
        assert daemon.events("served")[0]["puback_codes"]["0x87"] == 3
        assert peer.frames() == []
        assert len(daemon.events("broker_connected")) == 1


@pytest.mark.parametrize(("mine", "foreign"), [("acme", "globex"), ("globex", "acme")])
def test_a_tenant_can_neither_ask_nor_cancel_nor_read_nor_answer_for_another(
    site: Site, mine: str, foreign: str
) -> None:
    with (
        site.daemon(step_ms=20) as daemon,
        site.peer(foreign) as victim,
        site.peer(mine, "edge/v1/#", f"{TOPICS.root}/t/{foreign}/#") as intruder,
    ):
        daemon.wait_ready()
        victim.ask("r1", stream=True, max_tokens=60)
        victim.wait_for(lambda: victim.chunks("r1"))
        forbidden = {
            TOPICS.cancel(foreign): b'{"id":"r1"}',
            TOPICS.request(foreign): b'{"id":"r2","model":"tiny","prompt":"hi"}',
            TOPICS.result(foreign, "cli1"): FORGED,
            TOPICS.result(mine, "cli1"): FORGED,  # nobody but the device answers
            TOPICS.status: b'{"state":"offline","boot_id":"x"}',
            TOPICS.info: b"{}",
            TOPICS.event: b"{}",
        }
        for topic, payload in forbidden.items():
            assert intruder.publish(Outbound(topic, payload, qos=1)) == NOT_AUTHORIZED, topic
        intruder.cancel("r1")  # its own tenant has no such request
        intruder.send(  # an answer into the results of the other: the device is allowed to write there
            {"id": "r3", "model": "tiny", "prompt": "hi"}, response_topic=victim.result
        )
        intruder.ask("mine", max_tokens=3)
        assert intruder.final("mine").choices[0].message.content == words(3)
        assert victim.final("r1").choices[0].message.content == words(60)
        assert [frame.seq for frame in victim.frames("r1")] == list(range(victim.final("r1").seq + 1))
        assert victim.frames("r3") == []
        assert {message.topic for message in intruder.messages} <= {TOPICS.status, TOPICS.info, intruder.result}
        assert {message.topic for message in victim.messages} == {TOPICS.status, victim.result}
        assert set(victim.states()) <= {"starting", "online"}
        ended = {(event["tenant"], event["req_id"]) for event in daemon.events("request_ended")}
        assert ended == {(foreign, "r1"), (mine, "mine")}


def test_a_client_that_asks_for_a_foreign_tenant_is_told_at_once(site: Site) -> None:
    with (
        site.daemon() as daemon,
        Client(
            port=site.broker.port, device=TOPICS.device, tenant="globex", username="acme", password="emca"
        ) as client,
    ):
        daemon.wait_ready()
        with pytest.raises(EdgeError, match="does not let user 'acme' ask for tenant 'globex'"):
            client.ask("hello")


# ---- certificates


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def tls_broker(authority: Authority, tmp_path: Path) -> Iterator[Broker]:
    """The certificate's common name is the user name: there are no passwords."""
    server = authority.issue("broker", address="127.0.0.1")
    (tmp_path / "acl").write_text(documented_access())
    extra = [
        "allow_anonymous false",
        f"acl_file {tmp_path / 'acl'}",
        f"cafile {authority.file}",
        f"certfile {server.file}",
        f"keyfile {server.key}",
        "tls_version tlsv1.2",
        "require_certificate true",
        "use_identity_as_username true",
    ]
    with Broker("mosquitto", tmp_path, extra="\n".join(extra)) as broker:
        yield broker


@pytest.mark.fault("B3")
@pytest.mark.parametrize("whose", ["nobody", "a stranger"])
def test_without_the_right_client_certificate_there_is_no_connection_and_ever_slower_attempts(
    tls_broker: Broker, authority: Authority, tmp_path: Path, whose: str
) -> None:
    files = ("", "")
    if whose == "a stranger":
        stranger = Authority(tmp_path / "other").issue("acme")
        files = (str(stranger.file), str(stranger.key))
    attempts = Attempts()
    transport = MqttTransport(
        MqttSettings(
            "127.0.0.1", tls_broker.port, "device", (Subscription("a"),),
            tls=tls_context(str(authority.file), *files), backoff_s=0.1,
        )
    )  # fmt: skip
    transport.start(attempts)
    try:
        eventually(lambda: len(attempts.times) == 4)
        waits = [later - before for before, later in itertools.pairwise(attempts.times)]
        assert waits[2] > 1.5 * waits[0]  # 0.1, 0.2, 0.4 s, a quarter more or less
        assert not attempts.connected.is_set()
        assert "taken" not in attempts.reasons
        assert transport.has_thread()
    finally:
        transport.stop(2.0)


@pytest.mark.fault("B3")
def test_with_certificates_device_and_tenant_are_who_they_are(
    tls_broker: Broker, authority: Authority, tmp_path: Path
) -> None:
    device, acme = authority.issue(DEVICE_USER), authority.issue("acme")
    tls = {
        "enabled": True,
        "ca_file": str(authority.file),
        "cert_file": str(device.file),
        "key_file": str(device.key),
    }
    config = {"device": {"name": TOPICS.device}, "tenants": TENANTS, "mqtt": {"tls": tls}}

    def client(tenant: str) -> Client:
        return Client(
            port=tls_broker.port,
            device=TOPICS.device,
            tenant=tenant,
            tls=True,
            ca_file=str(authority.file),
            cert_file=str(acme.file),
            key_file=str(acme.key),
        )

    with DaemonProcess(tmp_path / "d", tls_broker.port, config=config) as daemon:
        daemon.wait_ready()
        with client("acme") as mine:
            assert mine.ask("hello", max_tokens=3).text == words(3)
        files = itertools.chain.from_iterable(
            (f"--tls-{name}", str(file))
            for name, file in (("ca", authority.file), ("cert", acme.file), ("key", acme.key))
        )
        place = ("--port", str(tls_broker.port), "--device", TOPICS.device, "--tenant", "acme")
        assert edge_runtime("ask", "hello", "--max-tokens", "3", *place, *files).stdout == words(3) + "\n"
        with client("globex") as foreign, pytest.raises(EdgeError, match=r"does not let .* ask for tenant 'globex'"):
            foreign.ask("hello")
        assert len(daemon.events("request_ended")) == 2
