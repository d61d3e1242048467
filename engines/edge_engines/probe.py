"""Run a fixed prompt through an engine in a process of its own: `python -m edge_engines.probe FOLDER` < ids > logits.

A process of its own, because an engine that crashes or is killed for memory must not take the build with it, and
because what it allocates is gone before the next step. Reads the manifest as JSON, a line feed and the ids as JSON from
standard input; writes an .npz with `whole` and `stepwise` [V] to standard output.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import msgspec
import numpy as np

from edge_runtime.backends import BackendOptions, open_backend
from edge_runtime.errors import EdgeError
from edge_runtime.manifest import Manifest
from edge_runtime.session.session import Session


def main() -> int:
    """Prefill the ids at once in slot 0 and one by one in the last slot, and write the last logits of both."""
    folder = Path(sys.argv[1])
    manifest_json, ids_json = sys.stdin.buffer.read().split(b"\n", 1)
    manifest, ids = msgspec.json.decode(manifest_json, type=Manifest), json.loads(ids_json)
    try:
        with Session(open_backend(folder, manifest, BackendOptions())) as session:
            whole = session.prefill(0, ids).copy()
            last = manifest.geometry.max_batch - 1
            for position, token in enumerate(ids):
                stepwise = session.decode([last], [token], [position])[0].copy()
    except EdgeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    out = io.BytesIO()
    np.savez(out, whole=whole, stepwise=stepwise)
    sys.stdout.buffer.write(out.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())
