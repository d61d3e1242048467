"""Write report.json and report.html into a folder, each whole or absent."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec

from edge_engines.report.data import ReportData
from edge_engines.report.page import render_page
from edge_runtime.errors import BuildError

JSON_NAME, PAGE_NAME = "report.json", "report.html"


def write_report(folder: Path, data: ReportData) -> Path:
    """Write both files into `folder`, which is made when missing, and return the path of the page.

    Both are rendered before the first is written. Raises BuildError when the folder can't be written.
    """
    page = render_page(data).encode("utf-8")
    table = msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_whole(folder / JSON_NAME, table)
        _write_whole(folder / PAGE_NAME, page)
    except OSError as error:
        raise BuildError(
            f"{error.filename or folder}: {error.strerror}", remedy="name a folder you may write to with -o"
        ) from error
    return folder / PAGE_NAME


def _write_whole(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as stream:
        try:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
            os.chmod(stream.name, 0o644)  # made private
            os.replace(stream.name, path)
        except BaseException:
            os.unlink(stream.name)
            raise
