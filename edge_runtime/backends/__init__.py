"""Run one step of an engine on some device: the Backend protocol and the one place that knows who implements it.

A backend owns the device, the loaded graph and every buffer bound to it. It knows nothing of text, sampling or
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from edge_runtime.errors import EngineRefusedError, UsageError
from edge_runtime.manifest import Manifest
from edge_runtime.memory import fits

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
KvRows = list[NDArray[np.generic]]  # key, value, key, value ... per layer, each [K, rows, D]


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """How to run, never what to compute."""

    threads: int = 0  # 0 = physical cores available to this process
    spinning: bool | None = None  # None = the backend's measured default
    verify_rows: int = 16  # most rows of logits asked for at once (speculative decoding)


class Backend(Protocol):
    """The seam between session and device. All calls come from the thread that opened it."""

    manifest: Manifest
    max_rows: int  # most rows of logits that one step may ask for

    def step(self, slots: Sequence[int], ids: Int64, starts: Int64, rows: int) -> Float32:
        """Run `ids` [n, S] on the given slots, row s of slot b at position starts[b] + s, and write their KV rows.

        Return logits [n, rows, V] of the last `rows` positions: a view of a buffer that the next call overwrites.
        Slots are one slot (S free) or all of them in order (S = 1). Arguments are already checked.
        """
        ...

    def read_rows(self, slot: int, start: int, stop: int) -> KvRows:
        """Copy KV rows [start, stop) of a slot to host memory."""
        ...

    def write_rows(self, slot: int, start: int, rows: KvRows) -> None:
        """Copy host rows into a slot at `start`."""
        ...

    def facts(self) -> dict[str, str]:
        """Name, versions, threads and device, for reports and the `info` topic."""
        ...

    def close(self) -> None:
        """Free device memory. Idempotent."""
        ...


def open_backend(folder: Path, manifest: Manifest, options: BackendOptions) -> Backend:
    """Load the engine in `folder` with the backend its target asks for.

    Raises BackendError or NoDeviceError, and what `check_loadable` raises.
    """
    check_loadable(folder, manifest)
    from edge_runtime.backends.ort import OrtBackend  # noqa: PLC0415  # only the chosen backend is imported

    return OrtBackend(folder, manifest, options)


def check_loadable(folder: Path, manifest: Manifest) -> None:
    """Refuse an engine that can't be loaded here, before anything of it is read.

    Raises UsageError for a target this version can't run, EngineRefusedError when weights and KV buffers alone are more
    than memory can hold.
    """
    if manifest.target != "ort-cpu":
        raise UsageError(
            f"{folder}: target {manifest.target} can't be served by this version",
            remedy="build with --target ort-cpu",
        )
    fit = fits(manifest.weight_bytes + manifest.kv_bytes, psutil.virtual_memory().available)
    if not fit.is_enough:
        raise EngineRefusedError(
            fit.refusal(str(folder)),
            remedy="stop other programs, or build it smaller: see edge-runtime plan --help",
        )
