"""SmolLM2-135M as plans of TensorRT-RTX: FP16, INT8, and INT8 with an INT8 KV cache, built for real without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

import edge_engines
from edge_engines.compile.tensorrt import PLAN_NAME, CompileOptions
from edge_engines.int8_build import Int8Options
from edge_engines.recipe import find_recipe
from edge_engines.texts.sets import SetSize, TextSizes
from edge_runtime.manifest import Manifest

# Less text than a user's build has, and so a wider gate: the plan that ships was measured with all of it.
SIZES = TextSizes(SetSize(6, 128), SetSize(2, 128), SetSize(6, 64))
WIDE_GATE = 1.5

pytestmark = [pytest.mark.native, pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("measurements")


def compile_smollm2(gguf: Path, out: Path, journal: Path, **options: object) -> tuple[Manifest, int]:
    """Return the manifest and the bytes of the plan."""
    recipe = find_recipe("smollm2-135m")
    assert recipe is not None
    assert recipe.plan is not None
    manifest = edge_engines.build(
        gguf,
        out,
        target="tensorrt-rtx",
        int8_options=Int8Options(plan=Path(recipe.plan), gate=WIDE_GATE, sizes=SIZES, journal=journal),
        compile_options=CompileOptions(("8.6",)),
        **options,  # type: ignore[arg-type]
    )
    return manifest, next(entry.size for entry in manifest.files if entry.name == PLAN_NAME)


def test_int8_plans_are_at_most_seven_tenths_of_fp16(smollm2_gguf: Path, journal: Path, tmp_path: Path) -> None:
    fp16, fp16_bytes = compile_smollm2(smollm2_gguf, tmp_path / "fp16", journal, precision="fp16")
    int8, int8_bytes = compile_smollm2(smollm2_gguf, tmp_path / "int8", journal, precision="int8")
    assert fp16_bytes < 1.1 * fp16.weight_bytes  # each weight once, and kernels
    assert int8_bytes <= 0.70 * fp16_bytes
    assert int8.gate is not None
    assert int8.lowering == "native"


def test_int8_with_an_int8_cache_compiles_in_the_portable_lowering(
    smollm2_gguf: Path, journal: Path, tmp_path: Path
) -> None:
    manifest, size = compile_smollm2(smollm2_gguf, tmp_path / "kv", journal, precision="int8", kv="int8")
    assert (manifest.lowering, manifest.kv_dtype) == ("portable", "int8")
    g = manifest.geometry
    assert manifest.kv_bytes == 2 * g.layers * g.kv_heads * g.head_dim * g.max_batch * g.capacity
    assert size < 1.5 * manifest.weight_bytes
