"""Be the compiler process: `python -m edge_engines.compile.child` < request > events, as JSON lines (frames.py).

A process of its own, because TensorRT takes several times the weights in memory and may be killed for it, and because
a crash of its must not take the build along. It ends when the build does, however that ended.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from edge_engines.compile.engine import build_plan
from edge_engines.compile.frames import (
    Compiled,
    Event,
    Noted,
    Probed,
    ProbeRequest,
    Request,
    as_failure,
    decode_request,
    encode,
)
from edge_engines.compile.inspector import inspect_plan
from edge_engines.compile.module import describe_module, load_module
from edge_engines.compile.watch import Watch
from edge_engines.describe import peak_memory
from edge_runtime.errors import EdgeError

OOM_SCORE = 500  # of -1000 to 1000: short of memory, the system ends this process before others


def main() -> int:
    """Answer one request."""
    send = _claim_stdout()
    request = decode_request(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        send(answer(request, send))
    except EdgeError as error:
        send(as_failure(error))
    return 0


def answer(request: Request, send: Callable[[Event], None]) -> Event:
    """Return the last event; those before it go to `send`. Raises EdgeError."""
    trt = load_module(request.target)
    facts = describe_module(request.target, trt)
    if isinstance(request, ProbeRequest):
        return Probed(facts)
    _volunteer_for_oom()
    started, watch = time.monotonic(), Watch(send)
    plan, timing_cache = build_plan(trt, request, watch)
    inspection = inspect_plan(trt, request, facts.device, watch)
    if not inspection.endswith(request.layers):
        send(Noted(inspection))
    return Compiled(
        plan_bytes=plan.stat().st_size,
        inspection=inspection,
        timing_cache=timing_cache,
        seconds=round(time.monotonic() - started, 3),
        peak_memory_bytes=peak_memory(),
    )


def _claim_stdout() -> Callable[[Event], None]:
    """Keep standard output for events: what TensorRT's own code prints there goes to standard error instead."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def send(event: Event) -> None:
        events.write(encode(event))

    return send


def _end_with_parent() -> None:
    """The build keeps our standard input open; its end means that the build is gone."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def _volunteer_for_oom() -> None:
    try:
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    except OSError:
        return  # not allowed in some containers; a courtesy, not a need


if __name__ == "__main__":
    sys.exit(main())
