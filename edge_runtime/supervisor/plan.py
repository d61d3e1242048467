"""Turn the configuration into what the daemon starts with, and refuse a wrong one before anything is started."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.config import Config, DeviceConfig, MqttConfig, read_password
from edge_runtime.errors import ConfigError
from edge_runtime.manifest import Manifest, read_manifest
from edge_runtime.supervisor.mqtt import MqttSettings, tls_context
from edge_runtime.supervisor.presence import make_will
from edge_runtime.supervisor.transport import Subscription
from edge_runtime.topics import DeviceTopics
from edge_runtime.worker.frames import Init


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is fixed for one run. `boot_id` is new at every start; `model` is the name that is served."""

    config: Config
    boot_id: str
    model: str
    topics: DeviceTopics
    mqtt: MqttSettings
    init: Init
    warnings: tuple[str, ...]


def prepare(config: Config, boot_id: str) -> Plan:
    """Read the engine's manifest, the password and the certificates. Raises ConfigError and EngineRefusedError."""
    manifest = _read_engine(config)
    model = config.model.name or manifest.model.name
    topics = DeviceTopics(config.mqtt.prefix, config.device.name)
    settings = _mqtt_settings(config, topics, boot_id)
    return Plan(config, boot_id, model, topics, settings, _init(config, model), _warnings(config.mqtt, settings))


def ask_command(config: Config) -> str:
    """Return the shell command that asks this device, with the options that differ from their defaults."""
    mqtt, tenant = config.mqtt, next(iter(config.tenant_table))
    options = [
        f"--host {mqtt.host}" if mqtt.host != MqttConfig().host else "",
        f"--port {mqtt.port}" if mqtt.port != MqttConfig().port else "",
        f"--device {config.device.name}" if config.device != DeviceConfig() else "",
        f"--tenant {tenant}" if tenant != "default" else "",
        "--username USER --password-file FILE" if mqtt.username else "",
        f"--tls-ca {mqtt.tls.ca_file or 'FILE'}" if mqtt.tls.enabled else "",
    ]
    return " ".join(['edge-runtime ask "Hello"', *filter(None, options)])


def _read_engine(config: Config) -> Manifest:
    if not config.model.folder:
        raise ConfigError("model.folder is not set", remedy="name the engine folder to serve")
    return read_manifest(Path(config.model.folder), check_digests=False)  # the worker checks the digests


def _mqtt_settings(config: Config, topics: DeviceTopics, boot_id: str) -> MqttSettings:
    mqtt = config.mqtt
    return MqttSettings(
        host=mqtt.host,
        port=mqtt.port,
        client_id=mqtt.client_id or f"edge-{config.device.name}",
        subscriptions=(
            Subscription(topics.requests),
            Subscription(topics.cancels),
            Subscription(topics.status, own=True),  # our own will comes under our own name
        ),
        username=mqtt.username,
        password=read_password(mqtt),
        tls=tls_context(mqtt.tls.ca_file, mqtt.tls.cert_file, mqtt.tls.key_file) if mqtt.tls.enabled else None,
        will=make_will(topics, boot_id, mqtt.session.will_delay_s),
        backoff_s=mqtt.session.backoff_s,
        keepalive_s=mqtt.session.keepalive_s,
        expiry_s=mqtt.session.expiry_s,
        receive_maximum=mqtt.session.receive_maximum,
    )


def _init(config: Config, model: str) -> Init:
    return Init(
        model=model,
        engine=config.model.folder,
        threads=config.engine.threads,
        spinning=config.engine.spinning,
        prefill_chunk=config.scheduler.prefill_chunk,
        max_batch=config.engine.max_batch,
        heartbeat_s=config.worker.heartbeat.interval_s,
    )


def _warnings(mqtt: MqttConfig, settings: MqttSettings) -> tuple[str, ...]:
    if settings.password is None or mqtt.tls.enabled or _is_loopback(mqtt.host):
        return ()
    return (f"the password goes to {mqtt.host} in plain text; set mqtt.tls.enabled",)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
