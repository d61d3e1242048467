"""Read one key of a model's configuration, and say what an absent or null key means for its family.

A GGUF file is translated to the same keys first (gguf_config.py); `labels` then keeps errors in the file's own words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edge_runtime.errors import CheckpointError

MAX_DIMENSION = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Config:
    """Typed access to a configuration: absent, null and present are three different cases."""

    file: str  # for messages
    values: Mapping[str, object]
    absent: Mapping[str, object] = field(default_factory=dict)  # what a missing key stands for; else it is an error
    nullable: frozenset[str] = frozenset()  # keys whose null has a meaning (None is returned)
    labels: Mapping[str, str] = field(default_factory=dict)  # key -> how the file itself calls it

    def label(self, key: str) -> str:
        """Return the name under which the file holds `key`."""
        return self.labels.get(key, key)

    def value(self, key: str) -> object:
        """Return the value, or what its absence stands for. Raises CheckpointError where neither is known."""
        if key not in self.values:
            if key in self.absent:
                return self.absent[key]
            raise CheckpointError(
                f"{self.file}: {self.label(key)} is missing, and this model family gives its absence no meaning",
                remedy="take the value from the model's publisher and add it",
            )
        value = self.values[key]
        if value is None and key not in self.nullable:
            raise CheckpointError(f"{self.file}: {self.label(key)} is null, expected a value")
        return value

    def integer(self, key: str, most: int = MAX_DIMENSION) -> int:
        """Return a whole number from 1 to `most`."""
        value = self.optional_integer(key, most)
        if value is None:
            raise self.refusal(key, None, f"a whole number from 1 to {most}")
        return value

    def optional_integer(self, key: str, most: int = MAX_DIMENSION) -> int | None:
        """Return a whole number from 1 to `most`, or None where the family lets the key be null or absent."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.refusal(key, value, f"a whole number from 1 to {most}")
        return value

    def number(self, key: str) -> float:
        """Return a finite number above 0."""
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.refusal(key, value, "a finite number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return true or false."""
        value = self.value(key)
        if not isinstance(value, bool):
            raise self.refusal(key, value, "true or false")
        return value

    def text(self, key: str) -> str:
        """Return a string."""
        value = self.value(key)
        if not isinstance(value, str):
            raise self.refusal(key, value, "a string")
        return value

    def section(self, key: str) -> Config | None:
        """Return a nested object as a Config without defaults, or None where it is null or absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(key, value, "an object")
        return Config(file=f"{self.file}: {self.label(key)}", values=value)

    def refusal(self, key: str, value: object, expected: str) -> CheckpointError:
        """Return the error for a value that is not allowed."""
        return CheckpointError(
            f"{self.file}: {self.label(key)} = {json.dumps(value, default=str)}, expected {expected}"
        )


def read_json(path: Path) -> dict[str, object]:
    """Return the object in a JSON file. Raises CheckpointError if it can't be read or holds something else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON ({error})", remedy="download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def read_optional_json(path: Path) -> dict[str, object]:
    """Return the object in a JSON file, {} if there is no such file."""
    return read_json(path) if path.is_file() else {}
