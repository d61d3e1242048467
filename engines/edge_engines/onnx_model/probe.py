"""Run a finished graph in a process of its own: `python -m edge_engines.onnx_model.probe GRAPH FEEDS.npz ANSWERS.npz`.

A process of its own, because a graph that crashes ONNX Runtime or is killed for memory must not take the build with it.
Answers one batch per line of standard input with a line of standard output, until the input ends; the two files are
written over each time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edge_engines.onnx_model.named_arrays import read_named, write_named
from edge_engines.onnx_model.session import Session
from edge_runtime.errors import EdgeError


def main() -> int:
    """Answer batches."""
    graph, feeds, answers = (Path(argument) for argument in sys.argv[1:4])
    try:
        session = Session(graph)
        for _ in sys.stdin.buffer:
            write_named(answers, session.run(read_named(feeds)))
            sys.stdout.buffer.write(b"\n")
            sys.stdout.buffer.flush()
    except EdgeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
