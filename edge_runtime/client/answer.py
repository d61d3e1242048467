"""Hold one whole answer."""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.messages import Final, FinishReason, Timings, Usage


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `finish_reason` is stop, length, cancelled or deadline; the last two are partial."""

    text: str
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    id: str
    device: str
    model: str
    seed: int | None
    attempt: int
    cached: bool
    truncated: bool
    metadata: dict[str, str]


def answer_of(frame: Final, device: str) -> Answer:
    """Read a terminal frame of `device`."""
    return Answer(
        text=frame.choices[0].message.content,
        finish_reason=frame.choices[0].finish_reason,
        usage=frame.usage,
        timings=frame.timings,
        id=frame.id,
        device=device,
        model=frame.model,
        seed=frame.seed,
        attempt=frame.attempt,
        cached=frame.cached,
        truncated=frame.truncated,
        metadata=frame.metadata,
    )
