"""Say what to install when a verb needs a part of the product that is an optional extra."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edge_runtime.errors import UsageError


@contextmanager
def needs_extra(doing: str, extra: str = "build,cpu") -> Iterator[None]:
    """Turn the import of a package that is not installed, inside this context, into a UsageError with the remedy."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"{doing} needs the Python package {error.name}", remedy=f"run: pip install 'edge-runtime[{extra}]'"
        ) from error
