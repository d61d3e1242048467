"""Predict what each form of each unit costs, in bytes of the engine or in bytes that a decode step reads.

Decoding one token reads every weight once, so at a given bandwidth time and bytes read are in proportion: the order of
choices by time is that by bytes read, on every board.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from edge_engines.budget.forms import Forms
from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.graph.linear import Form
from edge_engines.planning.engine_file import onnx_bytes, plan_bytes
from edge_engines.planning.options import Target
from edge_engines.planning.weights import Scheme, Stored, list_stored
from edge_engines.sensitivity.blocks import EMBED, HEAD

Objective = Literal["bytes", "time"]
COMPUTE: MappingProxyType[str, Literal["fp32", "fp16"]] = MappingProxyType(
    {"ort": "fp32", "native": "fp16", "portable": "fp16"}
)


@dataclass(frozen=True, slots=True)
class Costs:
    """How an engine of one model is stored on one target."""

    spec: ModelSpec  # as lowered
    target: Target
    lowering: str
    capacity: int  # C

    def of_units(self, offered: Mapping[str, Sequence[Form]], objective: Objective) -> dict[str, dict[Form, int]]:
        """Return the bytes of each unit in each form that it is offered; a tied table goes by the name of the head."""
        found: dict[str, dict[Form, int]] = {unit: {} for unit in offered}
        for form in {form: None for forms in offered.values() for form in forms}:
            everywhere = {unit: form if form in forms else forms[0] for unit, forms in offered.items()}
            bytes_of = dict.fromkeys(offered, 0)
            for item in self._stored(everywhere):
                unit = HEAD if self.spec.tied_head and item.name.startswith(EMBED) else item.name
                if unit in bytes_of and not (objective == "time" and item.is_looked_up):
                    bytes_of[unit] += item.num_bytes
            for unit, forms in offered.items():
                if form in forms:
                    found[unit][form] = bytes_of[unit]
        return found

    def engine_bytes(self, forms: Forms) -> int:
        """Return the size of graph and weights, or of the compiled plan."""
        stored = self._stored(forms)
        return onnx_bytes(stored, len(self.spec.layers)) if self.target == "ort-cpu" else plan_bytes(stored)

    def step_bytes(self, forms: Forms) -> int:
        """Return the weights that a decode step reads."""
        return sum(item.num_bytes for item in self._stored(forms) if not item.is_looked_up)

    def _stored(self, forms: Forms) -> list[Stored]:
        compute = COMPUTE[self.lowering]
        named = {EMBED: forms[HEAD], **forms} if self.spec.tied_head else forms
        shares = self.lowering == "ort"
        scheme = Scheme(compute, compute, shares_int8_table=shares, forms=named)
        return list(list_stored(self.spec, scheme, self.capacity))
