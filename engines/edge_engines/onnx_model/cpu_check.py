"""Measure two things about INT8 on this CPU: whether its sums are exact (case C14), and whether it is faster."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_engines.onnx_model.rewrite import CONTRIB
from edge_engines.onnx_model.samples import Batch
from edge_engines.onnx_model.session import Session

_K, _N = 64, 16
_RUNS = 7  # of each graph, in turn; their median stands


def sums_are_exact() -> bool:
    """Say whether ONNX Runtime adds products of the largest codes exactly here.

    Where 8-bit products are added in pairs into 16 bits (x86 without VNNI), they may saturate instead.
    """
    codes = np.full((_K, _N), 127, np.int8)
    codes[:, 1::2] = -127
    constants: dict[str, NDArray[Any]] = {
        "scale": np.array(1, np.float32),
        "zero": np.array(128, np.uint8),
        "codes": codes,
        "scales": np.ones(_N, np.float32),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("MatMulIntegerToFloat", ["q", "codes", "scale", "scales", "zero"], ["y"], domain=CONTRIB),
    ]
    graph = helper.make_graph(
        nodes,
        "sums",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, _K])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, _N])],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    x = np.full((2, _K), 127, np.float32)
    x[1] = -127
    with tempfile.TemporaryDirectory(prefix="edge-sums-") as folder:
        file = Path(folder) / "sums.onnx"
        onnx.save_model(helper.make_model(graph, opset_imports=opsets, ir_version=8), file)
        found = Session(file).run({"x": x})["y"]
    return bool(np.array_equal(found, x @ codes.astype(np.float32)))


def time_both(one: Path, other: Path, batch: Batch) -> tuple[float, float]:
    """Return the milliseconds of one core that two graphs take for a batch; other work on the machine doesn't count."""
    sessions = [Session(path, threads=1) for path in (one, other)]
    taken: list[list[float]] = [[], []]
    for session in sessions:
        session.run(batch.feeds)  # buffers are allocated in the first run
    for _ in range(_RUNS):
        for session, times in zip(sessions, taken, strict=True):
            started = time.thread_time()
            session.run(batch.feeds)
            times.append((time.thread_time() - started) * 1e3)
    return statistics.median(taken[0]), statistics.median(taken[1])
