"""Keep what the float original answers, on disk: other graphs are held against it batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_engines.onnx_model.named_arrays import read_named, write_named
from edge_engines.onnx_model.outputs import (
    Agreement,
    Outputs,
    SampleErrors,
    agreement,
    check_finite,
    compare,
    has_classes,
)
from edge_engines.onnx_model.samples import Array, Batch, Samples
from edge_engines.onnx_model.session import Session
from edge_engines.progress import Progress
from edge_runtime.errors import BuildError

_SAME = 1e-3  # relative error between a sample alone and in a batch that rounding explains; FP32 kernels differ by size


@dataclass(frozen=True, slots=True)
class Baseline:
    """The original's outputs on one set of samples."""

    samples: Samples
    indexes: Sequence[int]
    files: Sequence[Path]  # one per batch

    def batches(self) -> Iterator[tuple[Batch, Outputs]]:
        """Yield each batch with the original's outputs, one batch in memory at a time."""
        for batch, file in zip(self.samples.batches(self.indexes), self.files, strict=True):
            yield batch, read_named(file)

    def agree(self, answer: Callable[[Batch], Outputs]) -> Agreement:
        """Hold another graph against the original; `answer` gives its outputs of a batch."""
        errors: list[SampleErrors] = [compare(wanted, answer(batch), batch) for batch, wanted in self.batches()]
        return agreement(errors)

    def has_classes(self) -> bool:
        """Say whether an output looks like the scores of classes."""
        _, outputs = next(self.batches())
        return any(has_classes(name, values) for name, values in outputs.items())


def keep_baseline(
    session: Session, samples: Samples, indexes: Sequence[int], folder: Path, name: str, progress: Progress
) -> Baseline:
    """Run the original on a set. Raises BuildError when it fails or gives NaN."""
    files = []
    for number, batch in enumerate(samples.batches(indexes)):
        outputs = session.run(batch.feeds)
        check_finite(outputs)
        file = folder / f"{name}-{number:06}.npz"
        write_named(file, outputs)
        files.append(file)
        progress.advance(batch.count)
    return Baseline(samples, indexes, files)


def may_batch(session: Session, samples: Samples, indexes: Sequence[int]) -> bool:
    """Say whether samples give the same answers together as alone: two are tried, and of different content."""
    pair = samples.batched(2)
    together = next(pair.batches(indexes[:2]))
    if together.count < 2 or any(len(values) != 2 for values in together.feeds.values()):
        return False
    try:
        joint = session.run(together.feeds)
    except BuildError:  # its first axis is no batch
        return False
    for i, alone in enumerate(samples.batched(1).batches(indexes[:2])):
        for name, wanted in session.run(alone.feeds).items():
            part = joint[name][i : i + 1] if joint[name].ndim and len(joint[name]) == 2 else None
            if part is None or part.shape != wanted.shape or not _close(part, wanted):
                return False
    return True


def _close(one: Array, other: Array) -> bool:
    return bool(np.linalg.norm(one.astype(np.float64) - other) <= _SAME * np.linalg.norm(other.astype(np.float64)))
