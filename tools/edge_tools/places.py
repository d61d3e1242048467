"""Say where the command line keeps what it fetches: the user's cache, never the installation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

FOLDER = "edge-runtime"


def cache_folder(env: Mapping[str, str]) -> Path:
    """Return `$XDG_CACHE_HOME/edge-runtime`, or `~/.cache/edge-runtime` (the variable counts only when absolute)."""
    given = Path(env.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / FOLDER
