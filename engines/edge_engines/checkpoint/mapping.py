"""Say where each canonical tensor stands in a checkpoint, and account for every tensor the files hold.

A tensor that nobody asks for means that the model is not what we take it for, so it fails the export (C10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edge_engines.checkpoint.spec import Float32, ModelSpec, tensor_shapes
from edge_runtime.errors import CheckpointError

# Tables that older exports saved although they follow from the configuration.
DERIVED_SUFFIXES = ("rotary_emb.inv_freq",)
UNTIED = "tie_word_embeddings is false, so the model needs a head of its own: download all weight files again"
COMPARE_CHUNK = 1 << 22  # bytes


@dataclass(frozen=True, slots=True)
class Source:
    """One canonical tensor in the files' terms."""

    name: str
    rows: tuple[int, int] | None = None  # [start, stop) of a fused tensor; None = all of it
    paired_heads: int = 0  # rotary pairs lie side by side in so many heads: bring them to the half-split order


class TensorStore(Protocol):
    """Tensors in mapped files: shapes at once, values when asked for."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor in the files, in the file's names."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        ...

    def read(self, name: str, rows: tuple[int, int] | None = None) -> Float32:
        """Return a new float32 array of the tensor, or of some of its rows."""
        ...

    def stored(self, name: str) -> tuple[str, NDArray[np.uint8]]:
        """Return the storage type and the mapped bytes."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...


def read_source(store: TensorStore, source: Source) -> Float32:
    """Return the canonical tensor that `source` describes."""
    values = store.read(source.name, source.rows)
    if not source.paired_heads:
        return values
    # Rows [head, pair, 2] -> [head, 2, pair]: even rows of a head first, then odd ones. The same for a bias vector.
    paired = values.reshape(source.paired_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(values.shape)


def check_tensors(
    spec: ModelSpec,
    sources: Mapping[str, Source],
    store: TensorStore,
    file: str,
    consumed: frozenset[str] = frozenset(),
) -> None:
    """Raise CheckpointError unless the files hold exactly the tensors of `spec`, each in its shape.

    `consumed` are source tensors already used elsewhere (the rotary factors of a GGUF file).
    """
    rows_used: dict[str, int] = {}
    for name, shape in tensor_shapes(spec):
        source = sources[name]
        remedy = UNTIED if name == "head" else "download all weight files again or check the configuration"
        rows_used[source.name] = rows_used.get(source.name, 0) + _check_one(source, shape, store, file, remedy)
    for source_name, rows in rows_used.items():
        if rows != store.shapes[source_name][0]:
            raise CheckpointError(
                f"{file}: tensor {source_name} has {store.shapes[source_name][0]} rows, "
                f"but the configuration describes {rows}"
            )
    _refuse_unconsumed(store.shapes.keys() - rows_used.keys() - consumed, file)


def check_tied_head(embed: str, head: str, store: TensorStore, file: str) -> None:
    """Raise CheckpointError if a model that ties its head also holds another head (C05)."""
    if head in store.shapes and not is_same_tensor(store, embed, head):
        raise CheckpointError(
            f"{file}: tie_word_embeddings is true, but {head} is not a copy of {embed}",
            remedy="set tie_word_embeddings to false if the head was trained on its own",
        )


def is_same_tensor(store: TensorStore, first: str, second: str) -> bool:
    """Tell whether two tensors are stored byte for byte alike; stops at the first difference."""
    (type_a, a), (type_b, b) = store.stored(first), store.stored(second)
    if type_a != type_b or store.shapes[first] != store.shapes[second]:
        return False
    chunks = range(0, a.size, COMPARE_CHUNK)
    return all(np.array_equal(a[i : i + COMPARE_CHUNK], b[i : i + COMPARE_CHUNK]) for i in chunks)


def _check_one(source: Source, shape: tuple[int, ...], store: TensorStore, file: str, remedy: str) -> int:
    """Check one tensor and return how many rows of its source it uses."""
    if source.name not in store.shapes:
        raise CheckpointError(
            f"{file}: tensor {source.name} {list(shape)} is missing",
            remedy=remedy,
        )
    actual = store.shapes[source.name]
    used = (source.rows[1] - source.rows[0], *actual[1:]) if source.rows else actual
    if used != shape or (source.rows and source.rows[1] > actual[0]):
        raise CheckpointError(f"{file}: tensor {source.name} has shape {list(actual)}, expected {list(shape)}")
    return shape[0]


def _refuse_unconsumed(names: set[str], file: str) -> None:
    left = sorted(name for name in names if not name.endswith(DERIVED_SUFFIXES))
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise CheckpointError(
            f"{file}: tensor {left[0]}{more} is not part of the model that the configuration describes",
            remedy="check model_type and the bias flags: leaving a weight out would change the answers",
        )
