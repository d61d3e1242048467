"""What the engine inspector says about INT8, in the forms that TensorRT 10 and 11 write (texts made after reports)."""

from __future__ import annotations

import json

import pytest

from edge_engines.compile.int8_layers import check_int8_layers, read_int8_layers
from edge_runtime.errors import BuildError

UNITS = {"layers.0.qkv": 300, "layers.0.o": 100, "layers.0.down": 20, "head": 580}
INT8_10, FP16_10 = "Row major Int8 format", "Row major linear FP16 format"


def layer(nodes: list[str], datatype: str, *, key: str = "Format/Datatype") -> dict[str, object]:
    return {
        "Name": "__myl_gemm_0x1",
        "LayerType": "gemm",
        "Inputs": [{"Name": "x", "Dimensions": [1, 1, 64], key: datatype}],
        "Outputs": [{"Name": "y", "Dimensions": [1, 1, 64], key: "Half"}],
        "Metadata": "\x1e".join(f"[ONNX Layer: {node}]" for node in nodes),
    }


def inspection(*layers: object) -> str:
    return json.dumps({"Layers": list(layers), "Bindings": ["input_ids"]})


def test_units_are_found_by_the_nodes_that_multiply_them() -> None:
    found = read_int8_layers(
        inspection(
            layer(["layers.0.qkv.q", "layers.0.qkv.k", "layers.0.qkv.v"], INT8_10),
            layer(["layers.0.o"], FP16_10),
            layer(["head"], "Int8", key="DataType"),
        ),
        UNITS,
    )
    assert found.confirmed == ("layers.0.qkv", "head")
    assert found.float_units == ("layers.0.o",)
    assert found.unseen == ("layers.0.down",)
    assert "2 units multiply in INT8, in float: layers.0.o, 1 not named" in found.summary


def test_quantising_a_unit_s_input_is_not_multiplying() -> None:
    found = read_int8_layers(inspection(layer(["layers.0.o.input_codes", "layers.0.attn_norm"], INT8_10)), UNITS)
    assert found.confirmed == ()
    assert "not judged" in found.summary


def test_c21_more_than_a_twentieth_in_float_fails_with_the_names() -> None:
    units = {"layers.0.o": 6, "head": 94}
    found = read_int8_layers(inspection(layer(["layers.0.o"], FP16_10), layer(["head"], INT8_10)), units)
    with pytest.raises(BuildError, match=r"6% of the INT8 weights in float, 5% is allowed: layers\.0\.o"):
        check_int8_layers(found, units)
    check_int8_layers(found, {"layers.0.o": 5, "head": 95})


@pytest.mark.parametrize("text", ["", "no json", "[]", inspection("names", "only"), inspection()])
def test_an_inspection_without_layers_is_not_judged(text: str) -> None:
    found = read_int8_layers(text, UNITS)
    assert found.unseen == tuple(UNITS)
    check_int8_layers(found, UNITS)
