"""Every name of TensorRT that compiling uses exists in 10.3, 10.15, 10.16, 11 and TensorRT-RTX.

The names of the releases are recorded from their real bindings (support/strict_tensorrt.py says how); those of
TensorRT-RTX are read from the module that is installed. The compiler's own code runs against objects that know nothing
else, so a name that one release lacks fails here and not on a device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edge_engines.compile.engine import build_plan
from edge_engines.compile.frames import CompileRequest, DeviceFacts, Event, Noted
from edge_engines.compile.inspector import inspect_plan
from edge_engines.compile.module import load_module, nameable_capabilities
from edge_engines.compile.profiles import profiles_for
from edge_engines.compile.watch import Watch, progress_monitor, trt_logger
from edge_runtime.errors import BuildError
from edge_runtime.manifest import IoTensor
from support.strict_tensorrt import Names, StrictModule, names_of, recorded_versions

VERSIONS = recorded_versions()
ORIN = DeviceFacts("Orin", "8.7", "13.2")


def request(folder: Path, target: str = "tensorrt", **changes: Any) -> CompileRequest:
    return CompileRequest(
        **{
            "target": target,
            "folder": str(folder),
            "graph": "model.onnx",
            "plan": "model.plan",
            "layers": "layers.json",
            "inputs": [IoTensor("input_ids", ["B", "S"], "int64"), IoTensor("past", ["B", 2, 64, 16], "float16")],
            "profiles": profiles_for(64, 2, specialises=False),
            "compute_capabilities": ["8.6"] if target == "tensorrt-rtx" else [],
            "optimization_level": 4,
            "workspace_bytes": 1 << 28,
            "timing_cache": str(folder / "caches/10.timing") if target == "tensorrt" else None,
            **changes,
        }
    )


def watch(events: list[Event] | None = None) -> Watch:
    return Watch((events if events is not None else []).append)


def run_everything(trt: StrictModule, wanted: CompileRequest, folder: Path) -> None:
    (folder / "model.onnx").touch()
    seen = watch()
    build_plan(trt, wanted, seen)
    assert (
        inspect_plan(trt, wanted, ORIN if wanted.target == "tensorrt" else DeviceFacts("A10", "8.6", "13"), seen)
        == "layers.json"
    )
    monitor = progress_monitor(trt, seen)
    monitor.phase_start("Building engine", None, 6)
    assert monitor.step_complete("Building engine", 0) is True
    monitor.phase_finish("Building engine")
    for severity in ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE"):
        trt_logger(trt, seen).log(getattr(trt.ILogger, severity), "text")
    assert (folder / "model.plan").read_bytes() == b"plan"


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_exists_in_tensorrt(version: str, tmp_path: Path) -> None:
    run_everything(StrictModule(version, VERSIONS[version]), request(tmp_path), tmp_path)
    assert (tmp_path / "caches/10.timing").read_bytes() == b"cache"
    failing = StrictModule(version, VERSIONS[version], {"OnnxParser.parse_from_file": False})
    with pytest.raises(BuildError, match="node 7 is unknown"):
        build_plan(failing, request(tmp_path), watch())


def test_every_name_exists_in_tensorrt_rtx(tmp_path: Path) -> None:
    installed = load_module("tensorrt-rtx")
    trt = StrictModule(installed.__version__, names_of(installed))
    run_everything(trt, request(tmp_path, "tensorrt-rtx"), tmp_path)
    asked = dict(trt.calls)
    assert asked["IBuilderConfig.num_compute_capabilities"] == (1,)
    assert "IBuilderConfig.create_timing_cache" not in asked


def test_a_name_that_a_release_lacks_is_found(tmp_path: Path) -> None:
    lacking: Names = {
        **VERSIONS["10.3.0"],
        "IBuilderConfig": [name for name in VERSIONS["10.3.0"]["IBuilderConfig"] if name != "progress_monitor"],
    }
    with pytest.raises(AttributeError, match=r"no IBuilderConfig\.progress_monitor"):
        run_everything(StrictModule("10.3.0", lacking), request(tmp_path), tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
def test_only_tensorrt_rtx_can_name_a_gpu_ahead_of_time(version: str) -> None:
    assert nameable_capabilities(StrictModule(version, VERSIONS[version])) == []
    assert {"7.5", "8.6", "8.9", "12.0"} <= set(nameable_capabilities(load_module("tensorrt-rtx")))


def test_the_network_is_strongly_typed_and_has_a_profile_for_decode_and_one_for_prefill(tmp_path: Path) -> None:
    trt = StrictModule("10.16", VERSIONS["10.16.1.11"])
    run_everything(trt, request(tmp_path), tmp_path)
    typed = trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    assert ("Builder.create_network", (1 << typed,)) in trt.calls
    shapes = [arguments for name, arguments in trt.calls if name == "IOptimizationProfile.set_shape"]
    assert shapes[0] == ("input_ids", (1, 1), (1, 1), (2, 1))
    assert shapes[2] == ("input_ids", (1, 1), (1, 64), (1, 64))
    assert ("IBuilderConfig.builder_optimization_level", (4,)) in trt.calls
    assert ("IBuilderConfig.set_memory_pool_limit", (trt.MemoryPoolType.WORKSPACE, 1 << 28)) in trt.calls


@pytest.mark.parametrize(
    ("known", "accepted", "said"),
    [(b"", True, "begun"), (b"old", True, "used"), (b"old", False, "refused, begun anew")],
)
def test_a_timing_cache_that_is_refused_is_never_fatal(known: bytes, accepted: bool, said: str, tmp_path: Path) -> None:
    trt = StrictModule("10.16", VERSIONS["10.16.1.11"], {"IBuilderConfig.set_timing_cache": accepted})
    cache = tmp_path / "10.timing"
    if known:
        cache.write_bytes(known)
    _, state = build_plan(trt, request(tmp_path, timing_cache=str(cache)), watch())
    assert state == said
    assert cache.read_bytes() == b"cache"


def test_a_timing_cache_that_can_not_be_kept_is_never_fatal(tmp_path: Path) -> None:
    trt = StrictModule("10.16", VERSIONS["10.16.1.11"])
    (tmp_path / "file").touch()
    _, state = build_plan(trt, request(tmp_path, timing_cache=str(tmp_path / "file/10.timing")), watch())
    assert state.startswith("begun, not kept: ")


def test_a_graph_that_can_not_be_built_fails_with_the_first_error_that_tensorrt_named(tmp_path: Path) -> None:
    trt = StrictModule("10.16", VERSIONS["10.16.1.11"], {"Builder.build_serialized_network": None})
    seen = watch()
    seen.logged("no kernel\n  for this", is_error=True)
    seen.logged("and therefore no engine", is_error=True)
    with pytest.raises(BuildError, match="can't build this graph: no kernel for this; nothing was written"):
        build_plan(trt, request(tmp_path), seen)
    assert not (tmp_path / "model.plan").exists()


def test_c27_a_plan_that_does_not_reload_on_its_own_gpu_is_refused(tmp_path: Path) -> None:
    class Unreadable(StrictModule):
        def answer(self, path: str, arguments: tuple[Any, ...]) -> Any:
            return None if path == "Runtime.deserialize_cuda_engine" else super().answer(path, arguments)

    trt = Unreadable("10.16", VERSIONS["10.16.1.11"])
    build_plan(trt, request(tmp_path), watch())
    with pytest.raises(BuildError, match="does not reload"):
        inspect_plan(trt, request(tmp_path), ORIN, watch())


def test_phases_deep_inside_others_are_not_shown_and_reminders_of_int64_are_dropped() -> None:
    events: list[Event] = []
    seen = watch(events)
    for name, parent in (("a", None), ("b", "a"), ("c", "b"), ("d", "c"), ("e", "d")):
        seen.phase_begun(name, parent, 3)
        seen.step_done(name)
    seen.logged("Make sure input input_ids has Int64 binding.", is_error=False)
    seen.logged("slow", is_error=False)
    names = [event.name for event in events if hasattr(event, "name")]
    assert names == ["TensorRT: a", "TensorRT: b", "TensorRT: c", "TensorRT: d"]
    assert [event for event in events if isinstance(event, Noted)] == [Noted("TensorRT: slow")]
