"""The parts of compiling that need no compiler: profiles, memory, versions, devices."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

from edge_engines.compile.device import read_device
from edge_engines.compile.frames import CompileRequest, DeviceFacts, ModuleFacts
from edge_engines.compile.inspector import why_not
from edge_engines.compile.memory import needed_memory
from edge_engines.compile.module import check_versions, load_module, loaded_library_version, parse_version
from edge_engines.compile.profiles import axis_range, profiles_for, shapes_of
from edge_engines.compile.tensorrt import CompileOptions, Compiler, choose_lowering
from edge_runtime.errors import BuildError, NoDeviceError
from edge_runtime.manifest import AxisRange


@pytest.mark.parametrize(
    ("bounds", "found"),
    [
        ((1000, 64, 1200), AxisRange(1000, 1000, 1200)),
        ((100, 1600, 1200), AxisRange(100, 1200, 1200)),
        ((1, 64, 1), AxisRange(1, 1, 1)),
        ((1, 1, 2), AxisRange(1, 1, 2)),
    ],
)
def test_c24_usual_lies_within_its_bounds(bounds: tuple[int, int, int], found: AxisRange) -> None:
    assert axis_range("S", *bounds) == found


@pytest.mark.parametrize("bounds", [(0, 1, None), (1, 1, None), (0, 1, 4), (5, 5, 4), (-1, 1, 8)])
def test_c24_bounds_that_can_not_be_met_are_refused(bounds: tuple[int, int, int | None]) -> None:
    with pytest.raises(BuildError, match="axis S"):
        axis_range("S", *bounds)


@pytest.mark.parametrize("capacity", [8, 15, 16, 63, 64, 256, 4096])
@pytest.mark.parametrize("max_batch", [1, 2])
def test_c24_profiles_are_in_order_for_every_capacity(capacity: int, max_batch: int) -> None:
    for profile in (
        *profiles_for(capacity, max_batch, specialises=False),
        *profiles_for(capacity, max_batch, specialises=True),
    ):
        for axis in profile.axes.values():
            assert 1 <= axis.least <= axis.usual <= axis.most <= capacity


def test_profiles_of_decode_and_prefill() -> None:
    decode, prefill = profiles_for(512, 2, specialises=False)
    assert shapes_of(["B", "S"], decode) == ((1, 1), (1, 1), (2, 1))
    assert shapes_of(["B", "S"], prefill) == ((1, 1), (1, 64), (1, 256))
    assert shapes_of(["B", 3, 512, 64], decode) == ((1, 3, 512, 64), (1, 3, 512, 64), (2, 3, 512, 64))
    assert shapes_of(["B", "R"], prefill)[2] == (1, 16)


def test_compiling_is_taken_to_need_several_times_the_weights() -> None:
    weights = 2_500_000_000  # a 1.2B model in FP16
    assert 3 * weights < needed_memory(weights) < 5 * weights


@pytest.mark.parametrize(
    ("target", "version", "library", "text"),
    [
        ("tensorrt", "10.16.1.11", "10.16.1", None),
        ("tensorrt", "10.15.1.29", "10.15.1", None),
        ("tensorrt", "11.4.0.106", "11.4.0", None),
        ("tensorrt", "10.3.0", "10.3.0", None),
        ("tensorrt", "10.2.0", "10.2.0", "10.3 or newer"),
        ("tensorrt", "8.6.1", "8.6.1", "10.3 or newer"),
        ("tensorrt", "12.0.0", "12.0.0", "older than 12"),
        ("tensorrt-rtx", "1.7.1.116", "1.7.1", None),
        ("tensorrt-rtx", "1.2.0", "1.2.0", "1.7 or newer.*edge-runtime\\[rtx\\]"),
    ],
)
def test_versions_that_can_not_take_the_graph_are_refused(
    target: str, version: str, library: str, text: str | None
) -> None:
    if text is None:
        check_versions(target, version, library)
        return
    with pytest.raises(BuildError, match=text):
        check_versions(target, version, library)


@pytest.mark.parametrize(
    ("target", "version", "wanted", "chosen"),
    [
        ("tensorrt", "10.3.0", None, "portable"),
        ("tensorrt", "10.14.1.48.post1", None, "portable"),
        ("tensorrt", "10.15.1.29", None, "native"),
        ("tensorrt", "11.4.0", "portable", "portable"),
        ("tensorrt-rtx", "1.7.1", None, "native"),
    ],
)
def test_the_lowering_is_the_best_that_a_version_takes(
    target: str, version: str, wanted: str | None, chosen: str
) -> None:
    compiler = Compiler(target, ModuleFacts("tensorrt", version, version, [], None), CompileOptions())
    assert choose_lowering(compiler, wanted) == chosen


def test_a_version_without_the_operators_of_the_native_lowering_refuses_it() -> None:
    compiler = Compiler("tensorrt", ModuleFacts("tensorrt", "10.3.0", "10.3.0", [], None), CompileOptions())
    with pytest.raises(BuildError, match=r"TensorRT 10\.3\.0 has no operators.*leave --lowering out"):
        choose_lowering(compiler, "native")


def test_c22_module_and_library_of_two_installations_are_refused_with_both_versions() -> None:
    with pytest.raises(BuildError, match=r"Python module 10\.16\.1\.11, library 10\.3\.0"):
        check_versions("tensorrt", "10.16.1.11", "10.3.0")


def test_a_missing_module_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    with pytest.raises(NoDeviceError, match=r"pip install 'edge-runtime\[rtx\]'"):
        load_module("tensorrt-rtx")


def test_the_version_of_a_library_is_asked_of_the_library_itself(tmp_path: Path) -> None:
    trt = load_module("tensorrt-rtx")
    library = loaded_library_version("libtensorrt_rtx.so")
    assert library is not None
    assert parse_version(trt.__version__)[:3] == parse_version(library)
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 0 00:00 0 /lib/libc.so.6\n")
    assert loaded_library_version("libnvinfer.so", tmp_path / "maps") is None


class FakeDriver:
    """The CUDA driver API, as much of it as is asked for; `status` is what cuInit returns."""

    def __init__(self, status: int = 0) -> None:
        self.cuInit = lambda flags: status

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12060
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:
        name.value = b"Orin"
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: int, device: ctypes.c_int) -> int:
        value._obj.value = {75: 8, 76: 7}[which]
        return 0


def test_the_gpu_is_named_by_its_driver() -> None:
    assert read_device(lambda name: FakeDriver()) == DeviceFacts("Orin", "8.7", "12.6")
    assert read_device(lambda name: FakeDriver(status=100)) is None  # CUDA_ERROR_NO_DEVICE


def test_without_a_driver_there_is_no_gpu() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    assert read_device(missing) is None


@pytest.mark.parametrize(
    ("made_for", "device", "reason"),
    [
        (["8.6"], None, "no"),
        (["8.6"], DeviceFacts("H200", "9.0", "13.0"), "made for 8.6"),
        (["8.6"], DeviceFacts("A10", "8.6", "13.0"), ""),
        ([], DeviceFacts("Orin", "8.7", "13.2"), ""),
    ],
)
def test_a_plan_is_reloaded_only_where_it_was_made_for(
    made_for: list[str], device: DeviceFacts | None, reason: str
) -> None:
    request = CompileRequest("", "", "", "", "", [], [], made_for, None, None, None)
    assert (why_not(request, device) != "") == bool(reason)
    assert reason in why_not(request, device)


def test_timing_caches_are_kept_apart_by_version_and_gpu(tmp_path: Path) -> None:
    orin = DeviceFacts("Orin", "8.7", "13.2")
    trt = Compiler(
        "tensorrt", ModuleFacts("tensorrt", "10.16.2", "10.16.2", [], orin), CompileOptions((), None, None, tmp_path)
    )
    assert trt.timing_cache == tmp_path / "tensorrt-10.16.2-sm87.timing"
    rtx = Compiler(
        "tensorrt-rtx",
        ModuleFacts("tensorrt_rtx", "1.7.1", "1.7.1", ["8.6"], None),
        CompileOptions(("8.6",), None, None, tmp_path),
    )
    assert rtx.timing_cache is None
