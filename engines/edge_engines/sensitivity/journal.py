"""Keep what was measured in a file, so that a run that was ended goes on where it stood.

One file per checkpoint, one line per result: checksum, key, value. A key is the digest of everything that the result
depends on, so a changed weight or token finds nothing. A line that is torn or altered is as if it were not there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct

VERSION = "3"  # of what is computed: raise it when a result changes for the same inputs
_CHECKSUM = 16  # hex digits

T = TypeVar("T")


class _Record(Struct, frozen=True):
    key: str
    value: Raw


class _Store:
    """The records of one file, and the file to which new ones go."""

    def __init__(self, file: Path | None, note: Callable[[str], None]) -> None:
        self._file, self._note = file, note
        self._records = dict(_read(file)) if file is not None else {}
        self._earlier = frozenset(self._records)
        self._used: set[str] = set()

    @property
    def hits(self) -> int:
        return len(self._used)

    def find(self, key: str) -> bytes | None:
        """Return the value of a record, if there is one."""
        return self._records.get(key)

    def use(self, key: str) -> None:
        """Count a result that an earlier run has left."""
        if key in self._earlier:
            self._used.add(key)

    def append(self, key: str, value: bytes) -> None:
        """Write one record at the end. A cache that can't be written is told of once and left alone."""
        self._records[key] = value
        if self._file is None:
            return
        line = msgspec.json.encode(_Record(key, Raw(value)))
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("ab") as stream:
                stream.write(b"\n" + _checksum(line) + b" " + line)  # the newline ends what a killed run has left
        except OSError as error:
            self._note(f"warning: measurements are not kept: {self._file}: {error.strerror}")
            self._file = None


class Journal:
    """Results under one scope: what they depend on, as words and digests."""

    def __init__(self, store: _Store, scope: tuple[str, ...]) -> None:
        self._store, self._scope = store, scope

    @property
    def hits(self) -> int:
        """How many results were taken from earlier runs, in all scopes."""
        return self._store.hits

    def within(self, *parts: str) -> Journal:
        """Return the journal of results that depend on `parts` too."""
        return Journal(self._store, (*self._scope, *parts))

    def once(self, name: str, kind: type[T], measure: Callable[[], T]) -> T:
        """Return the result `name`, measuring it unless it is there. `kind` is what msgspec decodes it to."""
        key = hashlib.sha256("\0".join((*self._scope, name)).encode()).hexdigest()
        stored = self._store.find(key)
        if stored is not None:
            try:
                found = msgspec.json.decode(stored, type=kind)
            except msgspec.MsgspecError:
                pass  # of another kind, or not a number: measure it
            else:
                self._store.use(key)
                return found
        value = measure()
        self._store.append(key, msgspec.json.encode(value))
        return value


def open_journal(folder: Path | None, checkpoint_sha256: str, note: Callable[[str], None]) -> Journal:
    """Return the journal of a checkpoint below `folder`; None keeps results in memory only."""
    file = folder / f"{checkpoint_sha256[:16]}.journal" if folder is not None else None
    return Journal(_Store(file, note), (VERSION, checkpoint_sha256))


def _read(file: Path) -> list[tuple[str, bytes]]:
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError:
        return []
    records = []
    for line in lines:
        checksum, _, content = line.partition(b" ")
        if not content or checksum != _checksum(content):
            continue
        try:
            record = msgspec.json.decode(content, type=_Record)
        except msgspec.MsgspecError:
            continue
        records.append((record.key, bytes(record.value)))
    return records


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest()[:_CHECKSUM].encode()
