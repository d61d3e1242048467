"""Run our engine in the comparison: prefill, decode and greedy sampling, as the serving loop does."""

from __future__ import annotations

import sys
from pathlib import Path

from compare.engine_loop import serve
from edge_runtime import open_session
from edge_runtime.session.sampling import Sampler, SamplingParams
from edge_runtime.session.session import Session

SPINNING = {"shipped": None, "on": True, "off": False}


class OurEngine:
    """See TimedEngine."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._vocab, self._known_ids = session.geometry.vocab, session.manifest.model.known_ids
        self._samplers: list[Sampler] = []
        self._chosen: list[list[int]] = []
        self._position = 0

    def facts(self) -> dict[str, str]:
        """See TimedEngine.facts."""
        return self._session.facts()

    def reset(self, batch: int) -> None:
        """See TimedEngine.reset."""
        self._samplers = [Sampler(SamplingParams(), self._known_ids, self._vocab) for _ in range(batch)]
        for slot in range(batch):
            self._session.reset(slot)

    def prefill(self, prompts: list[list[int]]) -> None:
        """See TimedEngine.prefill."""
        self._position = len(prompts[0])
        self._chosen = [
            [sampler.sample(self._session.prefill(slot, ids))]
            for slot, (sampler, ids) in enumerate(zip(self._samplers, prompts, strict=True))
        ]

    def decode(self) -> None:
        """See TimedEngine.decode."""
        slots = range(len(self._samplers))
        logits = self._session.decode(slots, [ids[-1] for ids in self._chosen], [self._position] * len(slots))
        for sampler, ids, row in zip(self._samplers, self._chosen, logits, strict=True):
            ids.append(sampler.sample(row))
        self._position += 1

    def ids(self) -> list[list[int]]:
        """See TimedEngine.ids."""
        return self._chosen


if __name__ == "__main__":
    folder, threads, spinning = sys.argv[1:]
    with open_session(Path(folder), threads=int(threads), spinning=SPINNING[spinning]) as opened:
        serve(lambda: OurEngine(opened))
