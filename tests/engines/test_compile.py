"""Engines that TensorRT-RTX really compiles, on a machine without a GPU: what they hold and what they claim."""

from __future__ import annotations

from pathlib import Path

import pytest

import edge_engines
from edge_engines.compile.tensorrt import PLAN_NAME, CompileOptions
from edge_runtime import open_session
from edge_runtime.errors import BuildError, NoDeviceError, UsageError
from edge_runtime.manifest import Manifest, read_manifest
from support.command import edge_runtime
from support.tiny_engines import FAMILIES, GOLDEN, tiny_int8_options

KERNELS_BYTES = 16e6  # a plan is its weights and compiled kernels: 4 to 11 MB for the tiny models


def compile_tiny(
    name: str, out: Path, *capabilities: str, target: str = "tensorrt-rtx", precision: str = "fp16", **more: object
) -> Manifest:
    return edge_engines.build(
        GOLDEN / name,
        out,
        target=target,  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        capacity=64,
        compile_options=CompileOptions(compute_capabilities=capabilities),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.native
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_compiles_without_a_gpu(name: str, tmp_path: Path) -> None:
    made = compile_tiny(name, tmp_path / "engine", "8.6")
    manifest = read_manifest(tmp_path / "engine")
    assert manifest == made
    sizes = {entry.name: entry.size for entry in manifest.files}
    assert set(sizes) == {PLAN_NAME, "build.log", "report.html", "report.json"}  # neither the graph nor its weights
    assert manifest.weight_bytes < sizes[PLAN_NAME] < manifest.weight_bytes + KERNELS_BYTES
    assert (manifest.target, manifest.lowering, manifest.graph) == ("tensorrt-rtx", "native", PLAN_NAME)


@pytest.mark.native
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_compiles_in_int8(name: str, tmp_path: Path) -> None:
    manifest = compile_tiny(
        name, tmp_path / "engine", "8.6", precision="int8", int8_options=tiny_int8_options(tmp_path)
    )
    assert manifest.gate is not None
    assert {unit.precision for unit in manifest.units} <= {"int8", "w8", "fp16"}
    assert sum(unit.precision == "int8" for unit in manifest.units) > len(manifest.units) / 2
    sizes = {entry.name: entry.size for entry in manifest.files}
    assert set(sizes) == {PLAN_NAME, "build.log", "report.html", "report.json", "sensitivity.json"}
    assert manifest.weight_bytes < sizes[PLAN_NAME] < manifest.weight_bytes + KERNELS_BYTES


@pytest.mark.native
def test_the_manifest_says_what_was_verified_and_what_was_not(tmp_path: Path) -> None:
    manifest = compile_tiny("qwen3", tmp_path / "engine", "8.6", "8.9")
    assert manifest.verify is not None
    assert manifest.compiled is not None
    assert manifest.verify.subject == "graph"
    assert manifest.verify.same_top1
    assert manifest.compiled.compute_capabilities == ["8.6", "8.9"]
    assert manifest.compiled.module == "tensorrt_rtx"
    assert manifest.compiled.version.startswith(manifest.compiled.library)
    assert [entry.name for entry in manifest.compiled.source] == ["model.onnx", "model.onnx.data"]
    assert [profile.name for profile in manifest.compiled.profiles] == ["any"]
    assert manifest.compiled.inspection.startswith("not inspected") or manifest.compiled.device


@pytest.mark.native
def test_c26_a_graph_is_compiled_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = compile_tiny("llama-tied", Path("a"), "8.6"), compile_tiny("mistral-window", Path("b"), "8.6")
    assert first.compiled is not None
    assert second.compiled is not None
    assert first.compiled.source != second.compiled.source
    assert read_manifest(tmp_path / "b").model.family == "mistral"


@pytest.mark.native
def test_a_compiled_engine_is_shown_but_not_served(tmp_path: Path) -> None:
    compile_tiny("llama-tied", tmp_path / "engine", "8.6")
    shown = edge_runtime("inspect", str(tmp_path / "engine"))
    assert shown.returncode == 0, shown.stderr
    assert "compute capability 8.6" in shown.stdout
    assert "the plan was not run" in " ".join(shown.stdout.replace("│", " ").split())
    with pytest.raises(UsageError, match="target tensorrt-rtx can't be served by this version") as refused:
        open_session(tmp_path / "engine")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"precision": "fp32"}, "no attention kernel for FP32.*--precision fp16"),
        ({"precision": "w8"}, "--precision fp16"),
        ({"lowering": "ort"}, "--lowering native"),
        ({"compile_options": CompileOptions()}, "--compute-capability, e.g. 8.6"),
        ({"compile_options": CompileOptions(("8.7",))}, "'8.7' is not known to tensorrt_rtx .*choose from: 7.5, 8.0"),
        ({"compile_options": CompileOptions(("8.6",), optimization_level=6)}, "outside 0 to 5"),
        ({"compile_options": CompileOptions(("8.6",), workspace_bytes=0)}, "at least 1"),
        ({"target": "tensorrt"}, "leave --compute-capability out"),
        ({"target": "ort-cpu", "precision": "fp32"}, "leave --compute-capability out"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_any_work(
    options: dict[str, object], text: str, tmp_path: Path
) -> None:
    chosen: dict[str, object] = {
        "target": "tensorrt-rtx",
        "precision": "fp16",
        "compile_options": CompileOptions(("8.6",)),
        **options,
    }
    with pytest.raises(UsageError, match=text):
        edge_engines.build(GOLDEN / "qwen2", tmp_path / "engine", **chosen)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_target_tensorrt_without_its_module_or_gpu_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    """Fails on a machine with TensorRT and a GPU only, where it would build."""
    with pytest.raises((NoDeviceError, BuildError), match="tensorrt") as refused:
        compile_tiny("qwen2", tmp_path / "engine", target="tensorrt")
    assert refused.value.remedy
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.native
@pytest.mark.model
@pytest.mark.slow
def test_smollm2_compiles_from_the_command_line_and_stores_each_weight_once(smollm2_gguf: Path, tmp_path: Path) -> None:
    out = tmp_path / "engine"
    said = edge_runtime(
        "build", str(smollm2_gguf), "-o", str(out), "--target", "tensorrt-rtx", "--precision", "fp16",
        "--compute-capability", "8.6",
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    assert "made model.plan for compute capability 8.6" in said.stdout
    manifest = read_manifest(out)
    plan = next(entry for entry in manifest.files if entry.name == PLAN_NAME)
    # 1.07 measured; stacked projections would give 1.59, a tied table stored twice 0.21 more
    assert manifest.weight_bytes < plan.size < 1.15 * manifest.weight_bytes
    assert manifest.model.has_text
    assert manifest.compiled is not None
    assert manifest.compiled.peak_memory_bytes > plan.size
