"""Turn a checkpoint into an engine folder.

The importable surface, kept stable: `edge_engines.build(checkpoint, out, ...)`, described in edge_engines.pipeline, and
the options that it takes: Int8Options, CompileOptions.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_engines.compile.tensorrt import CompileOptions
    from edge_engines.int8_build import Int8Options
    from edge_engines.pipeline import build

__all__ = ["CompileOptions", "Int8Options", "build"]

_HOMES = {"build": "pipeline", "Int8Options": "int8_build", "CompileOptions": "compile.tensorrt"}


def __getattr__(name: str) -> Any:
    """Import what is asked for, and onnx with it, when it is first asked for."""
    if name in _HOMES:
        return getattr(import_module(f"edge_engines.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
