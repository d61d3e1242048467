"""Run whole texts through an engine in a process of its own and stream the logits back.

A process of its own for the reasons of `probe`. The parent reads one sequence at a time, so memory is that of one.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec
import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import Float32
from edge_engines.child_python import child_command, child_environment
from edge_runtime.backends import BackendOptions, open_backend
from edge_runtime.errors import BuildError, EdgeError
from edge_runtime.manifest import Manifest
from edge_runtime.session.session import Session

CHUNK = 64  # positions per step: what the daemon prefills at once, and how many rows of logits a step returns here


def engine_logits(folder: Path, manifest: Manifest, ids: NDArray[np.int64]) -> Iterator[Float32]:
    """Yield the logits [S, V] of each sequence of `ids` [N, S]; S is at most the engine's capacity.

    Raises BuildError when the engine does not load or dies.
    """
    vocab, length = manifest.geometry.vocab, ids.shape[1]
    with tempfile.TemporaryFile() as complaints:
        child = subprocess.Popen(
            child_command("edge_engines.text_run", str(folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=child_environment(),
        )
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _send(child.stdin, manifest, ids)
            for _ in ids:
                raw = child.stdout.read(length * vocab * 4)
                if len(raw) < length * vocab * 4:
                    raise BuildError(_how_it_ended(child, complaints), remedy="nothing was written")
                yield np.frombuffer(raw, np.float32).reshape(length, vocab).copy()
        finally:
            child.kill()
            child.stdout.close()
            child.wait()


def _send(stream: IO[bytes], manifest: Manifest, ids: NDArray[np.int64]) -> None:
    packed = io.BytesIO()
    np.save(packed, ids)
    try:
        stream.write(msgspec.json.encode(manifest) + b"\n" + packed.getvalue())
        stream.close()
    except BrokenPipeError:
        pass  # it has died: reading says how


def _how_it_ended(child: subprocess.Popen[bytes], complaints: IO[bytes]) -> str:
    code = child.wait()
    complaints.seek(0)
    lines = complaints.read().decode(errors="replace").strip().splitlines() or ["no message"]
    how = f"signal {-code}" if code < 0 else f"exit {code}"
    return f"the engine does not run through the text ({how}): {lines[-1]}"


def main() -> int:
    """Run each sequence in slot 0 from position 0 on and write its logits, float32 [S, V], to standard output."""
    folder, source = Path(sys.argv[1]), sys.stdin.buffer
    manifest = msgspec.json.decode(source.readline(), type=Manifest)
    ids = np.load(io.BytesIO(source.read()))
    try:
        with Session(open_backend(folder, manifest, BackendOptions(verify_rows=CHUNK))) as session:
            for row in ids.tolist():
                for start in range(0, len(row), CHUNK):
                    logits = session.verify(0, row[start : start + CHUNK], start)
                    sys.stdout.buffer.write(logits.tobytes())
    except EdgeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
