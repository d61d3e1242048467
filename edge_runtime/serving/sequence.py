"""Follow one request from its prompt to its finish reason. No slots are chosen here, no I/O, no clock.

A sequence grows by one sampled token at a time. Prompt plus output never exceed the capacity of a slot, so the last
token of a full slot is an answer whose own KV row is never written.
"""

from __future__ import annotations

import enum
from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edge_runtime.messages import FinishReason
from edge_runtime.session.detokenizer import Detokenizer
from edge_runtime.session.sampling import Sampler
from edge_runtime.session.stops import StopFilter


class State(enum.Enum):
    """Where a sequence stands; it only ever moves down this list."""

    WAITING = "waiting"  # no slot yet
    PREFILLING = "prefilling"  # in a slot, prompt rows still to come
    DECODING = "decoding"  # the last output token is the next input
    DONE = "done"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One request as data. `position` counts the KV rows that its slot holds for it."""

    key: int
    prompt: list[int]  # at least one id
    sampler: Sampler
    detokenizer: Detokenizer
    stops: StopFilter
    stop_ids: Set[int]  # ids that end the answer and are no part of it
    max_tokens: int  # >= 1
    capacity: int  # C
    state: State = State.WAITING
    slot: int | None = None
    position: int = 0
    output: list[int] = field(default_factory=list)  # without the id that ended it
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All text given out so far: whole code points, no stop string."""
        return "".join(self.pieces)

    @property
    def is_done(self) -> bool:
        """Whether the answer has ended, for whatever reason."""
        return self.state is State.DONE

    def advance(self, rows: int) -> None:
        """Note that a step wrote `rows` more KV rows; with the whole prompt written the sequence decodes."""
        self.position += rows
        if self.state is State.PREFILLING and self.position == len(self.prompt):
            self.state = State.DECODING

    def sample(self, logits: NDArray[np.float32]) -> int:
        """Choose the next token from `logits` [V]. Raises RequestError("numeric_error")."""
        token = self.sampler.sample(logits)
        self.sampler.observe((token,))
        return token

    def append(self, token: int) -> str:
        """Take the next token of the answer and return the text that is now certain.

        The last token sets `finish_reason`: `stop` for a stop id or a complete stop string, even on the last allowed
        token, else `length` at `max_tokens` or in a full slot.
        """
        if token in self.stop_ids:
            return self.finish("stop")
        self.output.append(token)
        text, is_stopped = self.stops.push(self.detokenizer.push(token))
        self.pieces.append(text)
        if is_stopped:
            return text + self.finish("stop")
        if len(self.output) >= self.max_tokens or len(self.prompt) + len(self.output) >= self.capacity:
            return text + self.finish("length")
        return text

    def finish(self, reason: FinishReason | None) -> str:
        """End the answer and return the text held back until now; None is a failure. Later calls change nothing."""
        if self.is_done:
            return ""
        self.state = State.DONE
        self.finish_reason = reason
        tail = self.stops.push(self.detokenizer.flush())[0] + self.stops.flush()
        self.pieces.append(tail)
        return tail
