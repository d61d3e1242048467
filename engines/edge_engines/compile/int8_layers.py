"""Read from the engine inspector which INT8 units a plan really multiplies in INT8.

A layer's JSON names the ONNX nodes it was made of in `Name` and `Metadata`, and the types of its inputs in
`Format/Datatype` (TensorRT 10) or `DataType` (11). Sources: developer guide of TensorRT, engine inspector; migration
notes from 10 to 11. Not verified on hardware: the texts that this was written against come from public reports.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import onnx

from edge_runtime.errors import BuildError

ALLOWED_SHARE = 0.05  # of the chosen bytes that may not run INT8 (quantization.md, section 3, 6)
_PRODUCT = re.compile(
    r"(?<![\w.])(?P<unit>layers\.\d+\.(?:qkv(?=\.[qkv]\b)|gate_up(?=\.(?:gate|up)\b)|o\b|down\b)|head\b)(?!\.\w*input)"
)
_CODES = ".codes"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class RanInt8:
    """What the inspector says of the units that were to run INT8."""

    confirmed: tuple[str, ...]
    float_units: tuple[str, ...]  # a layer multiplies them, but in float
    unseen: tuple[str, ...]  # no layer names them

    @property
    def summary(self) -> str:
        """Return one line for the manifest."""
        if not self.confirmed and not self.float_units:
            return "the inspector names no unit of ours: not judged"
        said = f"{len(self.confirmed)} units multiply in INT8"
        said += f", in float: {', '.join(self.float_units)}" if self.float_units else ""
        return said + (f", {len(self.unseen)} not named" if self.unseen else "")


def int8_bytes(graph: onnx.GraphProto) -> dict[str, int]:
    """Return the units of a Q/DQ graph that multiply in INT8, with the bytes of their weights."""
    quantised = {node.name for node in graph.node if node.op_type == "QuantizeLinear"}
    sizes: dict[str, int] = {}
    for tensor in graph.initializer:
        if tensor.data_type == onnx.TensorProto.INT8 and tensor.name.endswith(_CODES):
            name = tensor.name.removesuffix(_CODES)
            unit = "head" if name == "table" else ".".join(name.split(".")[:3])
            if f"{unit}.input_codes" in quantised:
                sizes[unit] = sizes.get(unit, 0) + math.prod(tensor.dims)
    return sizes


def read_int8_layers(inspection: str, units: Mapping[str, int]) -> RanInt8:
    """Compare the inspector's JSON with the INT8 `units` (name -> bytes of weights)."""
    types: dict[str, set[bool]] = {}
    for layer in _layers(inspection):
        names = " ".join(str(layer.get(key, "")) for key in ("Name", "Metadata"))
        for match in _PRODUCT.finditer(names):
            types.setdefault(match["unit"], set()).add(_reads_int8(layer))
    return RanInt8(
        confirmed=tuple(unit for unit in units if True in types.get(unit, set())),
        float_units=tuple(unit for unit in units if types.get(unit) == {False}),
        unseen=tuple(unit for unit in units if unit not in types),
    )


def check_int8_layers(found: RanInt8, units: Mapping[str, int]) -> None:
    """Raise BuildError naming the units when more than 5 % of the chosen bytes are multiplied in float (case C21)."""
    lost, chosen = sum(units[unit] for unit in found.float_units), sum(units.values())
    if lost > ALLOWED_SHARE * chosen:
        shown = ", ".join(found.float_units[:_SHOWN]) + (", ..." if len(found.float_units) > _SHOWN else "")
        raise BuildError(
            f"TensorRT multiplies {lost / chosen:.0%} of the INT8 weights in float, {ALLOWED_SHARE:.0%} is allowed: "
            f"{shown}",
            remedy="build with --precision fp16, or report this with layers.json",
        )


def _layers(inspection: str) -> Iterator[Mapping[str, Any]]:
    """Yield the layers that have parameters; with names only, TensorRT lists strings."""
    try:
        listed = json.loads(inspection).get("Layers", [])
    except (json.JSONDecodeError, AttributeError):
        return
    yield from (layer for layer in listed if isinstance(layer, dict))


def _reads_int8(layer: Mapping[str, Any]) -> bool:
    inputs = [value for value in layer.get("Inputs", []) if isinstance(value, dict)]
    return any("int8" in str(value.get(key, "")).lower() for value in inputs for key in ("Format/Datatype", "DataType"))
