"""Admit requests, hand them to the worker, and end each of them with exactly one terminal frame.

`receive` runs on the network thread, everything else on the main thread; one short lock guards the state. No I/O, no
clock: `now` is boot-time seconds, so that deadlines also pass while the machine sleeps.
"""

from __future__ import annotations

import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable
from pathlib import PurePath

import msgspec

from edge_runtime.config import Config
from edge_runtime.errors import RequestError
from edge_runtime.messages import ErrorFrame, Final
from edge_runtime.supervisor import outcomes
from edge_runtime.supervisor.admission import CancelOffer, Ignored, Offer, Refused, examine, refuse_unseen
from edge_runtime.supervisor.ledger import Finished, Ledger
from edge_runtime.supervisor.outbox import Item, Outbox
from edge_runtime.supervisor.quarantine import Quarantine
from edge_runtime.supervisor.replies import Replies
from edge_runtime.supervisor.requests import LiveRequest, Route, fingerprint, to_submit
from edge_runtime.supervisor.states import REFUSES, State
from edge_runtime.supervisor.transport import Inbound
from edge_runtime.topics import DeviceTopics
from edge_runtime.worker import frames

NO_SUBSCRIBER = 0x10  # reason code of a PUBACK: nobody is subscribed to the topic
UNHEARD_LIMIT = 2
QUEUE_RETRY_MS = 1000
DEADLINE_SLACK_S = 0.25  # the worker watches deadlines itself; after this the supervisor asks


