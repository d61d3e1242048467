"""Compare our speed with ONNX Runtime GenAI: same FP32 weights, same threads, one interleaved run.

    .venv/bin/python tools/compare/compare_genai.py [--threads N] [--rounds N] [--home FOLDER]

Needs this project with its `build` and `cpu` extras, Linux, and the network on the first run: the peer and the torch
that its model builder asks for are installed into an environment of their own below --home (about 1.5 GB), and three
forms of the model are written there, and our engine (0.5 GB each). Later runs take what is there; our engine is built
anew each time. `--help` lists the options.

What makes the comparison fair:

- The peer is given the FP32 weights that our checkpoint reader returns, through its own model builder.
- It runs at its best: our thread count, its shared KV buffer reused from run to run, and of three ways to build and two
  ways to spin the ones that a trial finds fastest. Ours runs as shipped.
- Each engine is a process; one computes while the other is idle, checked by its processor time. Who goes first
  alternates from round to round.
- Both times include greedy sampling: `append_tokens` + first `generate_next_token` against `prefill` + sampling, and
  `generate_next_token` against `decode` + sampling.
- The first tokens of both must be the same, or nothing is measured.

A ratio is their time over ours (above 1: we are faster): the median over the rounds, with the range that holds the
middle half of them.
Progress goes to stderr, the table to stdout; the last line is one JSON object. Exit status 0 says that it was measured,
not that a target was met.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    # Works in a checkout that is not installed, too.
    sys.path[:0] = [str(root), str(root / "engines"), str(root / "tools")]
    from compare.command import run

    sys.exit(run(sys.argv[1:]))
