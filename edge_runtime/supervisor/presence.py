"""Tell the world what this device is and how it fares: the status, info and event topics."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from edge_runtime import __version__
from edge_runtime.config import Config
from edge_runtime.errors import RequestError
from edge_runtime.messages import Event, Info, Status, encode, json_schemas, parse_status
from edge_runtime.supervisor.health import BeatWatch
from edge_runtime.supervisor.outbox import Item, Outbox
from edge_runtime.supervisor.states import SHOWN, State
from edge_runtime.supervisor.transport import Outbound, Will
from edge_runtime.topics import DeviceTopics
from edge_runtime.worker.frames import Ready

STATUS_S = 30.0  # the status is published at least this often
ANSWER_S = 5.0  # a foreign status on our topic is answered at most once per this time
FEATURES = ["stream", "cancel", "replay"]


class Presence:
    """Publishes through the outbox. Main thread only; `now` is monotonic seconds."""

    def __init__(
        self,
        config: Config,
        topics: DeviceTopics,
        *,
        boot_id: str,
        model: str,
        outbox: Outbox,
        counts: Callable[[], tuple[int, int, int]],
        now: float,
    ) -> None:
        self._config = config
        self._topics = topics
        self._boot_id = boot_id
        self._model = model
        self._outbox = outbox
        self._counts = counts  # queued, running, worker restarts
        self._state: State = "starting"
        self._reason = ""
        self._since = now
        self._published = now
        self._answered = now - ANSWER_S
        self._is_contradicted = False
        self._seq = 0
        self._ready: Ready | None = None

    def set_state(self, state: State, reason: str, now: float) -> None:
        """Note a change; `publish` tells it."""
        self._state, self._reason, self._since = state, reason, now

    def set_engine(self, ready: Ready) -> None:
        """Note what the worker has loaded."""
        self._ready = ready

    def publish(self, now: float, watch: BeatWatch | None) -> None:
        """Publish the present status."""
        self._published = now
        self._is_contradicted = False
        self._seq += 1
        queue, running, restarts = self._counts()
        status = Status(
            state=SHOWN[self._state],
            boot_id=self._boot_id,
            reason=self._reason,
            seq=self._seq,
            ready=self._state == "ready",
            since_s=round(now - self._since, 3),
            queue=queue,
            running=running,
            kv_used=self._kv_used(watch),
            p50_ms=watch.step_percentile_ms(0.5) if watch else 0.0,
            p99_ms=watch.step_percentile_ms(0.99) if watch else 0.0,
            worker_restarts=restarts,
        )
        self._put_latest(self._topics.status, encode(status))

    def publish_info(self) -> None:
        """Publish what is known of engine and limits."""
        ready, limits = self._ready, self._config.limits
        numbers = {
            "max_tokens": limits.max_tokens,
            "queue": limits.queue,
            "payload_bytes": limits.bytes.payload,
            "response_bytes": limits.bytes.response,
            "timeout_ms_default": limits.timeout_ms.default,
            "timeout_ms_max": limits.timeout_ms.max,
        }
        if ready:
            numbers |= {"slots": ready.slots, "context": ready.capacity, "max_prompt": ready.max_prompt}
        info = Info(
            version=__version__,
            boot_id=self._boot_id,
            device=self._config.device.name,
            model=self._model,
            backend=ready.backend if ready else {},
            engine={"precision": ready.precision, "sha256": ready.engine_sha256} if ready else {},
            limits=numbers,
            features=FEATURES,
            schema=json_schemas(),
        )
        self._put_latest(self._topics.info, encode(info))

    def publish_event(self, event: str, reason: str, facts: dict[str, str]) -> None:
        """Publish something that happened."""
        payload = encode(Event(event=event, boot_id=self._boot_id, reason=reason, facts=facts))
        self._outbox.put(Item(Outbound(self._topics.event, payload, qos=1), "reply"))

    def note_own_topic(self, payload: bytes) -> None:
        """Look at a message on our own status topic: a stale will may come back after a reconnect."""
        try:
            status = parse_status(payload)
        except RequestError:
            self._is_contradicted = True
            return
        is_offline = status.state == "offline" and self._state != "stopped"
        self._is_contradicted |= status.boot_id != self._boot_id or is_offline

    def is_due(self, now: float) -> bool:
        """Whether the status should be published although nothing has changed."""
        if self._is_contradicted and now - self._answered >= ANSWER_S:
            self._answered = now
            return True
        return now - self._published >= STATUS_S

    def _kv_used(self, watch: BeatWatch | None) -> float:
        if watch is None or watch.last is None or self._ready is None:
            return 0.0
        return round(watch.last.kv_tokens / max(1, self._ready.slots * self._ready.capacity), 4)

    def _put_latest(self, topic: str, payload: bytes) -> None:
        self._outbox.put(Item(Outbound(topic, payload, qos=1, retain=True), "latest"))


def make_will(topics: DeviceTopics, boot_id: str, delay_s: int) -> Will:
    """Return what the broker publishes when this device is lost."""
    payload = msgspec.json.encode({"state": "offline", "boot_id": boot_id, "reason": "lost"})
    return Will(topics.status, payload, delay_s)
