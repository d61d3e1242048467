"""`edge-runtime plan` as a user runs it: the answer, its exit status, what it refuses."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from edge_engines.checkpoint.spec import ModelSpec, tensor_shapes
from edge_engines.checkpoint.tensor_names import hf_sources
from edge_engines.planning.memory import plan_memory
from edge_engines.planning.options import choose_options
from edge_runtime.errors import UsageError
from edge_tools.plan_device import find_device
from support.command import edge_runtime
from support.published_models import LLAMA_3_2_3B
from support.tiny_engines import GOLDEN, build_tiny

TINY = str(GOLDEN / "llama-tied")


@pytest.fixture(scope="module")
def llama_3b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama-3.2-3B with its real shapes and no weights: 6.4 GB of holes in a file that takes no space."""
    return sparse_checkpoint(tmp_path_factory.mktemp("llama") / "llama-3.2-3b", LLAMA_3_2_3B)


def sparse_checkpoint(folder: Path, spec: ModelSpec) -> Path:
    """Write a Hugging Face folder in BF16 whose values are holes."""
    folder.mkdir()
    config = {
        "model_type": "llama", "hidden_size": spec.hidden, "intermediate_size": spec.ffn,
        "num_hidden_layers": len(spec.layers), "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "head_dim": spec.head_dim, "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_positions, "rms_norm_eps": spec.norm_eps, "hidden_act": "silu",
        "tie_word_embeddings": spec.tied_head, "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    names, header, end = hf_sources(spec), {}, 0
    for name, shape in tensor_shapes(spec):
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[names[name].name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + end)
    return folder


def plan_json(*arguments: str) -> tuple[int, dict[str, Any], str]:
    said = edge_runtime("plan", *arguments, "--json")
    assert said.stdout.count("\n") == 1, said.stderr
    return said.returncode, json.loads(said.stdout), said.stderr


def test_an_engine_that_fits_is_shown_with_its_parts_and_status_0() -> None:
    said = edge_runtime("plan", TINY, "--device", "orin-nano-8gb", "--context", "128")
    assert said.returncode == 0, said.stderr
    for part in ("embedding and head", "body", "KV cache, 2 x 128 tokens", "needed to serve", "peak of the build"):
        assert part in said.stdout
    assert "15W (default)" in said.stdout
    assert "68.3" in said.stdout
    assert "not measured by us" in said.stdout
    assert "serving fits" in said.stdout


def test_an_engine_that_does_not_fit_is_refused_with_numbers_and_what_would_fit(llama_3b: Path) -> None:
    said = edge_runtime("plan", str(llama_3b), "--device", "orin-nano-8gb", "--precision", "fp16", "--context", "512")
    assert said.returncode == 2
    assert said.stderr.count("\n") == 1
    assert "llama-3.2-3b in fp16 with 2 x 512 tokens on orin-nano-8gb needs about 8," in said.stderr
    assert "7,302 MB are available and 10% of that is kept back" in said.stderr
    assert "it fits with --precision int8 (" in said.stderr
    assert "What would make it fit" in said.stdout
    assert "building does not fit on orin-nano-8gb" in said.stdout
    assert "every layer is taken to be in INT8" in said.stdout  # in the alternative


def test_shapes_alone_give_the_size_of_the_engine(llama_3b: Path) -> None:
    status, record, _ = plan_json(str(llama_3b), "--device", "agx-orin-64gb", "--target", "ort-cpu")
    assert status == 0
    assert record["plan"]["engine_bytes"] == pytest.approx(4 * 3_212_749_824, rel=0.001)


def test_json_holds_what_the_plan_computes(llama_3b: Path) -> None:
    arguments = ("--device", "orin-nx-super-16gb", "--precision", "int8", "--kv", "int8", "--batch", "1")
    status, record, _ = plan_json(str(llama_3b), *arguments, "--context", "4096")
    options = choose_options(target="tensorrt", precision="int8", kv="int8", batch=1, capacity=4096)
    plan = plan_memory(LLAMA_3_2_3B, options)
    assert status == 0
    assert record["fits"] is True
    assert record["plan"]["needed"] == record["fit"]["needed"] == plan.needed
    assert [line["num_bytes"] for line in record["plan"]["lines"]] == [line.num_bytes for line in plan.lines]
    assert [c["mode"] for c in record["ceilings"]] == ["10W", "15W", "25W", "40W", "MAXN_SUPER"]
    assert record["ceilings"][0]["short_two"] is None
    assert record["alternatives"] == []


def test_json_of_what_does_not_fit_comes_with_the_refusal(llama_3b: Path) -> None:
    status, record, refusal = plan_json(str(llama_3b), "--device", "orin-nano-4gb", "--context", "4096")
    assert status == 2
    assert record["fits"] is False
    assert "too much" in refusal
    assert [other for other in record["alternatives"] if other["is_enough"]] == []
    assert "nothing that was tried fits, --precision int8 --kv int8 --batch 1 --context 64 still needs" in refusal


def test_this_machine_is_the_default_and_is_read_now() -> None:
    status, record, _ = plan_json(TINY, "--precision", "w8")
    assert status == 0
    device = record["device"]
    assert 0 < device["available_bytes"] <= device["total_bytes"] == find_device("this").total_bytes
    assert record["plan"]["options"]["target"] == "ort-cpu"
    assert record["plan"]["options"]["capacity"] == 256  # all that this model knows
    assert all(c["short"] > 0 for c in record["ceilings"])


def test_without_a_table_all_layers_count_as_int8_and_the_plan_says_so() -> None:
    said = edge_runtime("plan", TINY, "--device", "orin-nano-8gb", "--precision", "int8")
    assert "every layer is taken to be in INT8" in said.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([TINY, "--device", "orin-nano-5gb"], "device 'orin-nano-5gb' is not known; choose from: this, orin-nano-4gb"),
        ([TINY, "--device", "orin-nano-8gb", "--target", "tensorrt-rtx"], "tensorrt-rtx has no engines for orin-nano"),
        ([TINY, "--device", "orin-nano-8gb", "--precision", "w8"], "precision w8 can't be built for target tensorrt"),
        ([TINY, "--context", "257"], "context 257 is outside 8 to 256"),
        ([TINY, "--kv", "fp16"], "a KV cache in fp16 does not go with target ort-cpu in precision fp32"),
        ([TINY, "--plan", "no/such.json"], "no/such.json: No such file"),
        ([TINY, "--batch", "3"], "'--batch'"),
        (["no/such/model"], "no/such/model: no such file or folder"),
    ],
)
def test_a_plan_of_nothing_that_can_be_built_is_one_line_and_status_2(arguments: list[str], says: str) -> None:
    said = edge_runtime("plan", *arguments)
    assert said.returncode == 2
    assert says in said.stderr
    assert said.stderr.count("\n") == 1
    assert said.stdout == ""


def test_an_engine_folder_is_pointed_to_inspect(tmp_path: Path) -> None:
    said = edge_runtime("plan", str(build_tiny("qwen2", tmp_path / "engine")))
    assert said.returncode == 2
    assert "is an engine, plan takes a checkpoint; see: edge-runtime inspect" in said.stderr


def test_help_teaches_by_example_and_names_the_exit_status() -> None:
    said = edge_runtime("plan", "--help")
    assert "edge-runtime plan smollm2-135m-instruct" in said.stdout.partition("xamples")[2]
    assert "exit status is 0" in " ".join(said.stdout.split())


def test_a_device_is_a_board_or_this_machine() -> None:
    board = find_device("agx-orin-64gb")
    assert board.is_board
    assert [b.gb_s for b in board.bandwidths] == [136.5, 204.8, 204.8, 204.8]
    assert [b.mode for b in board.bandwidths if b.is_default] == ["MODE_30W"]
    with pytest.raises(UsageError, match="is not known"):
        find_device("toaster")
