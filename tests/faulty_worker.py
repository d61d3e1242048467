"""Be a worker that breaks on purpose: the real worker process over a scripted engine, wrapped by fault hooks.

Run as `python tests/faulty_worker.py HOOKS FD`. HOOKS is a JSON list of `fault_hooks.Hook`, for example
`[{"hook": "slow", "ms": 20}, {"hook": "nan", "row": 1, "at": {"step": 7}}, {"hook": "exit", "at": {"phase": "load"}}]`;
an empty list is an undisturbed worker. Needs no engine folder and runs in a checkout that is not installed.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout; tests/ itself is there already

from edge_runtime.backends.scripted import ScriptedBackend
from edge_runtime.worker.engine import Engine, Report
from edge_runtime.worker.frames import Init
from edge_runtime.worker.main import run_worker
from edge_runtime.worker.process import is_orphan, settle_process
from support.fault_hooks import Faults, FaultyBackend, FaultyLink, Hook, split_utf8
from support.scripted_engine import BABBLE, byte_manifest, scripted_engine


def main(argv: Sequence[str]) -> int:
    """Do what `edge_runtime.worker.main.main` does, with faults; `argv` is [HOOKS, FD]."""
    faults = Faults(msgspec.json.decode(argv[0], type=list[Hook]))
    script = split_utf8 if faults.splits_utf8 else BABBLE

    def open_faulty(init: Init, report: Report) -> Engine:
        report("load", 0.0)
        faults.reach("load")
        return scripted_engine(FaultyBackend(ScriptedBackend(byte_manifest(), script), faults))

    settle_process()
    sock = socket.socket(fileno=int(argv[1]))
    return 0 if is_orphan(sock) else run_worker(FaultyLink(sock, faults), open_faulty)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
