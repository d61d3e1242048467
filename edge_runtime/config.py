"""Read the daemon's configuration once: defaults, TOML file, conf.d, environment, command line, in that order.

Tables merge by key, lists replace. An unknown key or a value out of range is a ConfigError naming file, key and value.
Everything below is honoured by the daemon; a key that does nothing does not exist.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from edge_runtime.errors import ConfigError
from edge_runtime.messages import DEVICE, TENANT, ServiceClass

if sys.version_info >= (3, 11):
    import tomllib
else:  # Python 3.10 of JetPack 6.2
    import tomli as tomllib

ENV_PREFIX = "EDGE_"
PASSWORD_ENV = "EDGE_MQTT_PASSWORD"
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class DeviceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Who this device is."""

    name: Annotated[str, Meta(pattern=DEVICE)] = "local"


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Which engine is served and under which name; an empty name means the engine's own."""

    folder: str = ""
    name: Annotated[str, Meta(max_length=128)] = ""


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine runs. `threads` 0 = physical cores; `spinning` unset = the backend's default."""

    max_batch: Annotated[int, Meta(ge=1, le=2)] = 2
    threads: Annotated[int, Meta(ge=0, le=256)] = 0
    spinning: bool | None = None


class SchedulerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How steps are cut."""

    prefill_chunk: Annotated[int, Meta(ge=1, le=4096)] = 64


class StreamConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Defaults of streaming, and what happens when nobody listens any more."""

    chunk_tokens: Annotated[int, Meta(ge=1, le=64)] = 8
    chunk_ms: Annotated[int, Meta(ge=0, le=1000)] = 50
    on_no_subscriber: Literal["cancel", "finish"] = "cancel"


class DaemonConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Stopping: how long running requests may go on, and how long the last frames may take to leave."""

    drain_s: Seconds = 30.0
    flush_s: Seconds = 5.0


class LogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`auto` writes JSON unless stderr is a terminal."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"


class TlsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """TLS to the broker: CA and host name are always verified. Empty `ca_file` = the system's CAs."""

    enabled: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


class SessionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The MQTT session. `backoff_s` is the first wait before a reconnect; it doubles up to a minute."""

    keepalive_s: Annotated[int, Meta(ge=2, le=3600)] = 20
    expiry_s: Annotated[int, Meta(ge=0, le=86_400)] = 600
    receive_maximum: Annotated[int, Meta(ge=1, le=65_535)] = 64
    will_delay_s: Annotated[int, Meta(ge=0, le=3600)] = 4
    backoff_s: Annotated[float, Meta(ge=0.1, le=60)] = 1.0


class OutboxConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of what waits for the broker, in frames."""

    terminals: Count = 256
    chunks: Count = 1024
    chunks_per_request: Count = 64


class MqttConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The broker and how to reach it. The password comes from a credential, a file or the environment."""

    host: Annotated[str, Meta(min_length=1, max_length=255)] = "127.0.0.1"
    port: Annotated[int, Meta(ge=1, le=65_535)] = 1883
    prefix: Annotated[str, Meta(pattern=r"^[^+#\s]{1,64}\Z")] = "edge/v1"
    client_id: Annotated[str, Meta(max_length=128)] = ""  # empty: edge-{device}
    username: Annotated[str, Meta(max_length=128)] = ""
    password_file: str = ""
    tls: TlsConfig = TlsConfig()
    session: SessionConfig = SessionConfig()
    outbox: OutboxConfig = OutboxConfig()


class ByteLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Largest request and largest answer, in bytes."""

    payload: Annotated[int, Meta(ge=256, le=1 << 20)] = 262_144
    response: Annotated[int, Meta(ge=256, le=1 << 20)] = 262_144


class TimeoutLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """Deadline of a request in milliseconds: when it names none, and at most."""

    default: Annotated[int, Meta(ge=1, le=600_000)] = 60_000
    max: Annotated[int, Meta(ge=1, le=600_000)] = 600_000


class ReplayLimits(Struct, frozen=True, forbid_unknown_fields=True):
    """How many finished answers are kept for repeated requests, and how long after their deadline."""

    entries: Count = 1024
    bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 16 << 20
    grace_s: Seconds = 60.0


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What a client may ask for."""

    bytes: ByteLimits = ByteLimits()
    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 256
    queue: Count = 64
    timeout_ms: TimeoutLimits = TimeoutLimits()
    replay: ReplayLimits = ReplayLimits()


class HeartbeatConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When the worker counts as hung."""

    interval_s: Seconds = 1.0
    misses: Annotated[int, Meta(ge=1, le=100)] = 3
    hang_floor_s: Seconds = 5.0
    hang_factor: Annotated[float, Meta(ge=1, le=1000)] = 20.0
    abort_grace_s: Seconds = 2.0


class RestartConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a dead worker comes back: backoff 1, 2, 4 .. `backoff_max_s`; above `limit` in `window_s` it has failed."""

    backoff_max_s: Seconds = 60.0
    healthy_s: Seconds = 600.0
    limit: Count = 5
    window_s: Seconds = 300.0
    give_up_s: Seconds = 1800.0


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Watching the worker process."""

    load_s: Seconds = 300.0
    heartbeat: HeartbeatConfig = HeartbeatConfig()
    restart: RestartConfig = RestartConfig()


class TenantConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What one tenant may do; quotas come with the tenants milestone."""

    classes: tuple[ServiceClass, ...] = ("realtime", "standard", "background")


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration. `tenants` empty means the single tenant `default`."""

    schema: Literal[1] = 1
    device: DeviceConfig = DeviceConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    stream: StreamConfig = StreamConfig()
    daemon: DaemonConfig = DaemonConfig()
    log: LogConfig = LogConfig()
    mqtt: MqttConfig = MqttConfig()
    limits: LimitsConfig = LimitsConfig()
    worker: WorkerConfig = WorkerConfig()
    tenants: dict[str, TenantConfig] = {}

    @property
    def tenant_table(self) -> dict[str, TenantConfig]:
        """The tenants that are served."""
        return self.tenants or {"default": TenantConfig()}


def load_config(
    path: Path | None, *, env: Mapping[str, str] | None = None, overrides: Mapping[str, Any] | None = None
) -> Config:
    """Read and check the configuration.

    `path` may be None (defaults); `conf.d/*.toml` beside it is read by name. `env` holds variables such as
    `EDGE_MQTT__HOST`; `overrides` is a nested mapping from the command line. Raises ConfigError listing every fault
    found, one per line.
    """
    merged: dict[str, Any] = {}
    origin: list[str] = []
    if path is not None:
        files = [path, *sorted((path.parent / "conf.d").glob("*.toml"))]
        for file in files:
            _merge(merged, _read_toml(file))
            origin.append(str(file))
    _merge(merged, _from_env(env if env is not None else os.environ))
    _merge(merged, overrides or {})
    return _check(merged, ", ".join(origin) or "configuration")


def read_password(config: MqttConfig, *, env: Mapping[str, str] | None = None) -> str | None:
    """Find the broker password: systemd credential `mqtt-password`, else `password_file`, else the environment.

    Raises ConfigError when the file is missing, or readable by group or others.
    """
    env = os.environ if env is None else env
    if (credentials := env.get("CREDENTIALS_DIRECTORY")) and (file := Path(credentials) / "mqtt-password").is_file():
        return file.read_text().strip()
    if config.password_file:
        file = Path(config.password_file)
        try:
            mode = file.stat().st_mode
            if mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ConfigError(
                    f"{file}: mode {stat.S_IMODE(mode):o} lets others read the password",
                    remedy=f"run: chmod 600 {file}",
                )
            return file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"mqtt.password_file {file}: {error.strerror}") from error
    return env.get(PASSWORD_ENV)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        return table
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _merge(into: dict[str, Any], new: Mapping[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = dict(value) if isinstance(value, Mapping) else value


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    """Turn `EDGE_MQTT__PORT=1884` into {"mqtt": {"port": 1884}}; a variable without `__` is not ours."""
    found: dict[str, Any] = {}
    for name, text in env.items():
        keys = name[len(ENV_PREFIX) :].lower().split("__")
        if not name.startswith(ENV_PREFIX) or len(keys) < 2:
            continue
        try:
            value: Any = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            value = text
        table = found
        for key in keys[:-1]:
            table = table.setdefault(key, {})
        table[keys[-1]] = value
    return found


def _check(merged: dict[str, Any], origin: str) -> Config:
    """Decode section by section, so that one run reports a fault of each."""
    faults: list[str] = []
    hints = {field.encode_name: field for field in msgspec.structs.fields(Config)}
    sections: dict[str, Any] = {}
    for name, value in merged.items():
        if name not in hints:
            faults.append(f"{origin}: unknown key {name!r}, known: {', '.join(sorted(hints))}")
            continue
        if name == "tenants" and isinstance(value, Mapping):
            faults += [f"{origin}: tenant name {t!r} must match {TENANT}" for t in value if not re.search(TENANT, t)]
        try:
            sections[name] = msgspec.convert(value, hints[name].type)
        except msgspec.ValidationError as error:
            faults.append(f"{origin}: [{name}] {error}{_shown(value, str(error))}")
    if faults:
        raise ConfigError("\n".join(faults))
    config = Config(**sections)
    if config.limits.timeout_ms.default > config.limits.timeout_ms.max:
        raise ConfigError(f"{origin}: [limits] timeout_ms.default is above timeout_ms.max")
    return config


def _shown(section: Any, text: str) -> str:
    """Quote the value that msgspec's message points at ("... - at `$.port`")."""
    match = re.search(r"at `\$\.([\w.]+)`", text)
    value = section
    for key in match.group(1).split(".") if match else ():
        value = value.get(key) if isinstance(value, Mapping) else None
    return f", got {value!r}" if match else ""
