"""Say how to start one of our modules in a process of its own."""

from __future__ import annotations

import os
import sys


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a module under this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return this process's environment and import path, so that a checkout that is not installed works too."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
