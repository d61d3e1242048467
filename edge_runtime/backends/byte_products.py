"""Say whether this CPU sums products of unsigned and signed bytes exactly; INT8 graphs rest on it.

x86 CPUs without VNNI add such products in pairs into 16 bits, which saturate: the same engine would answer otherwise
there, without an error (case C14). Other architectures widen first.
"""

from __future__ import annotations

import platform
from collections.abc import Collection
from pathlib import Path

from edge_runtime.errors import BackendError
from edge_runtime.manifest import Manifest

EXACT_FLAGS = frozenset({"avx512_vnni", "avx_vnni"})  # as /proc/cpuinfo names them
_X86 = frozenset({"x86_64", "amd64", "AMD64", "i686"})


def refuse_saturating_cpu(manifest: Manifest) -> None:
    """Raise BackendError when an engine multiplies bytes and this CPU can't do it exactly."""
    if manifest.lowering != "ort" or all(unit.precision != "int8" for unit in manifest.units):
        return
    if not sums_exactly(platform.machine(), cpu_flags()):
        raise BackendError(
            "this engine multiplies bytes, and this x86 CPU has no VNNI: their sums would saturate and answers change",
            remedy="build it with --precision w8 or fp32 for this machine",
        )


def sums_exactly(machine: str, flags: Collection[str]) -> bool:
    """Return whether sums of unsigned times signed bytes are exact on a machine with these CPU flags."""
    return machine not in _X86 or bool(EXACT_FLAGS & set(flags))


def cpu_flags(source: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the instruction sets of the first CPU; none where the system does not say."""
    try:
        lines = source.read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), frozenset())
