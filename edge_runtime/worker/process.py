"""Tie this process to its supervisor: die with it, die before it, leave signals to it."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import struct
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # Source: linux/prctl.h
_OOM_SCORE = "500"  # of -1000..1000: under memory pressure the kernel takes the worker, not the supervisor
_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid


def settle_process() -> None:
    """Prepare a worker process. Call it first, in the main thread.

    SIGINT and SIGTERM reach the whole process group, but stopping is the supervisor's decision. SIGABRT writes the
    stacks of all threads to stderr. A refused OOM score (a hardened container) changes nothing.
    """
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def is_orphan(sock: socket.socket) -> bool:
    """Whether the process that made the socket pair is no longer our parent: it died before its death could kill us."""
    pid, _, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return bool(pid) and pid != os.getppid()  # 0: made in another PID namespace, nothing can be said
