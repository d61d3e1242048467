"""Give new values of a graph names that nothing in it has (case C19)."""

from __future__ import annotations

import onnx

from edge_engines.onnx_model.source import all_nodes


class FreshNames:
    """Returns a wanted name, numbered where it is taken, and takes it."""

    def __init__(self, taken: set[str]) -> None:
        self._taken = set(taken)

    def __call__(self, wanted: str) -> str:
        """Return `wanted`, or the first of `wanted`.1, `wanted`.2 .. that is free."""
        found, number = wanted, 1
        while found in self._taken:
            found, number = f"{wanted}.{number}", number + 1
        self._taken.add(found)
        return found


def value_names(graph: onnx.GraphProto) -> set[str]:
    """Return every name of a value, constant or node, inner graphs included."""
    names = {name for node in all_nodes(graph) for name in (node.name, *node.input, *node.output)}
    values = {value.name for group in (graph.input, graph.output, graph.value_info) for value in group}
    return names | values | {tensor.name for tensor in graph.initializer}
