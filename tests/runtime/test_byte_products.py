"""Case C14: the same INT8 engine must not answer otherwise on another CPU."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.backends.byte_products import cpu_flags, sums_exactly


@pytest.mark.parametrize(
    ("machine", "flags", "exact"),
    [
        ("x86_64", {"avx2", "avx512f"}, False),
        ("x86_64", set(), False),
        ("x86_64", {"avx2", "avx_vnni"}, True),
        ("x86_64", {"avx512_vnni"}, True),
        ("aarch64", set(), True),
    ],
)
def test_c14_x86_without_vnni_is_known_to_saturate(machine: str, flags: set[str], exact: bool) -> None:
    assert sums_exactly(machine, flags) is exact


def test_flags_are_read_from_the_system(tmp_path: Path) -> None:
    listing = tmp_path / "cpuinfo"
    listing.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx_vnni\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_flags(listing) == {"fpu", "avx2", "avx_vnni"}
    assert cpu_flags(tmp_path / "nowhere") == frozenset()


def test_c14_largest_bytes_sum_exactly_where_we_say_so() -> None:
    """255 x 127, 64 times: saturating kernels give 1048544. On a CPU without VNNI this says only that we know it."""
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    weight = numpy_helper.from_array(np.full((64, 16), 127, np.int8), "w")
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, [4, 64])
    y = helper.make_tensor_value_info("y", TensorProto.INT32, [4, 16])
    graph = helper.make_graph([node], "g", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.full((4, 64), 255, np.uint8)})
    is_exact = bool((found == 2_072_640).all())
    assert is_exact or not sums_exactly(platform.machine(), cpu_flags())
