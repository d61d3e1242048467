"""Decide which request gets which slot and what the next step computes. No clock, no I/O, no engine.

Requests start in the order of their arrival. A prompt is prefilled in chunks; as soon as another request decodes, every
chunk is followed by a decode step, so a long prompt holds a running answer up by one chunk at most. Requests that
decode share a step; one alone decodes as batch 1 in its own slot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from edge_runtime.errors import RequestError
from edge_runtime.serving.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Prefill:
    """Run `ids` [S], S <= chunk, at positions start .. start + S - 1 of the sequence's slot."""

    seq: Sequence
    ids: list[int]
    start: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is complete after this chunk, so that its logits give the first token."""
        return self.start + len(self.ids) == len(self.seq.prompt)


@dataclass(frozen=True, slots=True)
class Decode:
    """Run the last token of each sequence (1..B, in slot order) at its position."""

    seqs: tuple[Sequence, ...]


Step = Prefill | Decode


class Scheduler:
    """The waiting queue and the slots: `slots` of 1..B, beyond them at most `max_waiting` requests."""

    def __init__(self, *, slots: int, chunk: int, max_waiting: int) -> None:
        assert slots >= 1
        assert chunk >= 1
        assert max_waiting >= 0
        self._num_slots = slots
        self._chunk = chunk  # prompt tokens per prefill step, at most
        self._max_waiting = max_waiting
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in the order of their start
        self._is_decode_due = False

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Requests without a slot, the next one first."""
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Requests in a slot, in the order of their start."""
        return tuple(self._running)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        return not self._waiting and not self._running

    def submit(self, seq: Sequence) -> None:
        """Queue a request. Raises RequestError("queue_full")."""
        held = len(self._waiting) + len(self._running)
        if held >= self._num_slots + self._max_waiting:
            raise RequestError("queue_full", f"{held} requests are held, no more are taken; try again later")
        self._waiting.append(seq)

    def next_step(self) -> Step | None:
        """Give free slots to waiting requests, then name what to compute next; None when idle.

        The caller runs the step, tells each sequence of it (`advance`, `append`) and hands the ended ones to `finish`.
        """
        self._fill_slots()
        decoding = [seq for seq in self._running if seq.state is State.DECODING]
        prefilling = next((seq for seq in self._running if seq.state is State.PREFILLING), None)
        if prefilling is None or (decoding and self._is_decode_due):
            self._is_decode_due = False
            return Decode(tuple(sorted(decoding, key=_slot_of))) if decoding else None
        self._is_decode_due = True
        start = prefilling.position
        return Prefill(prefilling, prefilling.prompt[start : start + self._chunk], start)

    def cancel(self, key: int) -> Sequence | None:
        """Take a waiting or running request out and return it; None when no such key is held."""
        seq = next((seq for seq in (*self._running, *self._waiting) if seq.key == key), None)
        if seq is not None:
            self.finish(seq)
        return seq

    def finish(self, seq: Sequence) -> None:
        """Free the slot, or the place in the queue, of a request that has ended."""
        if seq.slot is None:
            self._waiting.remove(seq)
        else:
            self._running.remove(seq)
            seq.slot = None

    def _fill_slots(self) -> None:
        while self._waiting and len(self._running) < self._num_slots:
            taken = {seq.slot for seq in self._running}
            seq = self._waiting.popleft()
            seq.slot = min(slot for slot in range(self._num_slots) if slot not in taken)
            seq.state = State.PREFILLING
            self._running.append(seq)


def _slot_of(seq: Sequence) -> int:
    assert seq.slot is not None
    return seq.slot
