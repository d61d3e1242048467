"""Take over from a sensitivity.json which units are in INT8, once it is known to be of this model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.sensitivity.table import read_table
from edge_runtime.errors import BuildError


class Row(Protocol):
    """What is needed of a row of the table."""

    @property
    def unit(self) -> str:
        """Name of the unit."""
        ...

    @property
    def weights(self) -> int:
        """Number of its weights."""
        ...

    @property
    def precision(self) -> str:
        """Its precision, "int8" or a float."""
        ...


def read_int8_units(path: Path, spec: ModelSpec) -> frozenset[str]:
    """Return the units that the table in `path` puts into INT8. Raises BuildError: see take_int8_units."""
    table = read_table(path)
    return take_int8_units(table.units, spec, f"{path}, measured on {table.model}")


def take_int8_units(rows: Sequence[Row], spec: ModelSpec, origin: str) -> frozenset[str]:
    """Return the units of `rows` that are in INT8; `origin` names them in messages.

    Raises BuildError when units or their sizes are not those of `spec`. Digests are not compared: that needs every
    weight to be read.
    """
    wanted, found = _unit_weights(spec), {row.unit: row.weights for row in rows}
    for unit in (*wanted, *found):
        if found.get(unit) != wanted.get(unit):
            raise BuildError(
                f"{origin}: unit {unit} has {found.get(unit, 'no')} weights, in this model {wanted.get(unit, 'none')}",
                remedy="measure this model with: edge-runtime sensitivity CHECKPOINT -o FOLDER",
            )
    return frozenset(row.unit for row in rows if row.precision == "int8")


def _unit_weights(spec: ModelSpec) -> dict[str, int]:
    """Return the number of weights of each unit, heads as wide as in the checkpoint."""
    table, q, kv = spec.vocab * spec.hidden, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    of_layer = {
        "qkv": (q + 2 * kv) * spec.hidden,
        "o": q * spec.hidden,
        "gate_up": 2 * spec.ffn * spec.hidden,
        "down": spec.ffn * spec.hidden,
    }
    body = {f"layers.{i}.{kind}": n for i in range(len(spec.layers)) for kind, n in of_layer.items()}
    return {"embed": table, **body, "head": table}
