"""The device half of edge-runtime: sessions, serving, the daemon and its MQTT client.

The importable surface, kept stable: `open_session`, `Session`, `EdgeError` here, and `edge_runtime.client.Client`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from edge_runtime.errors import EdgeError

if TYPE_CHECKING:
    from pathlib import Path

    from edge_runtime.session.session import Session

try:
    __version__ = version("edge-runtime")
except PackageNotFoundError:  # an uninstalled checkout
    __version__ = "0.0.0"

__all__ = ["EdgeError", "__version__", "open_session"]


def open_session(
    folder: str | Path,
    *,
    threads: int = 0,
    spinning: bool | None = None,
    verify_rows: int = 16,
    check_digests: bool = True,
) -> Session:
    """Load the engine in `folder` and return its session, a context manager.

    `threads` 0 means the physical cores available to this process; `spinning` None means the backend's default. Raises
    EngineRefusedError before anything is loaded when the folder fails its manifest.
    """
    from edge_runtime.session.session import Session  # noqa: PLC0415  # keeps `import edge_runtime` free of numpy

    return Session.open(
        folder, threads=threads, spinning=spinning, verify_rows=verify_rows, check_digests=check_digests
    )
