"""The configuration: where values come from, and how faults are reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.config import Config, MqttConfig, load_config, read_password
from edge_runtime.errors import ConfigError


def written(folder: Path, text: str, name: str = "edge.toml") -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def faults(path: Path | None, **sources: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, env={}, **sources)  # type: ignore[arg-type]
    assert caught.value.exit_status == 78
    return str(caught.value).splitlines()


def test_defaults_are_a_single_tenant_on_this_machine() -> None:
    config = load_config(None, env={})
    assert config == Config()
    assert list(config.tenant_table) == ["default"]
    assert (config.mqtt.host, config.mqtt.port, config.engine.max_batch) == ("127.0.0.1", 1883, 2)


def test_later_sources_win_and_tables_merge(tmp_path: Path) -> None:
    path = written(tmp_path, 'device = { name = "a" }\n[mqtt]\nhost = "one"\nport = 1\nusername = "u"\n')
    written(tmp_path, '[mqtt]\nhost = "two"\nport = 2\n', "conf.d/10.toml")
    written(tmp_path, '[mqtt]\nhost = "three"\n', "conf.d/20.toml")
    env = {"EDGE_MQTT__PORT": "4", "EDGE_DEVICE__NAME": "b", "EDGE_MQTT_PASSWORD": "secret", "OTHER__X": "1"}
    config = load_config(path, env=env, overrides={"device": {"name": "c"}})
    assert (config.mqtt.host, config.mqtt.port, config.mqtt.username) == ("three", 4, "u")
    assert config.device.name == "c"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[mqtt]\nprot = 1\n", ["[mqtt]", "prot"]),
        ("[nonsense]\nx = 1\n", ["'nonsense'", "known: "]),
        ("[mqtt]\nport = 70000\n", ["[mqtt]", "65535", "got 70000"]),
        ("[mqtt.session]\nkeepalive_s = 'x'\n", ["[mqtt]", "session.keepalive_s", "got 'x'"]),
        ("[worker.heartbeat]\nmisses = 0\n", ["[worker]", "heartbeat.misses", "got 0"]),
        ("schema = 2\n", ["[schema]", "2"]),
        ("[limits.timeout_ms]\ndefault = 5000\nmax = 4000\n", ["timeout_ms.default"]),
        ("[tenants.Acme]\n", ["Acme"]),
        ("x = \n", ["not valid TOML"]),
    ],
)
def test_a_fault_names_file_key_and_value(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = written(tmp_path, text)
    (line,) = faults(path)
    assert str(path) in line
    for part in expected:
        assert part in line


def test_one_run_reports_a_fault_of_each_section(tmp_path: Path) -> None:
    path = written(tmp_path, "[mqtt]\nport = 0\n[engine]\nmax_batch = 3\n[extra]\n")
    assert len(faults(path)) == 3


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    (line,) = faults(tmp_path / "none.toml")
    assert "none.toml" in line


def test_the_password_comes_from_credential_then_file_then_environment(tmp_path: Path) -> None:
    credential = written(tmp_path, "one\n", "credentials/mqtt-password")
    file = written(tmp_path, "two\n", "pw")
    file.chmod(0o600)
    config, env = MqttConfig(password_file=str(file)), {"EDGE_MQTT_PASSWORD": "three"}
    assert read_password(config, env={**env, "CREDENTIALS_DIRECTORY": str(credential.parent)}) == "one"
    assert read_password(config, env={**env, "CREDENTIALS_DIRECTORY": str(tmp_path)}) == "two"
    assert read_password(MqttConfig(), env=env) == "three"
    assert read_password(MqttConfig(), env={}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_password_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = written(tmp_path, "two\n", "pw")
    file.chmod(mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_password(MqttConfig(password_file=str(file)), env={})


def test_a_missing_password_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_password(MqttConfig(password_file=str(tmp_path / "pw")), env={})
