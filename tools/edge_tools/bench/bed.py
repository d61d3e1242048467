"""Hold what every suite needs: the session with its clock, seeded token ids and the bytes a step must read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_runtime.backends import Backend
from edge_runtime.manifest import Manifest
from edge_runtime.session.sampling import Sampler, SamplingParams
from edge_runtime.session.session import Session
from edge_tools.bench.clocked import ClockedBackend

PROMPT = 37  # tokens of a short chat prompt; the length at which the peers were measured
WARM_UP_STEPS = 4


@dataclass(frozen=True, slots=True)
class Decoded:
    """Times of decode steps, in milliseconds: session and sampling together, and the engine call inside."""

    step_ms: list[float]
    engine_ms: list[float]

    @property
    def outside_ms(self) -> list[float]:
        """What Python adds to each engine call."""
        return [step - engine for step, engine in zip(self.step_ms, self.engine_ms, strict=True)]


class Bed:
    """One loaded engine under measurement; everything random comes from `seed`."""

    def __init__(self, backend: Backend, seed: int) -> None:
        self._clock = ClockedBackend(backend)
        self._session = Session(self._clock)
        self.seed = seed
        self._random = np.random.default_rng(seed)
        self.manifest: Manifest = backend.manifest

    @property
    def slots(self) -> int:
        """B, slots of the engine."""
        return self.manifest.geometry.max_batch

    @property
    def capacity(self) -> int:
        """C, tokens per slot."""
        return self.manifest.geometry.capacity

    def warm_up(self) -> None:
        """Touch every path that is measured, so that no first-time cost is counted."""
        for slot in range(self.slots):
            self.prefill_ms(slot, min(PROMPT, self.capacity - WARM_UP_STEPS))
            self.decode([slot], min(PROMPT, self.capacity - WARM_UP_STEPS), WARM_UP_STEPS)
        self.decode(range(self.slots), min(PROMPT, self.capacity - WARM_UP_STEPS), WARM_UP_STEPS)

    def prefill_ms(self, slot: int, count: int) -> float:
        """Fill rows [0, count) of a slot in one call and return its time in milliseconds."""
        ids = self._random_ids(count)
        begun = time.perf_counter()
        self._session.prefill(slot, ids)
        return (time.perf_counter() - begun) * 1e3

    def decode(self, slots: Sequence[int], start: int, steps: int) -> Decoded:
        """Decode greedily on `slots`, each at position `start`, `steps` times."""
        model, vocab = self.manifest.model, self.manifest.geometry.vocab
        samplers = [Sampler(SamplingParams(), model.known_ids, vocab) for _ in slots]
        ids = self._random_ids(len(slots))
        self._clock.steps_ms.clear()
        step_ms = []
        for position in range(start, start + steps):
            begun = time.perf_counter()
            logits = self._session.decode(slots, ids, [position] * len(slots))
            ids = [sampler.sample(row) for sampler, row in zip(samplers, logits, strict=True)]
            step_ms.append((time.perf_counter() - begun) * 1e3)
        return Decoded(step_ms, list(self._clock.steps_ms))

    def limit_ms(self, slots: int, length: float, bandwidth_gb_s: float) -> float:
        """Return the least time a decode step can take: its bytes over the read bandwidth.

        The bytes are all weights once, and the valid KV rows (`length`) of each slot. Source: the roofline of a step
        whose arithmetic is free.
        """
        g = self.manifest.geometry
        row_bytes = self.manifest.kv_bytes / (g.max_batch * g.capacity)
        return (self.manifest.weight_bytes + slots * length * row_bytes) / (bandwidth_gb_s * 1e6)

    def facts(self) -> dict[str, str]:
        """Facts of the backend."""
        return self._session.facts()

    def close(self) -> None:
        """Free the engine."""
        self._session.close()

    def _random_ids(self, count: int) -> list[int]:
        """Draw token ids: the time of a step does not depend on what they mean."""
        return [int(i) for i in self._random.integers(0, self.manifest.model.known_ids, count)]
