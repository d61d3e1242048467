"""Define what the build and its compiler process say to each other: one JSON line per message.

The build sends one request; the compiler answers with any number of events, the last of which is Done or Failed.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from edge_runtime.errors import BuildError, EdgeError, NoDeviceError
from edge_runtime.manifest import IoTensor, ProfileFacts


class DeviceFacts(Struct, frozen=True):
    """The GPU of this machine."""

    name: str
    compute_capability: str  # "8.7"
    driver: str  # CUDA version the driver offers, "12.6"


class ModuleFacts(Struct, frozen=True):
    """The TensorRT that was found."""

    module: Literal["tensorrt", "tensorrt_rtx"]
    version: str
    library: str  # what the loaded library itself says
    compute_capabilities: list[str]  # that can be named ahead of time; empty: builds for this machine's GPU only
    device: DeviceFacts | None  # None: no NVIDIA driver here


class ProbeRequest(Struct, frozen=True, tag="probe"):
    """Ask which TensorRT there is for a target."""

    target: str


class CompileRequest(Struct, frozen=True, tag="compile"):
    """Ask for a plan."""

    target: str
    folder: str  # absolute; holds the graph and receives plan and layers
    graph: str  # file names inside `folder`
    plan: str
    layers: str
    inputs: list[IoTensor]
    profiles: list[ProfileFacts]
    compute_capabilities: list[str]
    optimization_level: int | None  # 0 to 5; None: TensorRT's default
    workspace_bytes: int | None  # None: TensorRT's default, all of the device's memory
    timing_cache: str | None  # file; None: no cache


class StepBegun(Struct, frozen=True, tag="step"):
    """See Progress.step."""

    name: str
    total: int | None


class Advanced(Struct, frozen=True, tag="advance"):
    """See Progress.advance."""

    n: int


class Noted(Struct, frozen=True, tag="note"):
    """See Progress.note."""

    text: str


class Probed(Struct, frozen=True, tag="probed"):
    """Answer to ProbeRequest; the last event."""

    facts: ModuleFacts


class Compiled(Struct, frozen=True, tag="compiled"):
    """The plan is in its place; the last event."""

    plan_bytes: int
    inspection: str
    timing_cache: str
    seconds: float
    peak_memory_bytes: int


class Failed(Struct, frozen=True, tag="failed"):
    """Something the user can be told; the last event."""

    kind: str  # "device" or "build"
    message: str
    remedy: str


Request = ProbeRequest | CompileRequest
Event = StepBegun | Advanced | Noted | Probed | Compiled | Failed


def encode(message: Request | Event) -> bytes:
    """Write one message as a line."""
    return msgspec.json.encode(message) + b"\n"


def decode_request(line: bytes) -> Request:
    """Read what `encode` wrote."""
    return msgspec.json.decode(line, type=ProbeRequest | CompileRequest)


def decode_event(line: bytes) -> Event:
    """Read what `encode` wrote; msgspec.MsgspecError for anything else."""
    return msgspec.json.decode(line, type=StepBegun | Advanced | Noted | Probed | Compiled | Failed)


def as_failure(error: EdgeError) -> Failed:
    """Return an error in the form that crosses processes."""
    return Failed("device" if isinstance(error, NoDeviceError) else "build", error.message, error.remedy)


def as_error(failure: Failed) -> EdgeError:
    """Return the error that `as_failure` was given, as NoDeviceError or BuildError."""
    kind = NoDeviceError if failure.kind == "device" else BuildError
    return kind(failure.message, remedy=failure.remedy)
