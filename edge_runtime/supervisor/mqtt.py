"""Keep one MQTT 5 connection over paho: the only file that imports it.

paho's traps and the rules that avoid them: every callback may throw without ending the network thread; nothing waits in
a callback; nothing is published again on a return code; QoS 1 messages that paho still holds are sent again by paho.
`on_published` is called while paho holds a lock that `publish` also takes, so a listener must not take an own lock
there that it holds while publishing.
"""

from __future__ import annotations

import ssl
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from socket import IPPROTO_TCP, TCP_NODELAY
from typing import Any

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client, ConnectFlags, DisconnectFlags, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from edge_runtime.errors import ConfigError
from edge_runtime.supervisor.reconnect import LONGEST_S, REFUSED, ReconnectRule
from edge_runtime.supervisor.traffic import Traffic
from edge_runtime.supervisor.transport import BrokerLimits, Inbound, Listener, Outbound, Subscription, Transport, Will

__all__ = [
    "BrokerLimits",
    "Inbound",
    "Listener",
    "MqttSettings",
    "MqttTransport",
    "Outbound",
    "Subscription",
    "Transport",
    "Will",
    "tls_context",
]

OUR_PACKET_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0
MAX_INSIDE = 32  # frames inside paho, whose own queues have no bound
TOO_LARGE_LIMIT = 3
PROTOCOL_ERROR = 0x82


@dataclass(frozen=True, slots=True)
class MqttSettings:
    """Where to connect, as whom, and what to listen to.

    `backoff_s` is the first wait after a failure, `refused_s` the wait after a refusal of user name or password, which
    only a person can change.
    """

    host: str
    port: int
    client_id: str
    subscriptions: tuple[Subscription, ...]
    username: str = ""
    password: str | None = None
    tls: ssl.SSLContext | None = None
    will: Will | None = None
    keepalive_s: int = 20
    expiry_s: int = 600
    receive_maximum: int = 64
    backoff_s: float = 1.0
    refused_s: float = LONGEST_S


def tls_context(ca_file: str = "", cert_file: str = "", key_file: str = "") -> ssl.SSLContext:
    """Return a context that verifies CA and host name. Raises ConfigError naming the file that can't be used."""
    for name, file in (("ca_file", ca_file), ("cert_file", cert_file), ("key_file", key_file)):
        if file and not Path(file).is_file():
            raise ConfigError(f"mqtt.tls.{name} {file}: no such file")
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
        if cert_file:
            context.load_cert_chain(cert_file, key_file or None)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"mqtt.tls {ca_file} {cert_file} {key_file}: not usable: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


