"""Write FP32 attention out in products and a softmax: TensorRT has no attention kernel for FP32.

It is asked for where a family's scores overflow FP16 (ModelSpec.scores_fp32, case C43). The scores of a step become a
tensor, so this is slower than a fused kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper

from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.graph.writer import GraphWriter


def write_out_attention(g: GraphWriter, node: onnx.NodeProto, spec: ModelSpec) -> list[onnx.NodeProto]:
    """Return the nodes that compute what the Attention `node` does, with q [B, H, S, D], k and v [B, K, C, D], mask.

    G = H / K queries share a kv head: they stand on an axis of their own, over which k and v broadcast.
    """
    query, key, value, mask = node.input
    heads, kv_heads, at = spec.num_heads, spec.num_kv_heads, node.name
    nodes: list[onnx.NodeProto] = []

    def op(kind: str, inputs: Sequence[str], name: str, output: str | None = None) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [output or name], name=name))
        return name

    by_group = np.array([0, kv_heads, heads // kv_heads, -1, spec.head_dim], np.int64)
    axis = g.constant(f"{at}.group_axis", np.array([2], np.int64))
    scaled = op("Mul", [query, g.constant(f"{at}.scale", np.array(spec.scale, np.float32))], f"{at}.scaled")
    q = op("Reshape", [scaled, g.constant(f"{at}.by_group", by_group)], f"{at}.q")  # [B, K, G, S, D]
    k = op("Transpose", [key], f"{at}.k_turned")
    nodes[-1].attribute.append(helper.make_attribute("perm", [0, 1, 3, 2]))
    k = op("Unsqueeze", [k, axis], f"{at}.k")  # [B, K, 1, D, C]
    v = op("Unsqueeze", [value, axis], f"{at}.v")  # [B, K, 1, C, D]
    seen = op("Unsqueeze", [mask, axis], f"{at}.seen")  # [B, 1, 1, S, C]
    scores = op("MatMul", [q, k], f"{at}.scores")  # [B, K, G, S, C]
    hidden = g.constant(f"{at}.hidden", np.array(np.finfo(np.float32).min, np.float32))
    shares = op("Softmax", [op("Where", [seen, scores, hidden], f"{at}.masked")], f"{at}.shares")  # over C
    mixed = op("MatMul", [shares, v], f"{at}.mixed")
    merged = np.array([0, heads, -1, spec.head_dim], np.int64)
    op("Reshape", [mixed, g.constant(f"{at}.merged", merged)], f"{at}.written_out", node.output[0])
    return nodes
