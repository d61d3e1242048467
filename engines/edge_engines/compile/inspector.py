"""Reload a finished plan where a GPU allows it, and write what TensorRT made of each layer.

Not verified on hardware: a plan has been reloaded by no test, since that needs a driver.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edge_engines.compile.frames import CompileRequest, DeviceFacts
from edge_engines.compile.watch import Watch, trt_logger
from edge_runtime.errors import BuildError


def inspect_plan(trt: Any, request: CompileRequest, device: DeviceFacts | None, watch: Watch) -> str:
    """Write the inspector's JSON beside the plan and return its file name, or the reason why there is none.

    Raises BuildError when a plan made for the GPU of this machine does not reload on it (case C27).
    """
    reason = why_not(request, device)
    if reason:
        return f"not inspected: {reason}"
    folder = Path(request.folder)
    runtime = trt.Runtime(trt_logger(trt, watch))
    engine = runtime.deserialize_cuda_engine((folder / request.plan).read_bytes())
    if engine is None:
        raise BuildError(f"the finished plan does not reload: {watch.last_error}", remedy="nothing was written")
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    (folder / request.layers).write_text(text, encoding="utf-8")
    return request.layers


def why_not(request: CompileRequest, device: DeviceFacts | None) -> str:
    """Return why a plan can't be reloaded on this machine, or nothing."""
    if device is None:
        return "reloading a plan needs an NVIDIA driver, and the machine that built it has none"
    made_for = request.compute_capabilities
    if made_for and device.compute_capability not in made_for:
        return f"made for {', '.join(made_for)}, the GPU of the machine that built it is {device.compute_capability}"
    return ""
