"""Run the daemon: start, serve, heal, drain, stop. One state machine decides what is admitted and what is shown."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from structlog.typing import FilteringBoundLogger

from edge_runtime.config import Config
from edge_runtime.errors import ClientIdTakenError, EdgeError
from edge_runtime.supervisor.bridge import Bridge
from edge_runtime.supervisor.gateway import Gateway
from edge_runtime.supervisor.health import Verdict
from edge_runtime.supervisor.keeper import EX_SOFTWARE, TICK_S, Keeper
from edge_runtime.supervisor.logs import make_logger
from edge_runtime.supervisor.mqtt import MqttTransport
from edge_runtime.supervisor.outbox import Item, Outbox
from edge_runtime.supervisor.plan import Plan, ask_command, prepare
from edge_runtime.supervisor.presence import Presence
from edge_runtime.supervisor.publisher import Publisher
from edge_runtime.supervisor.states import State
from edge_runtime.supervisor.transport import BrokerLimits
from edge_runtime.worker.frames import FromWorker, Progress, Ready

CANCEL_S = 1.0  # for the worker to answer a cancel
STOP_S = 2.0  # for the worker to end by itself
HURRY_S = 0.5  # for the last frames after a second signal


def run_daemon(
    config: Config,
    *,
    worker_command: Sequence[str] | None = None,
    ready: Callable[[], None] | None = None,
) -> int:
    """Serve until a signal or a fault ends it; return the exit status.

    Must be called in the main thread: it handles signals and spawns workers. `worker_command` is the worker's command
    line without the channel's number. `ready` is called once, when the model is loaded and the first attempt to reach
    the broker has ended either way.
    """
    log = make_logger(config.log, environment=os.environ)
    command = worker_command or (sys.executable, "-m", "edge_runtime.worker.main")
    try:
        plan = prepare(config, secrets.token_hex(8))
        for warning in plan.warnings:
            log.warning("configuration", reason=warning)
        return asyncio.run(_serve(plan, command, ready or _nothing, log))
    except EdgeError as error:
        log.error("refused", error=str(error))
        return error.exit_status
    except Exception:
        log.exception("internal_error")
        return EX_SOFTWARE


async def _serve(plan: Plan, command: Sequence[str], ready: Callable[[], None], log: FilteringBoundLogger) -> int:
    return await Daemon(plan, command, ready, log).run()


class Daemon:
    """The supervisor's parts and the state they share. Lives on the event loop of the main thread."""

    def __init__(
        self, plan: Plan, command: Sequence[str], ready: Callable[[], None], log: FilteringBoundLogger
    ) -> None:
        self._plan = plan
        self._config = config = plan.config
        self._log = log.bind(boot_id=plan.boot_id)
        self._ready = ready
        self._state: State = "starting"
        self._has_been_ready = self._has_tried_broker = self._has_told_ready = self._is_hurried = False
        self._broker_fault = ""
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[int] = self._loop.create_future()
        self._outbox = Outbox(config.mqtt.outbox)
        self._gateway = Gateway(
            config, plan.topics, model=plan.model, boot_id=plan.boot_id, outbox=self._outbox, notice=self._notice
        )
        self._transport = MqttTransport(plan.mqtt)
        self._publisher = Publisher(self._outbox, self._transport, self._on_acknowledged)
        self._keeper = Keeper(config.worker, command, plan.init, self, Random())
        self._presence = Presence(
            config,
            plan.topics,
            boot_id=plan.boot_id,
            model=plan.model,
            outbox=self._outbox,
            counts=self._counts,
            now=time.monotonic(),
        )

    async def run(self) -> int:
        """Serve until something ends it; return the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._loop.set_exception_handler(self._on_loop_error)
        self._enter("starting", "")
        self._transport.start(Bridge(self._loop, self, self._gateway, self._plan.topics.status, _boot_time))
        keeper, ticker = asyncio.create_task(self._keeper.run()), asyncio.create_task(self._tick())
        parts: set[asyncio.Future[Any]] = {keeper, ticker, self._ending}
        reason = "failed"
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            status: int = done.pop().result()
            self._log.info("stopping", exit_status=status)
            reason = f"exit{status}" if status else "stopped"
            if status == 0:
                await self._drain()
            return status
        finally:
            await self._stop(reason, keeper, ticker)

    # ---- the three things that are done again and again

    def turn(self) -> None:
        """Move requests to the worker and frames to the broker."""
        now = _boot_time()
        for frame in self._gateway.collect(now):
            self._keeper.send(frame)
        self._publisher.pump(now)
        self._changed.set()

    async def _tick(self) -> int:
        while self._transport.has_thread():
            await asyncio.sleep(TICK_S)
            if self._presence.is_due(time.monotonic()):
                self._publish_status()
            self.turn()
        self._log.error("mqtt_thread_died")
        return EX_SOFTWARE

    def _enter(self, state: State, reason: str) -> None:
        """Change the state; admission and the status topic follow at once."""
        self._state = state
        self._log.info("state", state=state, reason=reason)
        self._gateway.set_state(state, _boot_time())
        self._presence.set_state(state, reason, time.monotonic())
        self._publish_status()
        self.turn()

    # ---- the end

    def _on_signal(self, number: int) -> None:
        self._log.info("signal", signal=signal.Signals(number).name)
        if self._ending.done():
            self._is_hurried = True
            self._changed.set()
        else:
            self._ending.set_result(0)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End on an exception of our own code in a callback: what it left undone can't be known."""
        error = context.get("exception")
        self._log.error("loop_error", text=context.get("message"), exc_info=error)
        if not self._ending.done():
            self._ending.set_result(EX_SOFTWARE)

    async def _drain(self) -> None:
        """Let running requests end, then cut them short."""
        self._enter("draining", "signal")
        await self._until(self._is_worker_free, self._config.daemon.drain_s)
        self._gateway.cancel_running()
        self.turn()
        await self._until(self._is_worker_free, CANCEL_S)

    async def _stop(self, reason: str, keeper: asyncio.Task[int], ticker: asyncio.Task[int]) -> None:
        """Answer what is open, say goodbye, leave nothing behind."""
        await self._keeper.stop(0.0 if self._is_hurried else STOP_S)
        keeper.cancel()
        self._gateway.end_running(_boot_time())
        self._enter("stopped", reason)
        await self._until(lambda: self._publisher.is_idle, self._config.daemon.flush_s, hurried_s=HURRY_S)
        ticker.cancel()
        await asyncio.gather(keeper, ticker, return_exceptions=True)
        await self._loop.run_in_executor(None, self._transport.stop, 1.0)
        self._log.info("served", **self._totals())

    async def _until(self, condition: Callable[[], bool], timeout_s: float, hurried_s: float = 0.0) -> None:
        """Wait for a condition, no longer than `timeout_s`, or than `hurried_s` after a second signal."""
        began = time.monotonic()
        while not condition():
            rest = began + (hurried_s if self._is_hurried else timeout_s) - time.monotonic()
            if rest <= 0:
                return
            self._changed.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(rest, TICK_S))

    def _is_worker_free(self) -> bool:
        return self._gateway.num_running == 0

    # ---- events of the worker

    def on_worker_spawned(self, pid: int) -> None:
        """Log it."""
        self._log.info("worker_spawned", worker_pid=pid)

    def on_worker_progress(self, progress: Progress) -> None:
        """Log how far loading is."""
        self._log.debug("worker_progress", phase=progress.phase, percent=progress.percent)

    def on_worker_ready(self, ready: Ready) -> None:
        """Serve."""
        self._log.info("worker_ready", backend=ready.backend, start_seconds=ready.start_seconds)
        self._presence.set_engine(ready)
        self._presence.publish_info()
        if not self._ending.done():
            self._enter("ready", "")
        self._has_been_ready = True
        self._tell_ready()

    def on_worker_frame(self, frame: FromWorker) -> None:
        """Pass it on."""
        self._gateway.on_worker_frame(frame, _boot_time())
        self.turn()

    def on_worker_down(self, reason: str, verdict: Verdict) -> None:
        """Settle its requests and say why."""
        self._log.error("worker_down", reason=reason, restart_in_s=round(verdict.delay_s, 2), failed=verdict.has_failed)
        self._gateway.worker_died(_boot_time())
        facts = {"restarts": str(self._keeper.num_restarts)}
        self._presence.publish_event("worker_restarted", reason, facts)
        if not self._ending.done():
            after_start: State = "recovering" if self._has_been_ready else "starting"
            self._enter("failed" if verdict.has_failed else after_start, reason)
        self.turn()

    # ---- events of the connection

    def on_connected(self, limits: BrokerLimits) -> None:
        """Show that we are here; retained messages may be stale."""
        place = f"{self._config.mqtt.host}:{self._config.mqtt.port}"
        self._log.info("broker_connected", broker=place, packet_bytes=limits.packet_bytes)
        self._broker_fault = ""
        self._has_tried_broker = True
        self._gateway.limit_packet(limits.packet_bytes)
        self._publish_status()
        self._presence.publish_info()
        self.turn()
        self._tell_ready()

    def on_disconnected(self, reason: str) -> None:
        """Say it once; the connection comes back by itself."""
        if reason != self._broker_fault and self._state != "stopped":
            self._log.warning("broker_away", reason=reason)
        self._broker_fault = reason
        self._has_tried_broker = True
        self._publisher.disconnected()
        self._tell_ready()

    def on_published(self, token: int, code: int) -> None:
        """Make room for the next frame."""
        self._publisher.published(token, code)
        self.turn()

    def on_dropped(self, tokens: tuple[int, ...]) -> None:
        """Try again without the frame that is too large."""
        self._log.error("frames_too_large", frames=len(tokens))
        self._publisher.dropped(tokens)

    def on_own_status(self, payload: bytes) -> None:
        """Look for a stale will."""
        self._presence.note_own_topic(payload)

    def on_warning(self, text: str) -> None:
        """Log it."""
        self._log.warning("mqtt", reason=text)

    def on_client_id_taken(self) -> None:
        """End: two daemons would take the connection from each other for ever."""
        error = ClientIdTakenError(
            f"client id {self._plan.mqtt.client_id!r} is used by another connection to "
            f"{self._config.mqtt.host}:{self._config.mqtt.port}",
            remedy="stop the other daemon, or set device.name or mqtt.client_id",
        )
        self._is_hurried = True  # nothing can be sent any more
        if not self._ending.done():
            self._ending.set_exception(error)

    def _on_acknowledged(self, item: Item, code: int) -> None:
        if code >= 0x80:
            self._log.warning("publish_refused", reason=f"0x{code:02x}", topic=item.message.topic)
        self._gateway.acknowledged(item, code)

    def _tell_ready(self) -> None:
        if not self._has_been_ready or not self._has_tried_broker or self._has_told_ready:
            return
        self._has_told_ready = True
        away = "" if self._transport.is_connected else "the broker is away; once it is there, "
        self._log.info("ready", hint=f"{away}ask with {ask_command(self._config)}")
        self._ready()

    def _publish_status(self) -> None:
        self._presence.publish(time.monotonic(), self._keeper.watch)

    def _counts(self) -> tuple[int, int, int]:
        return self._gateway.num_queued, self._gateway.num_running, self._keeper.num_restarts

    def _totals(self) -> dict[str, object]:
        """Count what happened in this run, for the log's last line."""
        return {
            "requests": dict(sorted(self._gateway.counts.items())),
            "worker_restarts": self._keeper.num_restarts,
            "dropped_chunks": self._outbox.dropped_chunks + self._publisher.lost_chunks,
            "dropped_replies": self._outbox.dropped_replies,
            "frames_too_large": self._publisher.too_large,
            "puback_codes": {f"0x{code:02x}": count for code, count in self._publisher.negative_codes.items()},
        }

    def _notice(self, event: str, facts: dict[str, object]) -> None:
        """Log one request's fate, on the event loop: writing a log may take time, and the gateway holds its lock."""
        self._loop.call_soon_threadsafe(self._log_request, event, facts)

    def _log_request(self, event: str, facts: dict[str, object]) -> None:
        if event == "request_ended":
            self._log.info(event, **facts)
        elif event == "internal_error":
            self._log.error(event, **facts)
        else:
            self._log.warning(event, **facts)


def _boot_time() -> float:
    """Seconds since boot, suspend included: what deadlines are made of."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _nothing() -> None:
    return
