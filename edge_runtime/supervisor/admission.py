"""Judge one message by itself: may it be looked at, where does its answer go, what does it ask for?

No state: duplicates, queues and quotas are the gateway's. The order of the checks is part of the interface.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.config import Config
from edge_runtime.errors import RequestError
from edge_runtime.messages import Request, parse_cancel, parse_request, readable_id, readable_reply_to
from edge_runtime.supervisor.requests import Route
from edge_runtime.supervisor.transport import Inbound
from edge_runtime.topics import NO_CLIENT, DeviceTopics

MAX_CORRELATION_BYTES = 64
MAX_USER_PROPERTIES = 16
MAX_USER_PROPERTY_BYTES = 2048
CONTENT_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class Ignored:
    """Nothing is answered: an answer would be wrong or would be the attack."""

    reason: str
    tenant: str = "other"


@dataclass(frozen=True, slots=True)
class Refused:
    """An error is answered; `id` is None when it could not be read."""

    id: str | None
    route: Route
    error: RequestError


@dataclass(frozen=True, slots=True)
class Offer:
    """A well-formed request; `timeout_s` from its receipt to its deadline."""

    tenant: str
    request: Request
    route: Route
    timeout_s: float


@dataclass(frozen=True, slots=True)
class CancelOffer:
    """A well-formed cancel."""

    tenant: str
    id: str


def examine(
    message: Inbound, config: Config, topics: DeviceTopics, model: str
) -> Offer | CancelOffer | Refused | Ignored:
    """Check one message of a request or cancel topic. Never raises for anything a client can send."""
    found = _sender(message, config, topics)
    if isinstance(found, Ignored):
        return found
    try:
        _check_envelope(message, config)
        if found.verb == "cancel":
            return CancelOffer(found.tenant, parse_cancel(message.payload).id)
        request = parse_request(message.payload)
        _check_meaning(request, config, model)
    except RequestError as error:
        return _refused(message, config, topics, found, error)
    return Offer(
        found.tenant,
        request,
        _answered_to(found.route, message, topics, found.tenant, request.reply_to),
        _timeout_s(request, message.expiry_s, config),
    )


def refuse_unseen(message: Inbound, config: Config, topics: DeviceTopics, error: RequestError) -> Refused | Ignored:
    """Refuse a message whatever it holds, if its sender may be answered at all."""
    found = _sender(message, config, topics)
    return found if isinstance(found, Ignored) else _refused(message, config, topics, found, error)


@dataclass(frozen=True, slots=True)
class _Sender:
    tenant: str
    verb: str
    route: Route


def _sender(message: Inbound, config: Config, topics: DeviceTopics) -> _Sender | Ignored:
    """Find out who sent this and where an answer may go, from flag, topic and properties only."""
    if message.retain:  # it would run again at every subscription
        return Ignored("retained")
    tenant, verb = topics.tenant_of(message.topic) or ("", "")
    if tenant not in config.tenant_table:
        return Ignored("unknown_tenant" if tenant else "topic")
    route = _route(message, topics, tenant)
    return Ignored("response_topic", tenant) if route is None else _Sender(tenant, verb, route)


def _refused(message: Inbound, config: Config, topics: DeviceTopics, sender: _Sender, error: RequestError) -> Refused:
    is_readable = len(message.payload) <= config.limits.bytes.payload
    request_id = readable_id(message.payload) if is_readable else None
    client = readable_reply_to(message.payload) if is_readable else None
    return Refused(request_id, _answered_to(sender.route, message, topics, sender.tenant, client), error)


def _route(message: Inbound, topics: DeviceTopics, tenant: str) -> Route | None:
    """Take the response topic only inside the tenant's results: the daemon may write to those of every tenant."""
    if message.response_topic is not None and not topics.is_result_of(message.response_topic, tenant):
        return None
    fits = message.correlation is None or len(message.correlation) <= MAX_CORRELATION_BYTES
    return Route(
        topic=message.response_topic or topics.result(tenant, NO_CLIENT),
        correlation=message.correlation if fits else None,
        traceparent=next((v for k, v in message.user_properties if k == "traceparent" and len(v) <= 64), None),
    )


def _answered_to(route: Route, message: Inbound, topics: DeviceTopics, tenant: str, client: str | None) -> Route:
    """Use the body's `reply_to` where there is no Response Topic (MQTT 3.1.1 has none)."""
    if message.response_topic is not None or client is None:
        return route
    return Route(topics.result(tenant, client), route.correlation, route.traceparent)


def _check_envelope(message: Inbound, config: Config) -> None:
    """Check size and properties, before anything is parsed. Raises RequestError."""
    if len(message.payload) > config.limits.bytes.payload:
        raise RequestError(
            "payload_too_large", f"payload of {len(message.payload)} bytes, at most {config.limits.bytes.payload}"
        )
    media_type = (message.content_type or CONTENT_TYPE).partition(";")[0].strip().lower()
    if media_type != CONTENT_TYPE:
        raise RequestError("unsupported_media_type", f"content type {media_type[:64]!r}, expected {CONTENT_TYPE}")
    if message.correlation is not None and len(message.correlation) > MAX_CORRELATION_BYTES:
        raise RequestError(
            "invalid_request",
            f"correlation data of {len(message.correlation)} bytes, at most {MAX_CORRELATION_BYTES}",
        )
    size = sum(len(key.encode()) + len(value.encode()) for key, value in message.user_properties)
    if len(message.user_properties) > MAX_USER_PROPERTIES or size > MAX_USER_PROPERTY_BYTES:
        raise RequestError(
            "invalid_request",
            f"{len(message.user_properties)} user properties of {size} bytes, "
            f"at most {MAX_USER_PROPERTIES} of {MAX_USER_PROPERTY_BYTES}",
        )


def _check_meaning(request: Request, config: Config, model: str) -> None:
    """Check what the Structs can't. Raises RequestError."""
    if request.model != model:
        raise RequestError("model_not_found", f"model {request.model!r} is not served; {model!r} is", param="$.model")
    if request.inputs is not None:
        raise RequestError(
            "invalid_request", "this model generates text: give messages or prompt, not inputs", param="$.inputs"
        )
    if request.max_tokens > config.limits.max_tokens:
        raise RequestError(
            "invalid_request",
            f"max_tokens {request.max_tokens} is above this device's limit of {config.limits.max_tokens}",
            param="$.max_tokens",
        )


def _timeout_s(request: Request, expiry_s: int | None, config: Config) -> float:
    limits = config.limits.timeout_ms
    asked = [limits.max / 1000]
    if request.timeout_ms is not None:
        asked.append(request.timeout_ms / 1000)
    if expiry_s is not None:
        asked.append(float(expiry_s))
    return min(asked) if len(asked) > 1 else limits.default / 1000
