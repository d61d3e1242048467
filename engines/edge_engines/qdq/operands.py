"""Check where Quantize and Dequantize stand: in pairs, on both operands of a product, and nowhere else.

A KV cache in INT8 is the exception: codes that are inputs and outputs of the graph are not held to this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import onnx

from edge_engines.qdq.faults import Fault
from edge_engines.qdq.places import (
    DEQUANTISE,
    PRODUCTS,
    QUANTISE,
    Places,
    Use,
    describe,
    int_attribute,
    is_op,
    output_axis,
)
from edge_engines.qdq.values import type_name

_PRODUCT = f"operand of {', '.join(PRODUCTS)} with a constant weight"
_WIDTH = 16  # INT8 tensor cores take operands in blocks of 16; other sizes are padded or run in float


def check_quantise(node: onnx.NodeProto, places: Places) -> Iterator[Fault]:
    """Yield faults of an activation's Quantize: it feeds one Dequantize and nothing else."""
    if node.input[0] in places.constants:
        yield Fault("pair", describe(node), node.input[0], "a constant quantised at run time", "stored INT8 codes")
    codes = node.output[0]
    if places.is_cache(codes):
        return
    if codes in places.outputs:
        yield Fault("output", describe(node), codes, "INT8 codes as an output of the graph", "float outputs")
    users = places.users(codes)
    kinds = [use.node.op_type for use in users]
    if kinds != [DEQUANTISE]:
        yield Fault("pair", describe(node), codes, f"taken by {kinds or 'nothing'}", f"one {DEQUANTISE}")
    for use in users:
        if is_op(use.node, DEQUANTISE) and not _same_values(node.input[1], use.node.input[1], places):
            found = f"scale {use.node.input[1]} differs from {node.input[1]}"
            yield Fault("pair", describe(use.node), codes, found, "the scale it was quantised with")
    yield from _check_per_tensor(node, places)


def check_dequantise(node: onnx.NodeProto, places: Places) -> Iterator[Fault]:
    """Yield faults of what a Dequantize stands on and of who takes its values."""
    value = node.output[0]
    if places.is_cache(node.input[0]):
        return
    if not places.is_weight(node):
        maker = places.producer(node.input[0])
        if maker is None or not is_op(maker, QUANTISE):
            found = f"made by {maker.op_type}" if maker else "an input of the graph"
            yield Fault("pair", describe(node), node.input[0], found, f"a constant, or made by {QUANTISE}")
        yield from _check_per_tensor(node, places)
    if value in places.outputs:
        yield Fault("output", describe(node), value, "a dequantised output of the graph", "no Q/DQ on outputs")
    elif not places.users(value):
        yield Fault("consumer", describe(node), value, "taken by nothing", _PRODUCT)
    for use in places.users(value):
        yield from _check_use(node, use, places)


def check_product(node: onnx.NodeProto, places: Places) -> Iterator[Fault]:
    """Yield faults of a MatMul, Gemm or convolution with at least one dequantised operand."""
    made_by = [_dequantise(name, places) for name in node.input[:2]]
    if not any(made_by):
        return
    x, weight = made_by
    if x is None and weight is not None and places.is_weight(weight) and places.is_weight_only(node):
        yield from _check_weight_shape(node, weight, places)
        return
    if x is None or weight is None or places.is_weight(x) or not places.is_weight(weight):
        operands = [_kind(maker, places) for maker in made_by]
        expected = "a dequantised activation and a dequantised weight"
        yield Fault("operands", describe(node), node.input[0], f"operands are {operands}", expected)
        return
    types = [_output_type(maker, places) for maker in (x, weight)]
    if types[0] != types[1]:
        found = f"operands of types {[type_name(t) for t in types]}"
        yield Fault("cast", describe(node), node.input[0], found, "both of one type")
    yield from _check_weight_shape(node, weight, places)


def check_shared(places: Places) -> Iterator[Fault]:
    """Yield tensors that are quantised more than once: siblings take one pair."""
    made = Counter(node.input[0] for node in places.model.graph.node if is_op(node, QUANTISE))
    for name, count in made.items():
        if count > 1:
            first = next(use.node for use in places.users(name) if is_op(use.node, QUANTISE))
            yield Fault("shared", describe(first), name, f"quantised {count} times", "one pair for all that take it")


def _check_use(node: onnx.NodeProto, use: Use, places: Places) -> Iterator[Fault]:
    """Yield the fault of one taker of a dequantised value."""
    taker, value = use.node, node.output[0]
    if is_op(taker, *PRODUCTS) and use.index < 2:
        return  # the product is checked itself
    if is_op(taker, "Cast"):
        yield Fault("cast", describe(node), value, f"Cast {describe(taker)} follows", "no Cast before the product")
    elif is_op(taker, *PRODUCTS):
        yield Fault("bias", describe(taker), value, "a dequantised bias", "a bias in float")
    else:
        yield Fault("consumer", describe(node), value, f"taken by {taker.op_type} {describe(taker)}", _PRODUCT)


def _check_per_tensor(node: onnx.NodeProto, places: Places) -> Iterator[Fault]:
    name = node.input[1]
    if name in places.constants and places.constants.shape(name) not in ((), (1,)):
        found = f"scale of shape {list(places.constants.shape(name))}"
        yield Fault("per tensor", describe(node), name, found, "one scale for the whole tensor")


def _check_weight_shape(product: onnx.NodeProto, dequantise: onnx.NodeProto, places: Places) -> Iterator[Fault]:
    """Check that a weight has one scale per output channel of the product that takes it, and its sizes."""
    name, scale = dequantise.input[0], dequantise.input[1]
    shape = places.constants.shape(name)
    axis = output_axis(product, len(shape))
    if scale in places.constants:
        found = places.constants.shape(scale)
        given = int_attribute(dequantise, "axis", 1)
        if found != (shape[axis],) or given % len(shape) != axis:
            text = f"scale of shape {list(found)} on axis {given} of {list(shape)}"
            yield Fault("axis", describe(dequantise), name, text, f"shape [{shape[axis]}] on axis {axis}")
    if is_op(product, "MatMul", "Gemm") and any(size % _WIDTH for size in shape[-2:]):
        expected = f"both sizes a multiple of {_WIDTH}"
        yield Fault("multiple of 16", describe(product), name, f"weight {list(shape)}", expected, is_warning=True)


def _dequantise(name: str, places: Places) -> onnx.NodeProto | None:
    """Return the Dequantize that makes a value; one on a cache gives attention its float rows and doesn't count."""
    maker = places.producer(name)
    if maker is None or not is_op(maker, DEQUANTISE) or places.is_cache(maker.input[0]):
        return None
    return maker


def _kind(maker: onnx.NodeProto | None, places: Places) -> str:
    if maker is None:
        return "float"
    return "dequantised weight" if places.is_weight(maker) else "dequantised activation"


def _output_type(dequantise: onnx.NodeProto, places: Places) -> int:
    scale = dequantise.input[1]
    said = int_attribute(dequantise, "output_dtype", 0)
    return said or (places.constants.dtype(scale) if scale in places.constants else 0)


def _same_values(one: str, other: str, places: Places) -> bool:
    if one == other or one not in places.constants or other not in places.constants:
        return True  # a computed scale is a fault of its own
    return bool(np.array_equal(places.constants.array(one), places.constants.array(other)))
