"""Say what each Jetson Orin module is: memory, bandwidth and processors by power mode. Data; nothing is read.

Nothing here was measured by the project, and no board has run it. Sources: the tables of public nvpmodel files and of
a public benchmark (jetson.md §1, [NVP] and [HC]). Figures marked `unverified` below stand in no source at hand. All
modules have compute capability 8.7 and one LPDDR5 memory for CPU and GPU. Modes are known by name: numbers differ from
module to module (jetson.md §8).
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_runtime.errors import UsageError

COMPUTE_CAPABILITY = "8.7"
CORES_PER_SM = 128
# An 8 GB board shows 7607 MiB to Linux and has about 6.8 GiB available after a clean boot without a desktop [HC];
# another public report has 5.2 GB.
SEEN_MIB_OF_8GB, HEADLESS_MIB_OF_8GB = 7607, 6963
_REPORTED = "6.8 GiB after a clean boot without a desktop, one public report (another: 5.2 GB); not measured by us"
_ASSUMED = "assumed after the 8 GB board, which is reported; no report for this module, not measured by us"

EMC_FULL, EMC_25W, EMC_CAPPED = 3200, 3199, 2133  # MHz of the memory clock: modules, and caps of power modes


@dataclass(frozen=True, slots=True)
class PowerMode:
    """What a power mode leaves on; None = no cap of its own."""

    name: str  # as nvpmodel calls it
    sms: int
    gpu_mhz: int | None
    emc_mhz: int | None


@dataclass(frozen=True, slots=True)
class Board:
    """One module with one set of power modes; "super" is the set that newer software offers on the same module."""

    name: str
    module: str
    ram_mib: int
    bus_bits: int
    emc_mhz: int  # of the memory when no mode caps it
    sms: int
    gpu_mhz: int  # highest
    cpu_cores: int
    dla: int  # deep learning accelerators; not used for language models
    default_mode: str
    modes: tuple[PowerMode, ...]

    @property
    def cuda_cores(self) -> int:
        """CUDA cores with all SMs on."""
        return self.sms * CORES_PER_SM

    @property
    def usable_mib(self) -> int:
        """Memory available to programs after a clean boot without a desktop; see `usable_source`.

        For modules without a report: what the 8 GB board holds back at boot, as a share or as an amount, whichever is
        more, and what its system takes.
        """
        ram_of_8gb = 8192
        seen = min(self.ram_mib * SEEN_MIB_OF_8GB // ram_of_8gb, self.ram_mib - (ram_of_8gb - SEEN_MIB_OF_8GB))
        return seen - (SEEN_MIB_OF_8GB - HEADLESS_MIB_OF_8GB)

    @property
    def usable_source(self) -> str:
        """Where `usable_mib` comes from."""
        return _REPORTED if self.name.startswith("orin-nano") and self.ram_mib == 8192 else _ASSUMED

    def bandwidth_gb_s(self, mode: PowerMode) -> float:
        """Return the memory bandwidth in a mode, 10^9 bytes per second: two transfers per clock over the bus."""
        mhz = min(self.emc_mhz, mode.emc_mhz or self.emc_mhz)
        return round(mhz * 2 * self.bus_bits / 8 / 1000, 1)


def find_board(name: str) -> Board:
    """Return a board by name. Raises UsageError that lists the names."""
    for board in BOARDS:
        if board.name == name:
            return board
    raise UsageError(
        f"device {name!r} is not known", remedy=f"choose from: this, {', '.join(board.name for board in BOARDS)}"
    )


def _agx_modes(name: str, sms: int) -> tuple[PowerMode, ...]:
    return (
        PowerMode("MODE_15W", 6, 408, EMC_CAPPED),
        PowerMode("MODE_30W", 8, 612, None),
        PowerMode(name, sms, 816, None),
        PowerMode("MAXN", sms, None, None),
    )


def _nx_modes(upper: str) -> tuple[PowerMode, ...]:
    """Return the modes below the highest; `upper` is 25W (16 GB) or 20W (8 GB)."""
    return (
        PowerMode("10W", 4, 612, EMC_CAPPED),
        PowerMode("15W", 4, 612, None),
        PowerMode(upper, 8, 408, None),
    )


_NX_MAXN = PowerMode("MAXN", 8, None, None)
_NX_SUPER = (PowerMode("40W", 8, 1173, None), PowerMode("MAXN_SUPER", 8, None, None))

BOARDS: tuple[Board, ...] = (
    Board(
        name="orin-nano-4gb", module="Jetson Orin Nano 4GB", ram_mib=4096,
        bus_bits=64, emc_mhz=EMC_CAPPED,  # 34 GB/s: unverified
        sms=4, gpu_mhz=625,  # unverified
        cpu_cores=6, dla=0, default_mode="10W",
        modes=(
            PowerMode("7W_CPU", 4, 306, EMC_CAPPED),
            PowerMode("7W_AI", 4, 408, EMC_CAPPED),
            PowerMode("10W", 4, None, None),  # caps stated for Super only
        ),
    ),
    Board(
        name="orin-nano-super-4gb", module="Jetson Orin Nano 4GB, Super", ram_mib=4096,
        bus_bits=64, emc_mhz=EMC_FULL,  # 51 GB/s: unverified
        sms=4, gpu_mhz=1020, cpu_cores=6, dla=0, default_mode="25W",
        modes=(
            PowerMode("10W", 4, 612, EMC_CAPPED),
            PowerMode("25W", 4, 1020, EMC_25W),
            PowerMode("MAXN_SUPER", 4, None, None),
        ),
    ),
    Board(
        name="orin-nano-8gb", module="Jetson Orin Nano 8GB", ram_mib=8192,
        bus_bits=128, emc_mhz=EMC_CAPPED, sms=8, gpu_mhz=625, cpu_cores=6, dla=0, default_mode="15W",
        modes=(
            PowerMode("7W", 4, 408, EMC_CAPPED),
            PowerMode("15W", 8, None, None),  # caps stated for Super only
        ),
    ),
    Board(
        name="orin-nano-super-8gb", module="Jetson Orin Nano 8GB, Super", ram_mib=8192,
        bus_bits=128, emc_mhz=EMC_FULL, sms=8, gpu_mhz=1020, cpu_cores=6, dla=0, default_mode="25W",
        modes=(
            PowerMode("7W", 4, 408, EMC_CAPPED),  # on some images only
            PowerMode("15W", 8, 612, EMC_CAPPED),
            PowerMode("25W", 8, 918, EMC_25W),
            PowerMode("MAXN_SUPER", 8, None, None),
        ),
    ),
    Board(
        name="orin-nx-8gb", module="Jetson Orin NX 8GB", ram_mib=8192,
        bus_bits=128, emc_mhz=EMC_FULL, sms=8, gpu_mhz=765,  # unverified
        cpu_cores=6, dla=1,  # unverified
        default_mode="15W", modes=(*_nx_modes("20W"), _NX_MAXN),
    ),
    Board(
        name="orin-nx-super-8gb", module="Jetson Orin NX 8GB, Super", ram_mib=8192,
        bus_bits=128, emc_mhz=EMC_FULL, sms=8, gpu_mhz=1173,
        cpu_cores=6, dla=1,  # unverified
        default_mode="40W", modes=(*_nx_modes("20W"), *_NX_SUPER),
    ),
    Board(
        name="orin-nx-16gb", module="Jetson Orin NX 16GB", ram_mib=16384,
        bus_bits=128, emc_mhz=EMC_FULL, sms=8, gpu_mhz=918, cpu_cores=8, dla=2,
        default_mode="15W", modes=(*_nx_modes("25W"), _NX_MAXN),
    ),
    Board(
        name="orin-nx-super-16gb", module="Jetson Orin NX 16GB, Super", ram_mib=16384,
        bus_bits=128, emc_mhz=EMC_FULL, sms=8, gpu_mhz=1173, cpu_cores=8, dla=2,
        default_mode="40W", modes=(*_nx_modes("25W"), *_NX_SUPER),
    ),
    Board(
        name="agx-orin-32gb", module="Jetson AGX Orin 32GB", ram_mib=32768,
        bus_bits=256, emc_mhz=EMC_FULL, sms=14, gpu_mhz=930,  # unverified
        cpu_cores=8, dla=2, default_mode="MODE_30W", modes=_agx_modes("MODE_40W", 14),
    ),
    Board(
        name="agx-orin-64gb", module="Jetson AGX Orin 64GB", ram_mib=65536,
        bus_bits=256, emc_mhz=EMC_FULL, sms=16, gpu_mhz=1300, cpu_cores=12, dla=2,
        default_mode="MODE_30W", modes=_agx_modes("MODE_50W", 16),
    ),
)  # fmt: skip
