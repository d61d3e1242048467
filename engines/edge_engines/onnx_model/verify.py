"""Hold the finished graph, as it was written, against the original on the gate's samples, before it is put in place."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from edge_engines.child_python import child_command, child_environment
from edge_engines.onnx_model.baseline import Baseline
from edge_engines.onnx_model.named_arrays import read_named, write_named
from edge_engines.onnx_model.outputs import Agreement, Outputs
from edge_engines.onnx_model.samples import Batch
from edge_runtime.errors import BuildError


def verify_graph(graph: Path, judged: Baseline) -> Agreement:
    """Run `graph` in a child process and return how it agrees with the original. Raises BuildError when it dies."""
    with tempfile.TemporaryDirectory(prefix="edge-verify-") as folder, tempfile.TemporaryFile() as complaints:
        feeds, answers = Path(folder) / "feeds.npz", Path(folder) / "answers.npz"
        command = child_command("edge_engines.onnx_model.probe", str(graph), str(feeds), str(answers))
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=child_environment(),
            bufsize=0,
        ) as child:

            def answer(batch: Batch) -> Outputs:
                write_named(feeds, batch.feeds)
                return _ask(child, answers)

            try:
                return judged.agree(answer)
            except _ChildDiedError as error:
                complaints.seek(0)
                lines = complaints.read().decode(errors="replace").strip().splitlines() or ["no message"]
                status = child.wait()
                how = f"signal {-status}" if status < 0 else f"exit {status}"
                raise BuildError(
                    f"the finished graph does not run ({how}): {lines[-1]}", remedy="nothing was written"
                ) from error
            finally:
                child.kill()


class _ChildDiedError(Exception):
    """The child ended instead of answering."""


def _ask(child: subprocess.Popen[bytes], answers: Path) -> Outputs:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(b"\n")
    except BrokenPipeError as error:
        raise _ChildDiedError from error
    if not child.stdout.readline():
        raise _ChildDiedError
    return read_named(answers)