class MqttTransport:
    """A `Transport` over paho. Raises ConfigError for a host name that can't exist."""

    def __init__(
        self,
        settings: MqttSettings,
        *,
        rng: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._place = f"{settings.host}:{settings.port}"
        self._rule = ReconnectRule(rng or Random(), settings.backoff_s, settings.refused_s)
        self._listener: Listener | None = None
        self._limits = BrokerLimits()
        self._learned_bytes = BrokerLimits().packet_bytes  # a limit that the broker keeps without naming it
        self._is_connected = False
        self._refusal: ReasonCode | None = None
        self._thread: threading.Thread | None = None
        self._traffic = Traffic(clock, self._report)
        self._client = self._make_client()

    @property
    def is_connected(self) -> bool:
        """Whether the broker has accepted the connection and every subscription."""
        return self._is_connected

    @property
    def limits(self) -> BrokerLimits:
        """The limits of the latest connection."""
        return self._limits

    def start(self, listener: Listener) -> None:
        """Begin to connect, in the background and for ever."""
        self._listener = listener
        self._traffic.heard_at = self._clock()
        self._client.connect_async(
            self._settings.host,
            self._settings.port,
            _ping_after_s(self._settings.keepalive_s),
            clean_start=False,  # mosquitto keeps no session over its restart that began with a clean start
            properties=_connect_properties(self._settings),
        )
        self._client.loop_start()

    def publish(self, message: Outbound) -> int | None:
        """Hand over one message and return its token; None when it is gone: not connected, or larger than allowed."""
        if message.wire_bytes > self._limits.packet_bytes:
            self._report(
                f"{message.topic}: message of {message.wire_bytes} bytes not sent, "
                f"the broker takes {self._limits.packet_bytes}"
            )
            return None
        if not self._is_connected:
            return None
        info = self._client.publish(
            message.topic, message.payload, message.qos, message.retain, properties=_publish_properties(message)
        )
        # Not connected any more: paho sends a QoS 1 message later, a QoS 0 message is gone.
        is_kept = info.rc == MQTT_ERR_SUCCESS or (message.qos > 0 and info.rc == MQTTErrorCode.MQTT_ERR_NO_CONN)
        return info.mid if is_kept else None

    def is_alive(self, now: float) -> bool:
        """Whether the network thread lives and, when connected, has heard the broker within 1.5 keepalives."""
        if self._thread is None:
            return now - self._traffic.heard_at < 2 * CONNECT_TIMEOUT_S
        silent = self._is_connected and now - self._traffic.heard_at > 1.5 * self._settings.keepalive_s
        return self._thread.is_alive() and not silent

    def has_thread(self) -> bool:
        """Whether the network thread has not ended by itself: without it nothing will ever be sent or received."""
        return self._thread is None or self._thread.is_alive()

    def stop(self, timeout_s: float) -> None:
        """Disconnect normally, so that the will is not published, and wait for the network thread to end."""
        self._is_connected = False
        self._client.disconnect()
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._client.drop_out_messages()  # a stopped network loop goes on while messages are left
        threading.Thread(target=self._end_loop, name="mqtt-end", daemon=True).start()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _end_loop(self) -> None:
        try:
            self._client.loop_stop()
        except AttributeError:  # paho forgets its thread when that ends meanwhile
            return

    def _make_client(self) -> Client:
        settings = self._settings
        try:
            settings.host.encode("idna")  # a bad name would end the network thread with a UnicodeError
        except UnicodeError as error:
            raise ConfigError(f"mqtt.host {settings.host!r}: not a host name") from error
        client = Client(
            CallbackAPIVersion.VERSION2, settings.client_id, protocol=MQTTProtocolVersion.MQTTv5, manual_ack=True
        )
        client.suppress_exceptions = True
        client.connect_timeout = CONNECT_TIMEOUT_S
        client.max_inflight_messages_set(MAX_INSIDE)
        client.enable_logger(self._traffic)
        if settings.username:
            client.username_pw_set(settings.username, settings.password)
        if settings.tls is not None:
            client.tls_set_context(settings.tls)
        if settings.will is not None:
            properties = _properties(PacketTypes.WILLMESSAGE)
            properties.WillDelayInterval = settings.will.delay_s
            client.will_set(settings.will.topic, settings.will.payload, qos=1, retain=True, properties=properties)
        client.on_pre_connect = self._on_pre_connect
        client.on_socket_open = _set_no_delay
        client.on_connect = self._on_connect
        client.on_connect_fail = self._on_connect_fail
        client.on_disconnect = self._on_disconnect
        client.on_subscribe = self._on_subscribe
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        return client

    # ---- callbacks of paho, on its network thread

    def _on_pre_connect(self, client: Client, userdata: Any) -> None:
        self._thread = threading.current_thread()

    def _on_connect_fail(self, client: Client, userdata: Any) -> None:
        error = sys.exc_info()[1]  # paho calls this while it handles the error, and passes nothing
        self._wait_before_next(self._rule.unreachable())
        self._notify_end(_why_unreachable(self._place, error))

    def _on_connect(
        self, client: Client, userdata: Any, flags: ConnectFlags, code: ReasonCode, properties: Properties | None
    ) -> None:
        if code.is_failure:
            self._refusal = code
            self._wait_before_next(self._rule.refused(code.value))
            hint = "; check user name and password" if code.value in REFUSED else ""
            self._notify_end(f"the broker at {self._place} refuses the connection: {code} (0x{code.value:02x}){hint}")
            return
        self._rule.connected(self._clock())
        self._limits = BrokerLimits(
            receive_maximum=getattr(properties, "ReceiveMaximum", BrokerLimits().receive_maximum),
            packet_bytes=min(
                self._learned_bytes, getattr(properties, "MaximumPacketSize", BrokerLimits().packet_bytes)
            ),
        )
        if not self._settings.subscriptions:
            self._note_connected()
            return
        client.subscribe([(s.topic, _subscribe_options(s)) for s in self._settings.subscriptions])

    def _on_subscribe(
        self, client: Client, userdata: Any, mid: int, codes: list[ReasonCode], properties: Properties | None
    ) -> None:
        refused = [s.topic for s, code in zip(self._settings.subscriptions, codes, strict=False) if code.is_failure]
        if refused or len(codes) != len(self._settings.subscriptions):
            self._report(f"broker refuses the subscription to {', '.join(refused)}: {[str(c) for c in codes]}")
            return
        self._note_connected()

    def _note_connected(self) -> None:
        self._is_connected = True
        if self._listener:
            self._listener.on_connected(self._limits)

    def _on_disconnect(
        self,
        client: Client,
        userdata: Any,
        flags: DisconnectFlags,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        self._is_connected = False
        if self._refusal is not None:  # the refusal has been reported and has set its own wait
            self._refusal = None
            return
        now = self._clock()
        is_known = flags.is_disconnect_packet_from_server or reason.value == PROTOCOL_ERROR
        code = reason.value if is_known else None
        self._wait_before_next(self._rule.ended(now, code))
        if self._rule.too_large >= TOO_LARGE_LIMIT:
            self._give_up_messages()
        self._notify_end(f"connection to the broker at {self._place} ended: {reason}")
        if self._rule.is_client_id_taken(now, code) and self._listener:
            client.disconnect()
            self._listener.on_client_id_taken()

    def _give_up_messages(self) -> None:
        """Take back what paho would send again and again, and send nothing of that size any more."""
        self._rule.too_large = 0
        messages = self._client.drop_out_messages()
        if not messages:
            return
        self._learned_bytes = min(self._learned_bytes, max(len(message.payload) for message in messages) // 2)
        if self._listener:
            self._listener.on_dropped(tuple(message.mid for message in messages))

    def _on_message(self, client: Client, userdata: Any, message: MQTTMessage) -> None:
        try:
            if self._listener:
                self._listener.on_message(_inbound(message))
        finally:
            if message.qos:
                client.ack(message.mid, message.qos)

    def _on_publish(
        self, client: Client, userdata: Any, mid: int, code: ReasonCode, properties: Properties | None
    ) -> None:
        if self._listener:
            self._listener.on_published(mid, code.value)

    def _wait_before_next(self, seconds: float) -> None:
        self._client.reconnect_delay_set(seconds, seconds)  # type: ignore[arg-type]  # it is only added to a time

    def _notify_end(self, reason: str) -> None:
        self._is_connected = False
        if self._listener:
            self._listener.on_disconnected(reason)

    def _report(self, text: str) -> None:
        if self._listener:
            self._listener.on_warning(text)


def _why_unreachable(place: str, error: BaseException | None) -> str:
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection to the broker at {place}: {error}"
    why = error.strerror or error if isinstance(error, OSError) else error
    return f"no connection to the broker at {place}: {why}; start a broker there, or name another host and port"


def _inbound(message: MQTTMessage) -> Inbound:
    properties = message.properties
    return Inbound(
        topic=message.topic,
        payload=bytes(message.payload),
        qos=message.qos,
        retain=bool(message.retain),
        response_topic=getattr(properties, "ResponseTopic", None),
        correlation=getattr(properties, "CorrelationData", None),
        content_type=getattr(properties, "ContentType", None),
        expiry_s=getattr(properties, "MessageExpiryInterval", None),
        user_properties=tuple(getattr(properties, "UserProperty", ())),
    )


def _publish_properties(message: Outbound) -> Properties:
    properties = _properties(PacketTypes.PUBLISH)
    properties.ContentType = "application/json"
    properties.PayloadFormatIndicator = 1
    if message.response_topic is not None:
        properties.ResponseTopic = message.response_topic
    if message.correlation is not None:
        properties.CorrelationData = message.correlation
    if message.expiry_s is not None:
        properties.MessageExpiryInterval = message.expiry_s
    for pair in message.user_properties:
        properties.UserProperty = pair  # paho appends
    return properties


def _ping_after_s(keepalive_s: int) -> int:
    """Return paho's keepalive: it pings after one and gives up after another, looking about once a second.

    So a half-open connection is noticed within 1.5 of ours (of at least 4 s).
    """
    return max(1, keepalive_s * 3 // 4 - 1)


def _connect_properties(settings: MqttSettings) -> Properties:
    properties = _properties(PacketTypes.CONNECT)
    properties.SessionExpiryInterval = settings.expiry_s
    properties.ReceiveMaximum = settings.receive_maximum
    properties.MaximumPacketSize = OUR_PACKET_BYTES
    return properties


def _properties(packet: int) -> Properties:
    return Properties(packet)  # type: ignore[no-untyped-call]  # paho left it unannotated


def _subscribe_options(subscription: Subscription) -> SubscribeOptions:
    return SubscribeOptions(
        qos=1,
        noLocal=not subscription.own,
        retainAsPublished=True,
        retainHandling=SubscribeOptions.RETAIN_SEND_ON_SUBSCRIBE
        if subscription.retained
        else SubscribeOptions.RETAIN_DO_NOT_SEND,
    )


def _set_no_delay(client: Client, userdata: Any, sock: Any) -> None:
    """Send each packet at once: small ones would wait for the acknowledgement of the one before."""
    sock.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
