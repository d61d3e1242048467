"""Say what a plan is held against: a board from the table, or this machine as it is now."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from edge_jetson.boards import find_board
from edge_runtime.backends.cores import default_threads
from edge_tools.bench.machine import BUFFER_BYTES, measure_bandwidth

THIS = "this"


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Memory bandwidth in one power mode, 10^9 bytes per second."""

    mode: str
    gb_s: float
    is_default: bool


@dataclass(frozen=True, slots=True)
class Device:
    """Memory and bandwidth. `available_bytes` is what programs can have, before anything is kept back."""

    name: str
    title: str
    is_board: bool
    total_bytes: int
    available_bytes: int
    source: str  # where `available_bytes` comes from
    bandwidths: tuple[Bandwidth, ...]  # empty where none is known


def find_device(name: str) -> Device:
    """Return a board by its name, or this machine. Raises UsageError for a name that is neither."""
    return _this_machine() if name == THIS else _board(name)


def _board(name: str) -> Device:
    board = find_board(name)
    return Device(
        name=board.name,
        title=board.module,
        is_board=True,
        total_bytes=board.ram_mib << 20,
        available_bytes=board.usable_mib << 20,
        source=board.usable_source,
        bandwidths=tuple(
            Bandwidth(mode.name, board.bandwidth_gb_s(mode), mode.name == board.default_mode) for mode in board.modes
        ),
    )


def _this_machine() -> Device:
    memory = psutil.virtual_memory()
    return Device(
        name="this machine",
        title="this machine",
        is_board=False,
        total_bytes=memory.total,
        available_bytes=memory.available,
        source="MemAvailable, read now",
        bandwidths=_measured_here(memory.available),
    )


def _measured_here(available: int) -> tuple[Bandwidth, ...]:
    """Read a large buffer for half a second, unless memory is short: no plan is worth that."""
    if available < 4 * BUFFER_BYTES:
        return ()
    threads = default_threads()
    return (Bandwidth(f"measured now, {threads} threads", round(measure_bandwidth(threads), 1), True),)
