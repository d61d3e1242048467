"""Run an ONNX file with ONNX Runtime, its complaints turned into one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_runtime.errors import BuildError

Array = NDArray[Any]
Feeds = Mapping[str, Array]

_FATAL_ONLY = 4  # what ONNX Runtime calls severity; an error comes as an exception anyway
# It joins MatMul and Add to Gemm behind reshapes, which hides the units; the other rewrites keep what a product is.
_KEPT_APART = ["MatMulAddFusion"]


class Session:
    """One loaded graph. `names` are its outputs in order."""

    def __init__(self, path: Path, *, threads: int = 0) -> None:
        self._session = _open(path, ort.GraphOptimizationLevel.ORT_ENABLE_ALL, None, threads)
        self.names: Sequence[str] = [value.name for value in self._session.get_outputs()]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Return every output by name. Raises BuildError when ONNX Runtime fails."""
        try:
            values = self._session.run(None, dict(feeds))
        except Exception as error:  # the library raises its own, undocumented kinds
            raise BuildError(
                f"the model fails on a sample: {first_line(error)}", remedy="see whether the samples are what it takes"
            ) from error
        return {name: np.asarray(value) for name, value in zip(self.names, values, strict=True)}


def write_simplified(source: Path, target: Path, data_name: str, *, simplify: bool) -> None:
    """Write what ONNX Runtime makes of a model: constants folded, batch normalisation folded into convolutions.

    Every constant of some size goes to `data_name` beside `target`. Raises BuildError when it can't load the model.
    """
    levels = ort.GraphOptimizationLevel
    level = levels.ORT_ENABLE_BASIC if simplify else levels.ORT_DISABLE_ALL
    _open(source, level, (target, data_name), 0)


def first_line(error: Exception) -> str:
    """Return the first line of what ONNX Runtime says, without its status prefix."""
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return text.rsplit("] : ", maxsplit=1)[-1][:300]


def _open(path: Path, level: Any, written: tuple[Path, str] | None, threads: int) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    options.graph_optimization_level = level
    options.intra_op_num_threads = threads  # 0: one per core
    if written:
        options.optimized_model_filepath = str(written[0])
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", written[1])
    try:
        return ort.InferenceSession(
            path, options, providers=["CPUExecutionProvider"], disabled_optimizers=_KEPT_APART if written else None
        )
    except Exception as error:  # the library raises its own, undocumented kinds
        raise BuildError(
            f"ONNX Runtime {ort.__version__} can't load {path.name}: {first_line(error)}",
            remedy="export the model with ONNX's own operators and opset 17 to 21",
        ) from error
