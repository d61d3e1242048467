"""What the daemon starts with, and how its log looks."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import msgspec
import pytest

from edge_runtime.config import Config, DeviceConfig, LogConfig, ModelConfig, MqttConfig, TenantConfig, TlsConfig
from edge_runtime.errors import ConfigError, EngineRefusedError
from edge_runtime.manifest import write_manifest
from edge_runtime.supervisor.logs import make_logger
from edge_runtime.supervisor.plan import ask_command, prepare
from support.daemon import make_manifest


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    write_manifest(tmp_path, make_manifest())
    return tmp_path


def password_file(folder: Path) -> str:
    file = folder / "pw"
    file.write_text("secret")
    file.chmod(0o600)
    return str(file)


def test_names_come_from_the_configuration_or_the_engine(engine: Path) -> None:
    plan = prepare(Config(model=ModelConfig(folder=str(engine))), "b1")
    assert (plan.model, plan.init.model, plan.mqtt.client_id) == ("tiny", "tiny", "edge-local")
    assert plan.mqtt.will is not None
    assert json.loads(plan.mqtt.will.payload) == {"state": "offline", "boot_id": "b1", "reason": "lost"}
    named = Config(
        model=ModelConfig(folder=str(engine), name="other"),
        device=DeviceConfig(name="jetson-01"),
        mqtt=MqttConfig(client_id="mine"),
    )
    plan = prepare(named, "b2")
    assert (plan.model, plan.mqtt.client_id, plan.topics.root) == ("other", "mine", "edge/v1/d/jetson-01")


def test_a_missing_engine_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.folder is not set"):
        prepare(Config(), "b")
    with pytest.raises(EngineRefusedError, match="edge-runtime build"):
        prepare(Config(model=ModelConfig(folder=str(tmp_path / "none"))), "b")


@pytest.mark.parametrize(
    ("host", "tls", "warns"),
    [
        ("127.0.0.1", False, False),
        ("localhost", False, False),
        ("::1", False, False),
        ("10.0.0.2", False, True),
        ("broker.example", False, True),
        ("broker.example", True, False),
    ],
)
def test_a_password_in_plain_text_to_another_machine_is_warned_about(
    engine: Path, host: str, tls: bool, warns: bool
) -> None:
    mqtt = MqttConfig(host=host, username="u", password_file=password_file(engine), tls=TlsConfig(enabled=tls))
    plan = prepare(Config(model=ModelConfig(folder=str(engine)), mqtt=mqtt), "b")
    assert bool(plan.warnings) == warns
    assert plan.mqtt.password == "secret"
    assert "secret" not in "".join(plan.warnings)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (Config(), ""),
        (Config(device=DeviceConfig(name="kiosk"), mqtt=MqttConfig(port=1884)), " --port 1884 --device kiosk"),
        (
            Config(mqtt=MqttConfig(host="b.example"), tenants={"acme": TenantConfig()}),
            " --host b.example --tenant acme",
        ),
        (
            Config(mqtt=MqttConfig(username="edge-x", tls=TlsConfig(enabled=True, ca_file="/etc/ca.pem"))),
            " --username USER --password-file FILE --tls-ca /etc/ca.pem",
        ),
    ],
)
def test_the_command_that_asks_this_device_names_what_differs_from_its_defaults(config: Config, options: str) -> None:
    assert ask_command(config) == 'edge-runtime ask "Hello"' + options


def test_the_log_is_json_for_machines_with_priorities_for_the_journal() -> None:
    stream = io.StringIO()
    log = make_logger(LogConfig(), environment={"JOURNAL_STREAM": "8:1"}, stream=stream)
    log.info("started", port=1883)
    log.error("broken")
    first, second = stream.getvalue().splitlines()
    assert first.startswith("<6>{")
    assert second.startswith("<3>{")
    body = msgspec.json.decode(first[3:])
    assert (body["event"], body["level"], body["port"]) == ("started", "info", 1883)


def test_the_log_can_be_text_and_has_a_least_level() -> None:
    stream = io.StringIO()
    log = make_logger(LogConfig(format="text", level="warning"), environment={}, stream=stream)
    log.info("quiet")
    log.warning("loud", reason="x")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()


def test_a_text_line_is_for_a_person() -> None:
    stream = io.StringIO()
    log = make_logger(LogConfig(format="text"), environment={}, stream=stream).bind(boot_id="b1")
    log.info("state", state="ready", reason="")
    log.warning("broker_away", reason="no broker at 127.0.0.1:1883: Connection refused")
    log.info("ready", hint='ask with edge-runtime ask "Hello"')
    log.info("worker_ready", start_seconds={"read": 0.14115, "load": 2.0})
    log.info("signal")
    lines = stream.getvalue().splitlines()
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d .*", line) for line in lines)
    assert [line[9:] for line in lines] == [
        "state: ready",
        "WARNING broker away: reason=no broker at 127.0.0.1:1883: Connection refused",
        'ready: ask with edge-runtime ask "Hello"',
        "worker ready: start_seconds={read 0.141, load 2}",
        "signal",
    ]


def test_a_text_line_of_an_exception_has_its_trace_below() -> None:
    stream = io.StringIO()
    log = make_logger(LogConfig(format="text"), environment={}, stream=stream)
    try:
        raise ValueError("surprise")
    except ValueError:
        log.exception("internal_error")
    first, *rest = stream.getvalue().splitlines()
    assert first[9:] == "ERROR internal error"
    assert rest[-1] == "ValueError: surprise"


def test_a_repeated_warning_is_shown_once_and_others_are_not_held_back() -> None:
    stream = io.StringIO()
    log = make_logger(LogConfig(), environment={}, stream=stream)
    for _ in range(100):
        log.warning("again", reason="x")
    log.warning("again", reason="y")
    log.info("again", reason="x")
    assert len(stream.getvalue().splitlines()) == 3
