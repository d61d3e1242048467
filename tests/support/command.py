"""Run `edge-runtime` as a user does: another process, its output and its exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

COMMAND = (sys.executable, "-m", "edge_tools")


def environment(**more: str) -> Mapping[str, str]:
    """Environment of a child that finds our packages where this process does."""
    inherited = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    return {**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def edge_runtime(*arguments: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        env=environment(**env),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
