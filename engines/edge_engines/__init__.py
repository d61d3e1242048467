"""Turn a checkpoint into an engine folder.

The importable surface, kept stable: `edge_engines.build(checkpoint, out, ...)`, described in edge_engines.pipeline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_engines.pipeline import build

__all__ = ["build"]


def __getattr__(name: str) -> Any:
    """Import the pipeline, and onnx with it, when `build` is first asked for."""
    if name == "build":
        from edge_engines.pipeline import build  # noqa: PLC0415

        return build
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
