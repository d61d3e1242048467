"""Hold a finished engine against the plain reference on a fixed prompt, before it is put in place.

This tells a working engine from noise (case C27); whether a quantised one is accurate enough is the gate's question.
"""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edge_engines.checkpoint.spec import ModelSpec, TextAssets, Weights
from edge_engines.child_python import child_command, child_environment
from edge_engines.reference import logits
from edge_runtime.errors import BuildError
from edge_runtime.manifest import Manifest, VerifyFacts

PROMPT = "The water pump on line three was replaced in March because its bearing had worn out."
NUM_IDS = 12
# Relative L2 error of the last logits. FP32 and FP16: ten times what rounding gave on the models of the tests. w8:
# random weights reach 0.15 with INT8 activations by block, unrelated logits are near 1.4. int8 and auto: the gate says
# how good; all of it in 4 bits reaches 0.5 with random weights.
LIMITS = {"fp32": 1e-4, "fp16": 0.05, "w8": 0.4, "int8": 0.4, "auto": 0.7}


def verify_engine(folder: Path, manifest: Manifest, ids: Sequence[int], expected: NDArray[np.float64]) -> VerifyFacts:
    """Run `ids` through the engine in `folder`, whole and token by token; compare the last logits with `expected` [V].

    Raises BuildError when the engine doesn't load, dies, or answers with something else.
    """
    answers = _probe(folder, manifest, ids)
    facts = VerifyFacts(
        tokens=len(ids),
        relative_error=_relative(answers["whole"], expected),
        limit=LIMITS["int8" if manifest.kv_dtype == "int8" else manifest.precision],
        same_top1=bool(answers["whole"].argmax() == expected.argmax()),
        chunked_error=_relative(answers["stepwise"], answers["whole"]),
    )
    if not (facts.relative_error <= facts.limit and facts.chunked_error <= facts.limit):  # NaN fails too
        raise BuildError(
            f"the engine does not compute this model: relative error of the logits {facts.relative_error:.3g} against "
            f"the reference and {facts.chunked_error:.3g} between prefill and decode, allowed is {facts.limit:g}",
            remedy="nothing was written; please report this with the model's config.json",
        )
    return facts


def fixed_ids(spec: ModelSpec, text: TextAssets | None, capacity: int) -> list[int]:
    """Return the ids of the fixed prompt; without a tokenizer, ids spread over the vocabulary."""
    wanted = min(NUM_IDS, capacity)
    if text is not None:
        ids = Tokenizer.from_str(text.tokenizer_json.decode()).encode(PROMPT, add_special_tokens=False).ids
        if len(ids) >= wanted:
            return list(ids[:wanted])
    return [int(i) for i in np.linspace(1, spec.vocab - 1, wanted)]


def reference_logits(spec: ModelSpec, weights: Weights, ids: Sequence[int]) -> NDArray[np.float64]:
    """Return the reference's logits [V] of the last id."""
    last: NDArray[np.float64] = logits(spec, weights, ids)[-1]
    return last


def _probe(folder: Path, manifest: Manifest, ids: Sequence[int]) -> dict[str, NDArray[np.float32]]:
    message = msgspec.json.encode(manifest) + b"\n" + json.dumps(list(ids)).encode()
    command = child_command("edge_engines.probe", str(folder))
    done = subprocess.run(command, input=message, capture_output=True, env=child_environment(), check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit {done.returncode}"
        raise BuildError(f"the finished engine does not run ({how}): {lines[-1]}", remedy="nothing was written")
    with np.load(io.BytesIO(done.stdout)) as answers:
        return {name: answers[name] for name in ("whole", "stepwise")}


def _relative(found: NDArray[np.floating], wanted: NDArray[np.floating]) -> float:
    return float(np.linalg.norm(found.astype(np.float64) - wanted) / np.linalg.norm(wanted))
