"""Measure two engines in turn: which block follows which, and who goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import median
from typing import Literal, Protocol

from compare.ratios import Figure, Sample, figure_of
from edge_engines.progress import Progress
from edge_runtime.errors import EdgeError

Prompt = tuple[int, ...]
Kind = Literal["prefill", "decode"]
CAPACITY = 512
BATCHES = (1, 2)
PREFILLS = 3  # of each prompt in each round: a single one is too easily disturbed
SAME_TOKENS = 8  # must agree; later a near tie may fall either way by rounding
TARGETS: dict[Kind, float] = {"prefill": 2.0, "decode": 0.95}


class Timed(Protocol):
    """What is asked of an engine; EngineProcess is one."""

    def prefill_ms(self, prompts: Sequence[Sequence[int]]) -> float:
        """See EngineProcess."""
        ...

    def decode_ms(self, steps: int) -> list[float]:
        """See EngineProcess."""
        ...

    def ids(self) -> list[list[int]]:
        """See EngineProcess."""
        ...

    def wait_until_quiet(self) -> None:
        """See EngineProcess."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured in each round, at batch 1 and at batch 2."""

    prompts: tuple[Prompt, ...]
    tokens: int  # decoded after each prompt
    rounds: int


def agreed_tokens(ours: Timed, theirs: Timed, plan: Plan, least: int = SAME_TOKENS) -> dict[str, int]:
    """Return, by batch and prompt length, how many first tokens are the same in both engines; a warm-up as well.

    Raises EdgeError when fewer than `least` are: then they don't compute the same.
    """
    agreed = {}
    for batch, prompt in _cases(plan):
        rows = [_answers(engine, batch, prompt, plan.tokens) for engine in (ours, theirs)]
        short = [row for row in (*rows[0], *rows[1]) if len(row) != plan.tokens + 1]
        if short:
            raise EdgeError(f"an engine gave {len(short[0])} tokens instead of {plan.tokens + 1}: nothing was measured")
        same = min(count_same(a, b) for a, b in zip(*rows, strict=True))
        if same < least:
            raise EdgeError(
                f"batch {batch}, prompt of {len(prompt)}: the engines agree on the first {same} tokens only "
                f"(ours {rows[0][0][:SAME_TOKENS]}, the peer {rows[1][0][:SAME_TOKENS]}): nothing was measured"
            )
        agreed[f"{batch}x{len(prompt)}"] = same
    return agreed


def measure_rounds(ours: Timed, theirs: Timed, plan: Plan, progress: Progress) -> list[Figure]:
    """Run all rounds and return a figure for each kind of step, batch and prompt."""
    samples: dict[tuple[Kind, int, int], list[Sample]] = {}
    progress.step(f"{plan.rounds} interleaved rounds", plan.rounds)
    for number in range(plan.rounds):
        for batch, prompt in _cases(plan):
            # Drift within a block falls on each engine as often as on the other.
            swapped = bool(number % 2)
            for kind in TARGETS:
                sample = _measure(kind, ours, theirs, swapped, [prompt] * batch, plan.tokens)
                samples.setdefault((kind, batch, len(prompt)), []).append(sample)
        progress.advance(1)
    return [figure_of(*key, taken, TARGETS[key[0]]) for key, taken in sorted(samples.items())]


def answer_ms(engine: Timed, plan: Plan) -> float:
    """Return the time of the longest prompt and its tokens at batch 1: the least of each of PREFILLS runs.

    The least, because it judges one engine alone: others' work on the machine only adds.
    """
    prompt = max(plan.prompts, key=len)
    runs = [(engine.prefill_ms([prompt]), median(engine.decode_ms(plan.tokens))) for _ in range(PREFILLS + 1)][1:]
    return min(prefill for prefill, _ in runs) + plan.tokens * min(decode for _, decode in runs)


def count_same(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many first ids are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True)))


def _measure(kind: Kind, ours: Timed, theirs: Timed, swapped: bool, prompts: Sequence[Prompt], tokens: int) -> Sample:
    """Time one block on each engine, while the other one is quiet."""
    times = {}
    for engine in (theirs, ours) if swapped else (ours, theirs):
        theirs.wait_until_quiet()
        ours.wait_until_quiet()
        if kind == "prefill":
            times[engine] = median(engine.prefill_ms(prompts) for _ in range(PREFILLS))
        else:
            times[engine] = median(engine.decode_ms(tokens))
    return Sample(times[ours], times[theirs])


def _answers(engine: Timed, batch: int, prompt: Prompt, tokens: int) -> list[list[int]]:
    engine.prefill_ms([prompt] * batch)
    engine.decode_ms(tokens)
    return engine.ids()


def _cases(plan: Plan) -> list[tuple[int, Prompt]]:
    return [(batch, prompt) for batch in BATCHES for prompt in plan.prompts]
