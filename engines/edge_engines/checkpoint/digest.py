"""Name a checkpoint by the content of its weights and configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

Progress = Callable[[int, int], None]  # bytes done, bytes in all

CHUNK = 1 << 22  # bytes


def digest_files(files: Sequence[Path], on_progress: Progress | None = None) -> str:
    """Return the SHA-256 in hex: of the file if it is one, else of one line "digest  name" per file, by name.

    So a GGUF file has the digest that sha256sum prints, and a folder the same one wherever it lies.
    """
    total, done = sum(file.stat().st_size for file in files), 0
    lines = []
    for file in sorted(files, key=lambda file: file.name):
        content = hashlib.sha256()
        with file.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                content.update(chunk)
                done += len(chunk)
                if on_progress:
                    on_progress(done, total)
        lines.append(f"{content.hexdigest()}  {file.name}\n")
    if len(files) == 1:
        return lines[0][:64]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
