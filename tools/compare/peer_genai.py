"""Run ONNX Runtime GenAI in the comparison, by its public loop. Runs in the peer's environment."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from typing import Any

import numpy as np

from compare.engine_loop import serve


class PeerEngine:
    """See TimedEngine. A generator per batch size is kept and rewound: its buffers are allocated once, as ours are."""

    def __init__(self, folder: str, threads: int, spinning: bool, capacity: int) -> None:
        # Typed by hand: the package exists in the peer's environment only.
        import onnxruntime_genai  # type: ignore[import-not-found, unused-ignore]  # noqa: PLC0415

        self._genai: Any = onnxruntime_genai
        self._settings = {"threads": str(threads), "spinning": str(spinning).lower()}
        config = self._genai.Config(folder)
        config.overlay(json.dumps({"model": {"decoder": {"session_options": _session_options(threads, spinning)}}}))
        self._model = self._genai.Model(config)
        self._capacity = capacity
        self._generators = {batch: self._new_generator(batch) for batch in (1, 2)}
        self._batch = 1
        self._prompt_len = 0

    def facts(self) -> dict[str, str]:
        """See TimedEngine.facts."""
        names = ("onnxruntime-genai", "onnxruntime")
        return {name: version(name) for name in names} | self._settings

    def reset(self, batch: int) -> None:
        """See TimedEngine.reset."""
        self._batch = batch
        self._generators[batch].rewind_to(0)

    def prefill(self, prompts: list[list[int]]) -> None:
        """See TimedEngine.prefill."""
        self._prompt_len = len(prompts[0])
        generator = self._generators[self._batch]
        generator.append_tokens(np.asarray(prompts, np.int32))
        generator.generate_next_token()  # chooses only: the logits are there

    def decode(self) -> None:
        """See TimedEngine.decode."""
        self._generators[self._batch].generate_next_token()

    def ids(self) -> list[list[int]]:
        """See TimedEngine.ids."""
        generator = self._generators[self._batch]
        return [[int(i) for i in generator.get_sequence(row)[self._prompt_len :]] for row in range(self._batch)]

    def _new_generator(self, batch: int) -> Any:
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(do_sample=False, max_length=self._capacity, batch_size=batch)
        return self._genai.Generator(self._model, params)


def _session_options(threads: int, spinning: bool) -> dict[str, object]:
    return {
        "intra_op_num_threads": threads,
        "inter_op_num_threads": 1,
        "session.intra_op.allow_spinning": "1" if spinning else "0",
    }


if __name__ == "__main__":
    model, threads, spinning, capacity = sys.argv[1:]
    serve(lambda: PeerEngine(model, int(threads), spinning == "1", int(capacity)))
