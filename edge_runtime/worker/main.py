"""Run the worker process: `python -m edge_runtime.worker.main FD`, FD being its end of a socket pair."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

from edge_runtime import __version__
from edge_runtime.errors import EdgeError, UsageError
from edge_runtime.worker.engine import Engine, Report, open_engine, warm_up
from edge_runtime.worker.frames import FRAME_PROTOCOL, FrameError, Hello, Init, Progress, Ready
from edge_runtime.worker.heartbeat import HeartbeatThread, Pulse
from edge_runtime.worker.link import Link, LinkClosedError
from edge_runtime.worker.loop import WorkerLoop
from edge_runtime.worker.process import is_orphan, settle_process

OpenEngine = Callable[[Init, Report], Engine]
_INTERNAL, _REFUSED = 70, 78


def main(argv: Sequence[str]) -> int:
    """Serve the engine that the supervisor names and return the exit status of `run_worker`; `argv` is [FD]."""
    settle_process()
    sock = socket.socket(fileno=int(argv[0]))
    return 0 if is_orphan(sock) else run_worker(Link(sock), open_engine)


def run_worker(link: Link, open_engine: OpenEngine) -> int:
    """Serve until told to stop.

    Returns the exit status: 0 after a `stop` frame or when the supervisor is gone, 69 without a device, 78 for a
    refused engine, 70 for all else; then one line on stderr says why, or the stack for a bug of ours.
    """
    try:
        _serve(link, open_engine)
    except LinkClosedError:
        return 0
    except (EdgeError, FrameError) as error:
        sys.stderr.write(f"edge-runtime worker: {error}\n")
        return _exit_status(error)
    except Exception:
        traceback.print_exc()
        return _INTERNAL
    return 0


def _serve(link: Link, open_engine: OpenEngine) -> None:
    link.send(Hello(pid=os.getpid(), version=__version__))
    init = _receive_init(link)
    pulse = Pulse(time.monotonic)
    with HeartbeatThread(link, pulse, init.heartbeat_s):
        engine = open_engine(init, lambda phase, percent: link.send(Progress(phase, percent)))
        with engine.session as session:
            slots = min(init.max_batch, session.geometry.max_batch)
            pulse.phase = "warming"
            link.send(Progress("warm-up", 0.0))
            warm_s = warm_up(engine, slots=slots, chunk=init.prefill_chunk)
            pulse.phase = "serving"
            link.send(_ready(engine, slots, warm_s))
            loop = WorkerLoop(link, session, engine.codec, pulse, _make_log(), slots=slots, chunk=init.prefill_chunk)
            loop.run()


def _receive_init(link: Link) -> Init:
    frame = link.receive_one()
    if not isinstance(frame, Init):
        raise FrameError(f"the first frame must be init, got {type(frame).__name__}")
    if frame.protocol != FRAME_PROTOCOL:
        raise FrameError(f"the supervisor speaks frame protocol {frame.protocol}, this worker {FRAME_PROTOCOL}")
    return frame


def _ready(engine: Engine, slots: int, warm_s: float) -> Ready:
    manifest = engine.session.manifest
    return Ready(
        backend=engine.session.facts(),
        slots=slots,
        capacity=manifest.geometry.capacity,
        max_prompt=manifest.geometry.capacity - 1,
        precision=manifest.precision,
        engine_sha256=engine.sha256,
        start_seconds={**engine.seconds, "warm-up": warm_s},
    )


def _exit_status(error: EdgeError | FrameError) -> int:
    if isinstance(error, FrameError):
        return _INTERNAL
    # An engine of a target that this version can't run: trying again won't help.
    return _REFUSED if isinstance(error, UsageError) else error.exit_status


def _make_log() -> FilteringBoundLogger:
    """Return a logger of JSON lines on stderr, which the worker shares with its supervisor."""
    processors: list[Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(),
    ]
    logger = structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger("info"),
    )
    return cast(FilteringBoundLogger, logger)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
