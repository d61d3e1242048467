"""Stand in for the compiler process: `fake_compiler.py BEHAVIOUR` reads a request strictly and fails in one way."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from edge_engines.compile.frames import (
    Compiled,
    CompileRequest,
    Event,
    Failed,
    ModuleFacts,
    Probed,
    ProbeRequest,
    StepBegun,
    decode_request,
    encode,
)

FACTS = ModuleFacts("tensorrt_rtx", "1.7.0", "1.7.0", ["8.6", "8.9"], None)


def command(behaviour: str) -> tuple[str, ...]:
    """Return the command line of a fake compiler."""
    return (sys.executable, __file__, behaviour)


def main() -> None:
    request = decode_request(sys.stdin.buffer.readline())
    if isinstance(request, ProbeRequest):
        send(Probed(FACTS))
        return
    assert (Path(request.folder) / request.graph).is_file()
    assert not (Path(request.folder) / request.plan).exists()
    send(StepBegun("TensorRT: building engine", 6))
    BEHAVIOURS[sys.argv[1]](request)


def send(event: Event) -> None:
    sys.stdout.buffer.write(encode(event))
    sys.stdout.buffer.flush()


def compiled(size: int) -> Compiled:
    return Compiled(size, "not inspected: a fake", "none", 0.1, 1)


def works(request: CompileRequest) -> None:
    (Path(request.folder) / request.plan).write_bytes(b"plan")
    send(compiled(4))


def is_killed_mid_write(request: CompileRequest) -> None:
    (Path(request.folder) / f"{request.plan}.part").write_bytes(b"half a pl")
    os.kill(os.getpid(), signal.SIGKILL)


def succeeds_without_a_file(request: CompileRequest) -> None:
    send(compiled(4))


def writes_an_empty_file(request: CompileRequest) -> None:
    (Path(request.folder) / request.plan).touch()
    send(compiled(0))


def writes_less_than_it_says(request: CompileRequest) -> None:
    (Path(request.folder) / request.plan).write_bytes(b"pl")
    send(compiled(4))


def crashes(request: CompileRequest) -> None:
    raise RuntimeError("something inside")


def leaves_without_a_word(request: CompileRequest) -> None:
    sys.exit(0)


def fails_with_reason(request: CompileRequest) -> None:
    send(Failed("build", "TensorRT can't build this graph: no kernel", "nothing was written"))


def speaks_nonsense(request: CompileRequest) -> None:
    sys.stdout.write("&&&& RUNNING\n")


def is_slow(request: CompileRequest) -> None:
    time.sleep(0.3)
    works(request)


def hangs(request: CompileRequest) -> None:
    while sys.stdin.buffer.read(1):
        pass


BEHAVIOURS: Mapping[str, Callable[[CompileRequest], None]] = {
    behaviour.__name__: behaviour
    for behaviour in (
        works, is_killed_mid_write, succeeds_without_a_file, writes_an_empty_file, writes_less_than_it_says, crashes,
        leaves_without_a_word, fails_with_reason, speaks_nonsense, is_slow, hangs,
    )
}  # fmt: skip

if __name__ == "__main__":
    main()
