"""Name the MQTT topics of protocol version 1, and read them back. No transport, no policy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from edge_runtime.messages import CLIENT, TENANT

DEFAULT_PREFIX = "edge/v1"
NO_CLIENT = "_"  # results of a request that names no response topic


@dataclass(frozen=True, slots=True)
class DeviceTopics:
    """The topics of one device."""

    prefix: str
    device: str

    @property
    def root(self) -> str:
        """Everything of this device lies below."""
        return f"{self.prefix}/d/{self.device}"

    @property
    def status(self) -> str:
        """Retained presence; also the will."""
        return f"{self.root}/status"

    @property
    def info(self) -> str:
        """Retained facts: versions, schema, model, limits."""
        return f"{self.root}/info"

    @property
    def event(self) -> str:
        """What happened: restarts, alerts."""
        return f"{self.root}/event"

    @property
    def requests(self) -> str:
        """Filter for the requests of every tenant."""
        return f"{self.root}/t/+/req"

    @property
    def cancels(self) -> str:
        """Filter for the cancels of every tenant."""
        return f"{self.root}/t/+/cancel"

    def request(self, tenant: str) -> str:
        """Where a client of `tenant` sends requests."""
        return f"{self.root}/t/{tenant}/req"

    def cancel(self, tenant: str) -> str:
        """Where a client of `tenant` sends cancels."""
        return f"{self.root}/t/{tenant}/cancel"

    def result(self, tenant: str, client: str) -> str:
        """Where the device answers one client of `tenant`."""
        return f"{self.root}/t/{tenant}/res/{client}"

    def tenant_of(self, topic: str) -> tuple[str, str] | None:
        """Split a request or cancel topic into (tenant, "req" | "cancel"); None when it is neither or malformed."""
        head, slash, rest = topic.partition(f"{self.root}/t/")
        tenant, _, verb = rest.partition("/")
        if head or not slash or verb not in ("req", "cancel") or not re.search(TENANT, tenant):
            return None
        return tenant, verb

    def is_result_of(self, topic: str, tenant: str) -> bool:
        """Whether `topic` is a result topic of this tenant on this device: the only place a reply may go."""
        head, slash, client = topic.partition(f"{self.root}/t/{tenant}/res/")
        return not head and bool(slash) and re.search(CLIENT, client) is not None
