"""Let baseline and engine continue the same prompts, greedily, so that a person can see what INT8 does to the text.

`python -m edge_engines.samples FOLDER` < prompts > answers is the engine's half, in a process of its own for the
reasons of `probe`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import numpy as np

from edge_engines.checkpoint.open import Checkpoint
from edge_engines.child_python import child_command, child_environment
from edge_engines.progress import Progress
from edge_engines.report.data import Sample
from edge_engines.sensitivity.blocks import multiply_exactly
from edge_engines.sensitivity.command import FIXED_NOW
from edge_engines.sensitivity.passes import Passes
from edge_runtime.backends import BackendOptions, open_backend
from edge_runtime.errors import BuildError, EdgeError
from edge_runtime.manifest import Manifest
from edge_runtime.session.session import Session
from edge_runtime.session.text import TextCodec

QUESTIONS = (
    "What is the capital of France?",
    "A pump in a cooling loop makes a grinding noise. Name two likely causes.",
    "Write one sentence about the sea.",
)
NUM_NEW = 24


def write_samples(
    folder: Path, manifest: Manifest, model: Checkpoint, progress: Progress, *, questions: Sequence[str] = QUESTIONS
) -> list[Sample]:
    """Return what the FP32 model and the engine in `folder` answer; nothing without a tokenizer.

    The baseline has no KV cache here, so each of its tokens costs a pass over the text so far. Raises BuildError when
    the engine does not run.
    """
    if model.text is None:
        return []
    codec = TextCodec.load(folder, now=lambda: FIXED_NOW)
    has_template = model.text.chat_template is not None
    asked = {question: _encode(codec, question, has_template) for question in questions}
    asked = {question: ids for question, ids in asked.items() if len(ids) + NUM_NEW <= manifest.geometry.capacity}
    progress.step("writing samples of text", len(asked) * NUM_NEW)
    answers = _ask_engine(folder, manifest, list(asked.values()), codec.eos_ids)
    passes = Passes(model.spec, model)
    return [
        Sample(question, codec.decode(_continue_exactly(passes, ids, codec.eos_ids, progress)), codec.decode(answer))
        for (question, ids), answer in zip(asked.items(), answers, strict=True)
    ]


def _encode(codec: TextCodec, question: str, has_template: bool) -> list[int]:
    return codec.encode_chat([{"role": "user", "content": question}]) if has_template else codec.encode(question)


def _continue_exactly(passes: Passes, prompt: Sequence[int], stops: Collection[int], progress: Progress) -> list[int]:
    """Continue a prompt with the FP32 model."""
    ids = list(prompt)
    for _ in range(NUM_NEW):
        stream = passes.finish(passes.embed(np.array([ids])), multiply_exactly)
        (last,) = passes.logits([stream[0][-1:]])
        progress.advance(1)
        ids.append(int(last[0].argmax()))
        if ids[-1] in stops:
            return ids[len(prompt) : -1]
    return ids[len(prompt) :]


def _ask_engine(folder: Path, manifest: Manifest, prompts: list[list[int]], stops: Collection[int]) -> list[list[int]]:
    request = msgspec.json.encode(manifest) + b"\n" + json.dumps([prompts, sorted(stops)]).encode()
    command = child_command("edge_engines.samples", str(folder))
    done = subprocess.run(command, input=request, capture_output=True, env=child_environment(), check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        raise BuildError(f"the engine does not answer (exit {done.returncode}): {lines[-1]}")
    answers: list[list[int]] = json.loads(done.stdout)
    return answers


def main() -> int:
    """Continue each prompt with the engine."""
    manifest_json, request = sys.stdin.buffer.read().split(b"\n", 1)
    manifest, (prompts, stops) = msgspec.json.decode(manifest_json, type=Manifest), json.loads(request)
    try:
        with Session(open_backend(Path(sys.argv[1]), manifest, BackendOptions())) as session:
            answers = [_continue_with(session, prompt, stops) for prompt in prompts]
    except EdgeError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_status
    sys.stdout.write(json.dumps(answers))
    return 0


def _continue_with(session: Session, prompt: list[int], stops: list[int]) -> list[int]:
    answer: list[int] = []
    logits = session.prefill(0, prompt)
    while len(answer) < NUM_NEW:
        token = int(logits.argmax())
        if token in stops:
            break
        answer.append(token)
        logits = session.decode([0], [token], [len(prompt) + len(answer) - 1])[0]
    return answer


if __name__ == "__main__":
    sys.exit(main())
