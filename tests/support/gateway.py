"""Drive a gateway without broker, worker or clock: messages in, frames out."""

from __future__ import annotations

from typing import Any

import msgspec

from edge_runtime.config import Config
from edge_runtime.messages import Accepted, Chunk, ErrorFrame, Final, Reply, parse_reply
from edge_runtime.supervisor.gateway import Gateway
from edge_runtime.supervisor.outbox import Item, Outbox
from edge_runtime.supervisor.transport import Inbound
from edge_runtime.topics import DeviceTopics
from edge_runtime.worker.frames import Cancel, Finished, Started, Submit, Tokens, ToWorker

TOPICS = DeviceTopics("edge/v1", "local")
RESULT = TOPICS.result("default", "cli1")
MODEL = "tiny"
BOOT = "boot1"


class Desk:
    """A gateway in state `ready` and what came out of it. `now` moves only when a test says so."""

    def __init__(self, config: Config | None = None, outbox: Outbox | None = None) -> None:
        self.config = config or Config()
        self.now = 1000.0
        self.outbox = Outbox(self.config.mqtt.outbox) if outbox is None else outbox  # an empty one is false
        self.notices: list[tuple[str, dict[str, object]]] = []
        self.gateway = Gateway(self.config, TOPICS, model=MODEL, boot_id=BOOT, outbox=self.outbox, notice=self._notice)
        self.gateway.set_state("ready", self.now)
        self.items: list[Item] = []

    def _notice(self, event: str, facts: dict[str, object]) -> None:
        self.notices.append((event, facts))

    def send(self, payload: bytes | dict[str, Any], *, topic: str | None = None, **properties: Any) -> None:
        body = payload if isinstance(payload, bytes) else msgspec.json.encode(payload)
        properties.setdefault("response_topic", RESULT)
        self.gateway.receive(Inbound(topic or TOPICS.request("default"), body, **properties), self.now)

    def ask(self, request_id: str = "r1", **fields: Any) -> None:
        self.send({"id": request_id, "model": MODEL, "prompt": "hi", **fields})

    def cancel(self, request_id: str = "r1", tenant: str = "default") -> None:
        self.send({"id": request_id}, topic=TOPICS.cancel(tenant), response_topic=None)

    def collect(self) -> list[ToWorker]:
        return self.gateway.collect(self.now)

    def submitted(self) -> list[Submit]:
        return [frame for frame in self.collect() if isinstance(frame, Submit)]

    def cancels(self) -> list[Cancel]:
        return [frame for frame in self.collect() if isinstance(frame, Cancel)]

    def start(self, key: int) -> None:
        self.gateway.on_worker_frame(Started(key=key, prompt_tokens=3, prepare_ms=0.1, seed=1), self.now)

    def text(self, key: int, text: str, count: int = 1) -> None:
        self.gateway.on_worker_frame(Tokens(key=key, text=text, count=count), self.now)

    def finish(self, key: int, text: str, reason: str = "stop") -> None:
        frame = Finished(
            key=key,
            reason=reason,  # type: ignore[arg-type]
            text=text,
            prompt_tokens=3,
            completion_tokens=len(text.split()),
            queue_ms=1.0,
            prefill_ms=2.0,
            ttft_ms=3.0,
            tpot_ms=4.0,
            seed=1,
        )
        self.gateway.on_worker_frame(frame, self.now)

    def taken(self) -> list[Item]:
        """Everything that has been put into the outbox since the last call."""
        found: list[Item] = []
        while item := self.outbox.take():
            found.append(item)
        self.items += found
        return found

    def replies(self) -> list[Reply]:
        return [parse_reply(item.message.payload) for item in self.taken()]

    def reply(self) -> Reply:
        (only,) = self.replies()
        return only

    def error(self) -> ErrorFrame:
        frame = self.reply()
        assert isinstance(frame, ErrorFrame), frame
        return frame

    def final(self) -> Final:
        frame = self.replies()[-1]
        assert isinstance(frame, Final), frame
        return frame


__all__ = ["BOOT", "MODEL", "RESULT", "TOPICS", "Accepted", "Chunk", "Desk"]
