"""Choose the TensorRT module of a target, and refuse one that is missing, mixed or can't take our graph."""

from __future__ import annotations

import ctypes
import importlib
import re
from pathlib import Path
from typing import Any, Literal

from edge_engines.compile.device import read_device
from edge_engines.compile.frames import ModuleFacts
from edge_runtime.errors import BuildError, NoDeviceError

MODULES: dict[str, Literal["tensorrt", "tensorrt_rtx"]] = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
_LIBRARIES = {"tensorrt": "libnvinfer.so", "tensorrt-rtx": "libtensorrt_rtx.so"}
_INSTALL = {
    "tensorrt": "on a Jetson install python3-libnvinfer and make the virtual environment with the system's python3 and "
    "--system-site-packages",
    "tensorrt-rtx": "run: pip install 'edge-runtime[rtx]'",
}
OLDEST_TENSORRT, OLDEST_NATIVE, END_OF_TENSORRT = (10, 3), (10, 15), (12,)
OLDEST_RTX, END_OF_RTX = (1, 7), (2,)  # 1.7 is the release that was tried

Version = tuple[int, ...]


def load_module(target: str) -> Any:
    """Import the TensorRT module of a target. Raises NoDeviceError when it or one of its libraries is missing."""
    name = MODULES[target]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NoDeviceError(f"target {target}: Python can't import {name}: {error}", remedy=_INSTALL[target]) from error


def describe_module(target: str, trt: Any) -> ModuleFacts:
    """Return what was found.

    Raises BuildError for a version that we don't build with, or when module and library are of two installations (C22);
    NoDeviceError when the target builds for the GPU of this machine and there is none.
    """
    facts = ModuleFacts(
        module=MODULES[target],
        version=trt.__version__,
        library=loaded_library_version(_LIBRARIES[target]) or trt.__version__,
        compute_capabilities=nameable_capabilities(trt),
        device=read_device(),
    )
    check_versions(target, facts.version, facts.library)
    if target == "tensorrt" and facts.device is None:
        raise NoDeviceError(
            "target tensorrt builds for the GPU of this machine, and no NVIDIA driver answers here",
            remedy="build on the device, or ahead of time with --target tensorrt-rtx --compute-capability 8.6",
        )
    return facts


def check_versions(target: str, version: str, library: str) -> None:
    """Raise BuildError unless module `version` and `library` belong together and are among those that we build with."""
    found = parse_version(version)
    if found[:3] != parse_version(library)[:3]:
        raise BuildError(
            f"two installations of TensorRT are mixed: Python module {version}, library {library}",
            remedy="remove the one installed with pip, or the path that leads to the other library",
        )
    oldest, end = (OLDEST_RTX, END_OF_RTX) if target == "tensorrt-rtx" else (OLDEST_TENSORRT, END_OF_TENSORRT)
    if not oldest <= found < end:
        raise BuildError(
            f"{MODULES[target]} {version} is not supported: {_dotted(oldest)} or newer, older than {_dotted(end)}",
            remedy=_INSTALL[target],
        )


def takes_native(target: str, version: str) -> bool:
    """Return whether a version has the operators of the native lowering."""
    return target != "tensorrt" or parse_version(version) >= OLDEST_NATIVE


def nameable_capabilities(trt: Any) -> list[str]:
    """Return the compute capabilities that can be named ahead of time, in order: ["7.5", "8.0", ...].

    Empty for TensorRT, which builds for the GPU that is there.
    """
    names = [name for name in dir(getattr(trt, "ComputeCapability", None)) if re.fullmatch(r"SM\d{2,3}", name)]
    numbers = sorted(int(name[2:]) for name in names)
    return [f"{n // 10}.{n % 10}" for n in numbers]


def loaded_library_version(file_name: str, maps: Path = Path("/proc/self/maps")) -> str | None:
    """Return the version that the library loaded into this process reports, or None when none is loaded."""
    paths = {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines() if file_name in line}
    if not paths:
        return None
    number = int(ctypes.CDLL(min(paths)).getInferLibVersion())
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"


def parse_version(text: str) -> Version:
    """Return the numbers of a version: "10.14.1.48.post1" gives (10, 14, 1, 48)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def _dotted(version: Version) -> str:
    return ".".join(map(str, version))