class Gateway:
    """Requests of one device between broker and worker.

    `notice(event, facts)` is called for what a log should know; it must not call back.
    """

    def __init__(
        self,
        config: Config,
        topics: DeviceTopics,
        *,
        model: str,
        boot_id: str,
        outbox: Outbox,
        notice: Callable[[str, dict[str, object]], None],
    ) -> None:
        self._config = config
        self._topics = topics
        self._model = model
        self._outbox = outbox
        self._notice = notice
        self._replies = Replies(config.device.name, boot_id, model, config.limits.bytes.response)
        self._lock = threading.Lock()
        self._state: State = "starting"
        self._ledger = Ledger(config.limits.replay)
        self._quarantine = Quarantine()
        self._queue: deque[LiveRequest] = deque()
        self._running: dict[int, LiveRequest] = {}  # at the worker, by key
        self._last_key = 0
        self._purged = 0.0
        self.counts: Counter[str] = Counter()  # outcomes and refusals

    @property
    def num_queued(self) -> int:
        """Requests that wait here."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests that the worker holds."""
        return len(self._running)

    # ---- network thread

    def receive(self, message: Inbound, now: float) -> None:
        """Queue, answer or drop one message. Returns at once, so that it can be acknowledged.

        An exception is a fault of ours: it is noticed, counted, and answered where the sender may be answered.
        """
        try:
            found = examine(message, self._config, self._topics, self._model)
        except Exception as error:
            with self._lock:
                self._note_fault(error)
            found = refuse_unseen(message, self._config, self._topics, outcomes.internal_error())
        with self._lock:
            last_key = self._last_key
            try:
                self._take(found, now)
            except Exception as error:
                self._note_fault(error)
                self._answer_fault(found, last_key, now)

    def _take(self, found: Offer | CancelOffer | Refused | Ignored, now: float) -> None:
        if isinstance(found, Ignored):
            self._count(f"ignored:{found.reason}")
            self._notice("message_ignored", {"reason": found.reason, "tenant": found.tenant})
        elif isinstance(found, Refused):
            self._refuse(found.id, found.route, found.error, now)
        elif isinstance(found, CancelOffer):
            self._cancel(found, now)
        else:
            self._admit(found, now)

    def _note_fault(self, error: Exception) -> None:
        """Count a fault and tell where it struck; its text could quote a prompt."""
        self._count("internal_error")
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{PurePath(place.filename).name}:{place.lineno}"
        self._notice("internal_error", {"reason": type(error).__name__, "where": where})

    def _answer_fault(self, found: Offer | CancelOffer | Refused | Ignored, last_key: int, now: float) -> None:
        """End the request that was admitted meanwhile, or refuse the one that was not; a running one goes on."""
        live = self._ledger.by_key.get(self._last_key) if self._last_key > last_key else None
        if live is not None:
            if live in self._queue:
                self._queue.remove(live)
            self._end(live, outcomes.failed(live, outcomes.internal_error()), now)
        elif isinstance(found, Refused):
            self._refuse(found.id, found.route, outcomes.internal_error(), now)
        elif isinstance(found, Offer) and (found.tenant, found.request.id) not in self._ledger.live:
            self._refuse(found.request.id, found.route, outcomes.internal_error(), now)

    def _admit(self, offer: Offer, now: float) -> None:
        name, digest = (offer.tenant, offer.request.id), fingerprint(offer.request)
        known = self._ledger.live.get(name) or self._ledger.find_finished(name, now)
        if known is not None:
            self._repeat(known, digest, offer, now)
            return
        live = self._new_live(offer, digest, now)
        if self._ledger.take_cancel(name, now):
            self._ledger.admit(live)
            self._end(live, outcomes.cancelled(live, now, "cancelled", self._model), now)
            return
        error = self._refusal_of(offer, digest)
        if error is not None:
            self._refuse(offer.request.id, offer.route, error, now)
            return
        self._ledger.admit(live)
        self._queue.append(live)
        self._count("admitted")
        if offer.request.stream or offer.request.ack:
            self._outbox.put(self._replies.accepted(live, queue_pos=len(self._queue) - 1, now=now))

    def _repeat(self, known: LiveRequest | Finished, digest: bytes, offer: Offer, now: float) -> None:
        """Answer a request whose id is known: it never runs a second time."""
        if known.fingerprint != digest:
            text = f"id {offer.request.id!r} was used for another request"
            self._refuse(offer.request.id, offer.route, RequestError("id_conflict", text, param="$.id"), now)
            return
        self._count("duplicate")
        if isinstance(known, Finished):
            frame = self._replies.fit(msgspec.structs.replace(known.frame, cached=True), offer.route)
            self._outbox.put(self._replies.terminal(frame, offer.route, now, "reply"))
            return
        known.route = offer.route
        queue_pos = self._queue.index(known) if known in self._queue else 0
        self._outbox.put(self._replies.accepted(known, queue_pos=queue_pos, now=now, duplicate=True))

    def _new_live(self, offer: Offer, digest: bytes, now: float) -> LiveRequest:
        self._last_key += 1
        return LiveRequest(
            key=self._last_key,
            tenant=offer.tenant,
            request=offer.request,
            fingerprint=digest,
            route=offer.route,
            received=now,
            deadline=now + offer.timeout_s,
        )

    def _refusal_of(self, offer: Offer, digest: bytes) -> RequestError | None:
        """Find the first reason why this device can't take a request that is right in itself."""
        allowed = self._config.tenant_table[offer.tenant].classes
        if offer.request.service_class not in allowed:
            text = f"class {offer.request.service_class!r} is not allowed for this tenant: {', '.join(allowed)}"
            return RequestError("class_not_allowed", text, param="$.class")
        if self._quarantine.is_refused(digest):
            return outcomes.quarantine_error()
        if offer.timeout_s <= 0:
            return RequestError("deadline_exceeded", "the message expired before it was read")
        if self._state in REFUSES:
            code, text, retry_after_ms = REFUSES[self._state]
            return RequestError(code, text, retry_after_ms=retry_after_ms)
        if len(self._queue) >= self._config.limits.queue or self._ledger.is_full or self._outbox.is_full:
            text = f"{len(self._queue)} requests are waiting, at most {self._config.limits.queue}"
            return RequestError("queue_full", text, retry_after_ms=QUEUE_RETRY_MS)
        return None

    def _refuse(self, request_id: str | None, route: Route, error: RequestError, now: float) -> None:
        self._count(f"refused:{error.code}")
        self._notice("request_refused", {"req_id": request_id, "reason": error.code, "param": error.param})
        self._outbox.put(self._replies.refusal(request_id, route, error, now))

    def _cancel(self, offer: CancelOffer, now: float) -> None:
        name = (offer.tenant, offer.id)
        live = self._ledger.live.get(name)
        if live is None:
            if self._ledger.find_finished(name, now) is None:
                self._ledger.note_cancel(name, now)
        elif live.submitted is None:
            self._queue.remove(live)
            self._end(live, outcomes.cancelled(live, now, "cancelled", self._model), now)
        else:
            live.cancel = live.cancel or "cancelled"

    # ---- main thread

    def set_state(self, state: State, now: float) -> None:
        """Follow the daemon's state: it decides what happens to new requests and to those that wait."""
        with self._lock:
            self._state = state
            if state in ("failed", "draining", "stopped"):
                code, text, retry_after_ms = REFUSES[state]
                for live in list(self._queue):
                    error = RequestError(code, text, retry_after_ms=retry_after_ms)
                    self._end(live, outcomes.failed(live, error), now)
                self._queue.clear()

    def limit_packet(self, packet_bytes: int) -> None:
        """Follow the broker's largest packet."""
        with self._lock:
            self._replies.limit_packet(packet_bytes)

    def collect(self, now: float) -> list[frames.ToWorker]:
        """Return what is to be sent to the worker now: cancels, and requests while it has room."""
        with self._lock:
            self._expire_queued(now)
            if now - self._purged > 1.0:
                self._ledger.purge(now)
                self._purged = now
            return [*self._cancels(now), *self._submits(now)]

    def on_worker_frame(self, frame: frames.FromWorker, now: float) -> None:
        """Take one frame about a request; frames about requests that have ended are ignored."""
        with self._lock:
            live = self._running.get(getattr(frame, "key", 0))
            if live is None:
                return
            if isinstance(frame, frames.Started):
                live.has_started, live.prompt_tokens = True, frame.prompt_tokens
            elif isinstance(frame, frames.Tokens):
                self._take_text(live, frame, now)
            elif isinstance(frame, frames.Finished):
                self._quarantine.clear(live.fingerprint)
                self._end(live, outcomes.finished(live, frame, now, self._model), now)
            elif isinstance(frame, frames.Failed):
                self._end(live, outcomes.failed_by_worker(live, frame), now)

    def worker_died(self, now: float) -> None:
        """Settle what the worker held: what has sent no text goes back to the queue, the rest ends with an error."""
        with self._lock:
            held = list(self._running.values())
            # Without a started one, preparing any of them may be what kills.
            for suspect in [live for live in held if live.has_started] or held:
                self._quarantine.note_death(suspect.fingerprint)
            for live in sorted(held, key=lambda live: live.key, reverse=True):
                self._settle(live, now)

    def cancel_running(self) -> None:
        """Ask the worker to stop everything, for the end of a drain."""
        with self._lock:
            for live in self._running.values():
                live.cancel = live.cancel or "cancelled"

    def end_running(self, now: float) -> None:
        """Answer everything that the worker has not, with the text that is there."""
        with self._lock:
            for live in list(self._running.values()):
                self._end(live, outcomes.cancelled(live, now, "cancelled", self._model), now)

    def acknowledged(self, item: Item, code: int) -> None:
        """Note the broker's answer to a frame at QoS 1: two unheard chunks in a row may cancel their request."""
        with self._lock:
            live = self._running.get(item.key)
            if item.kind != "chunk" or live is None:
                return
            live.unheard = live.unheard + 1 if code == NO_SUBSCRIBER else 0
            if live.unheard >= UNHEARD_LIMIT and self._config.stream.on_no_subscriber == "cancel":
                live.cancel = live.cancel or "cancelled"

    def _expire_queued(self, now: float) -> None:
        for live in [live for live in self._queue if live.deadline <= now]:
            self._queue.remove(live)
            error = RequestError("deadline_exceeded", "the deadline passed while the request was waiting")
            self._end(live, outcomes.failed(live, error), now)

    def _cancels(self, now: float) -> list[frames.ToWorker]:
        found: list[frames.ToWorker] = []
        for live in self._running.values():
            if live.cancel is None and now > live.deadline + DEADLINE_SLACK_S:
                live.cancel = "deadline"
            if live.cancel is not None and not live.is_cancel_sent:
                live.is_cancel_sent = True
                found.append(frames.Cancel(live.key, live.cancel))
        return found

    def _submits(self, now: float) -> list[frames.ToWorker]:
        found: list[frames.ToWorker] = []
        while self._state == "ready" and self._queue and self._has_room_for(self._queue[0]):
            live = self._queue.popleft()
            live.submitted = now
            self._running[live.key] = live
            stream = self._config.stream
            found.append(to_submit(live, now, chunk_tokens=stream.chunk_tokens, chunk_ms=stream.chunk_ms))
        return found

    def _has_room_for(self, live: LiveRequest) -> bool:
        """Whether the worker may get one more; a request that a worker died with runs alone."""
        if self._quarantine.is_suspect(live.fingerprint):
            return not self._running
        alone = any(self._quarantine.is_suspect(other.fingerprint) for other in self._running.values())
        return not alone and len(self._running) < self._config.engine.max_batch + 1

    def _take_text(self, live: LiveRequest, frame: frames.Tokens, now: float) -> None:
        live.text.append(frame.text)
        live.completion_tokens += frame.count
        if live.first_token is None:
            live.first_token = now
        if live.request.stream and frame.text:
            self._outbox.put(self._replies.chunk(live, frame.text, now))

    def _settle(self, live: LiveRequest, now: float) -> None:
        if live.cancel is not None:
            self._end(live, outcomes.cancelled(live, now, live.cancel, self._model), now)
        elif self._quarantine.is_refused(live.fingerprint):
            self._end(live, outcomes.failed(live, outcomes.quarantine_error()), now)
        elif live.chunks:
            self._end(live, outcomes.failed(live, outcomes.restart_error()), now)
        elif self._state in ("draining", "stopped"):
            self._end(live, outcomes.cancelled(live, now, "cancelled", self._model), now)
        else:
            del self._running[live.key]
            live.restart()
            self._queue.appendleft(live)

    def _end(self, live: LiveRequest, frame: Final | ErrorFrame, now: float) -> None:
        """Send the one terminal frame of a request and remember it."""
        self._running.pop(live.key, None)
        frame = self._replies.fit(frame, live.route)
        item = self._replies.terminal(frame, live.route, max(live.deadline, now), "terminal")
        self._outbox.put(item)
        self._ledger.finish(live, frame, len(item.message.payload))
        outcome = frame.error.code if isinstance(frame, ErrorFrame) else frame.choices[0].finish_reason
        self._count(f"ended:{outcome}")
        self._notice(
            "request_ended",
            {"tenant": live.tenant, "req_id": live.request.id, "outcome": outcome, "attempt": live.attempt},
        )

    def _count(self, what: str) -> None:
        self.counts[what] += 1
