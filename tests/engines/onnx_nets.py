"""Networks for the tests of "any ONNX model": a BERT encoder from given weights, and small ones with random weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Arrays = Mapping[str, np.ndarray]


class Net:
    """Collects nodes and constants; every node is called like its output."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}

    def op(self, kind: str, inputs: Sequence[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(kind, list(inputs), [output], name=output, **attributes))
        return output

    def const(self, name: str, values: object, dtype: type[np.generic] = np.float32) -> str:
        self.constants[name] = numpy_helper.from_array(np.array(values, dtype, order="C"), name)
        return name

    def model(
        self,
        inputs: Mapping[str, tuple[int, Sequence[int | str]]],
        outputs: Mapping[str, Sequence[int | str]],
        opset: int = 17,
        domains: Sequence[str] = (),
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_tensor_value_info(name, kind, list(shape)) for name, (kind, shape) in inputs.items()],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)) for name, shape in outputs.items()],
            list(self.constants.values()),
        )
        opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def sentence_encoder(weights: Arrays, *, heads: int, layers: int, eps: float = 1e-12) -> onnx.ModelProto:
    """Return BERT with mean pooling and length 1, as PyTorch's exporter writes it: MatMul and Add, Gelu from Erf."""
    net = Net()
    hidden = weights["embeddings.LayerNorm.weight"].shape[0]
    for name in ("word", "position", "token_type"):
        key = f"embeddings.{name}_embeddings.weight"
        net.const(key, weights[key])
    net.const("half", 0.5)
    net.const("one", 1.0)
    net.const("root2", np.sqrt(2))
    net.const("root_d", np.sqrt(hidden // heads))
    net.const("heads_shape", [0, 0, heads, hidden // heads], np.int64)
    net.const("flat_shape", [0, 0, hidden], np.int64)
    for name, values in (("zero", 0), ("axis1", [1]), ("axis2", [2]), ("axes12", [1, 2])):
        net.const(name, values, np.int64)

    def norm(x: str, prefix: str) -> str:
        for part in ("weight", "bias"):
            net.const(f"{prefix}.{part}", weights[f"{prefix}.{part}"])
        return net.op("LayerNormalization", [x, f"{prefix}.weight", f"{prefix}.bias"], f"{prefix}.out", epsilon=eps)

    def dense(x: str, prefix: str) -> str:
        net.const(f"{prefix}.weight", weights[f"{prefix}.weight"].T)
        net.const(f"{prefix}.bias", weights[f"{prefix}.bias"])
        return net.op("Add", [net.op("MatMul", [x, f"{prefix}.weight"], f"{prefix}.mm"), f"{prefix}.bias"], prefix)

    def split(x: str, perm: list[int]) -> str:
        return net.op(
            "Transpose",
            [
                net.op("Reshape", [x, "heads_shape"], f"{x}.h"),
            ],
            f"{x}.t",
            perm=perm,
        )

    words = net.op("Gather", ["embeddings.word_embeddings.weight", "input_ids"], "words")
    kinds = net.op("Gather", ["embeddings.token_type_embeddings.weight", "token_type_ids"], "kinds")
    net.op("Shape", ["input_ids"], "ids_shape")
    net.op("Gather", ["ids_shape", net.const("i1", 1, np.int64)], "length", axis=0)
    net.op("Range", ["zero", "length", "i1"], "positions")
    places = net.op("Gather", ["embeddings.position_embeddings.weight", "positions"], "places")
    x = norm(net.op("Add", [net.op("Add", [words, kinds], "e0"), places], "e1"), "embeddings.LayerNorm")
    mask = net.op("Cast", ["attention_mask"], "mask", to=TensorProto.FLOAT)
    net.op("Unsqueeze", [net.op("Sub", ["one", mask], "hidden_places"), "axes12"], "m0")
    bias = net.op("Mul", ["m0", net.const("far", -10000.0)], "mask_bias")
    for i in range(layers):
        p = f"encoder.layer.{i}"
        q, k, v = (dense(x, f"{p}.attention.self.{n}") for n in ("query", "key", "value"))
        scores = net.op("MatMul", [split(q, [0, 2, 1, 3]), split(k, [0, 2, 3, 1])], f"{p}.scores")
        scaled = net.op("Add", [net.op("Div", [scores, "root_d"], f"{p}.scaled"), bias], f"{p}.masked")
        probs = net.op("Softmax", [scaled], f"{p}.probs", axis=-1)
        mixed = net.op("MatMul", [probs, split(v, [0, 2, 1, 3])], f"{p}.mixed")
        flat = net.op(
            "Reshape", [net.op("Transpose", [mixed], f"{p}.mt", perm=[0, 2, 1, 3]), "flat_shape"], f"{p}.flat"
        )
        added = net.op("Add", [dense(flat, f"{p}.attention.output.dense"), x], f"{p}.r1")
        x = norm(added, f"{p}.attention.output.LayerNorm")
        up = dense(x, f"{p}.intermediate.dense")
        erf = net.op("Erf", [net.op("Div", [up, "root2"], f"{p}.g0")], f"{p}.g1")
        gelu = net.op(
            "Mul", [net.op("Mul", [up, net.op("Add", [erf, "one"], f"{p}.g2")], f"{p}.g3"), "half"], f"{p}.gelu"
        )
        x = norm(net.op("Add", [dense(gelu, f"{p}.output.dense"), x], f"{p}.r2"), f"{p}.output.LayerNorm")
    wide = net.op("Unsqueeze", [mask, "axis2"], "wide_mask")
    total = net.op("ReduceSum", [net.op("Mul", [x, wide], "kept"), "axis1"], "total", keepdims=0)
    count = net.op("ReduceSum", [mask, "axis1"], "count", keepdims=1)
    mean = net.op("Div", [total, count], "mean")
    net.op("LpNormalization", [mean], "sentence_embedding", axis=1, p=2)
    shape = ["batch", "sequence"]
    inputs = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (TensorProto.INT64, shape))
    return net.model(inputs, {"sentence_embedding": ["batch", hidden]})


def conv_net(seed: int = 0, *, size: int = 16, opset: int = 17, batch: int | str = "n") -> onnx.ModelProto:
    """Return a small image classifier: batch normalisation, a depthwise and a pointwise convolution, a residual, Gemms.

    The pointwise convolution takes a planted channel that is a thousand times the others and has no weight: it takes
    all codes of a per-tensor scale, so INT8 there is useless although the float output doesn't know the channel. One
    output channel of the first convolution is dead.
    """
    rng = np.random.default_rng(seed)
    net = Net()

    def conv(x: str, name: str, shape: tuple[int, ...], groups: int = 1, *, bias: bool = True) -> str:
        weight = rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
        if name == "stem":
            weight[5] = 0
        if name == "point":
            weight[:, 3] = 0
        inputs = [x, net.const(f"{name}.weight", weight)]
        if bias:
            values = rng.normal(size=shape[0]) * 0.1
            values[3] = 1000.0 if name == "depth" else values[3]
            inputs.append(net.const(f"{name}.bias", values))
        return net.op("Conv", inputs, name, kernel_shape=list(shape[2:]), pads=[shape[2] // 2] * 4, group=groups)

    def gemm(x: str, name: str, out: int, inp: int) -> str:
        weight = net.const(f"{name}.weight", rng.normal(size=(out, inp)) / np.sqrt(inp))
        return net.op("Gemm", [x, weight, net.const(f"{name}.bias", rng.normal(size=out) * 0.1)], name, transB=1)

    stem = conv("image", "stem", (16, 3, 5, 5), bias=False)
    for part, values in (("scale", 0.5), ("shift", -0.2), ("mean", 0.0), ("var", 1.0)):
        net.const(f"bn.{part}", np.abs(rng.normal(1, 0.2, 16)) * (values or 0.1))
    normed = net.op("BatchNormalization", [stem, "bn.scale", "bn.shift", "bn.mean", "bn.var"], "bn")
    first = net.op("Relu", [normed], "relu1")
    depth = net.op("Relu", [conv(first, "depth", (16, 1, 3, 3), groups=16)], "relu2")
    point = net.op("Relu", [conv(depth, "point", (16, 16, 3, 3))], "relu3")
    wide = net.op("Relu", [conv(net.op("Add", [point, first], "residual"), "wide", (64, 16, 3, 3))], "relu4")
    flat = net.op("Flatten", [net.op("GlobalAveragePool", [wide], "pooled")], "flat", axis=1)
    hidden = net.op("Relu", [gemm(flat, "fc1", 64, 64)], "relu5")
    net.op("Identity", [gemm(hidden, "fc2", 32, 64)], "logits")
    return net.model({"image": (TensorProto.FLOAT, [batch, 3, size, size])}, {"logits": [batch, 32]}, opset)


def images(count: int, seed: int = 1, size: int = 16) -> np.ndarray:
    """Return smooth random images [count, 3, size, size] of different contrast."""
    rng = np.random.default_rng(seed)
    coarse = rng.normal(size=(count, 3, size // 4, size // 4)) * rng.uniform(0.5, 2, (count, 1, 1, 1))
    return np.kron(coarse, np.ones((1, 1, 4, 4))).astype(np.float32)


def random_encoder(seed: int = 0, *, hidden: int = 64, layers: int = 2, vocab: int = 100) -> onnx.ModelProto:
    """Return a tiny BERT with random weights."""
    rng = np.random.default_rng(seed)
    shapes = {
        f"embeddings.{n}_embeddings.weight": (rows, hidden)
        for n, rows in (("word", vocab), ("position", 32), ("token_type", 2))
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(layers):
        p = f"encoder.layer.{i}"
        dense = {f"{p}.attention.self.{n}": (hidden, hidden) for n in ("query", "key", "value")}
        dense |= {f"{p}.attention.output.dense": (hidden, hidden), f"{p}.intermediate.dense": (4 * hidden, hidden)}
        dense |= {f"{p}.output.dense": (hidden, 4 * hidden)}
        shapes |= {f"{name}.weight": shape for name, shape in dense.items()}
        shapes |= {f"{name}.bias": shape[:1] for name, shape in dense.items()}
        norms += [f"{p}.attention.output.LayerNorm", f"{p}.output.LayerNorm"]
    weights = {name: rng.normal(size=shape) / np.sqrt(shape[-1]) for name, shape in shapes.items()}
    weights |= {f"{name}.weight": rng.uniform(0.8, 1.2, hidden) for name in norms}
    weights |= {f"{name}.bias": rng.normal(size=hidden) * 0.1 for name in norms}
    return sentence_encoder(weights, heads=4, layers=layers)


def sentences(count: int, seed: int = 2, *, length: int = 12, vocab: int = 100) -> dict[str, np.ndarray]:
    """Return samples for `random_encoder`, padded to `length` with ids that would be far outside any range."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(length) < rng.integers(4, length + 1, count)[:, None]).astype(np.int64)
    ids = rng.integers(1, vocab, (count, length)) * mask
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
