"""Say which engines can be planned: what each target takes, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from edge_engines.planning.weights import Form, Scheme
from edge_runtime.errors import UsageError

Target = Literal["ort-cpu", "tensorrt", "tensorrt-rtx"]
Kv = Literal["fp32", "fp16", "int8"]

# By target, the default first.
PRECISIONS: MappingProxyType[str, tuple[Form, ...]] = MappingProxyType(
    {
        "ort-cpu": ("fp32", "fp16", "w8", "int8"),
        "tensorrt": ("fp16", "int8"),
        "tensorrt-rtx": ("fp16", "int8"),
    }
)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """One engine to plan."""

    target: Target
    precision: Form
    kv: Kv
    batch: int  # B, 1 or 2
    capacity: int  # C, KV rows per slot
    int8: frozenset[str] | None = None  # units in INT8 where the precision is int8; None = all
    lowering: str | None = None  # None = the usual one of the target

    @property
    def scheme(self) -> Scheme:
        """How its weights are stored."""
        return Scheme(
            self.precision, compute_type(self.target, self.precision), self.int8, shares_int8_table=self.is_ort_lowering
        )

    @property
    def is_ort_lowering(self) -> bool:
        """Whether it is lowered to ONNX Runtime's own operators; an INT8 cache needs the portable lowering."""
        if self.lowering is not None:
            return self.lowering == "ort"
        return self.target == "ort-cpu" and self.kv != "int8"


def compute_type(target: str, precision: str) -> Literal["fp32", "fp16"]:
    """Return the type that an engine computes in, and keeps its KV rows in unless they are INT8."""
    return "fp32" if target == "ort-cpu" and precision != "fp16" else "fp16"


def kv_types(target: str, precision: str) -> tuple[Kv, ...]:
    """Return what the KV cache may be, the default first: w8 is a form of the `ort` lowering, which has no INT8 KV."""
    compute = compute_type(target, precision)
    return (compute,) if precision == "w8" else (compute, "int8")


def choose_options(
    *,
    target: Target,
    precision: Form | None,
    kv: Kv | None,
    batch: int,
    capacity: int,
    int8: frozenset[str] | None = None,
    lowering: str | None = None,
) -> PlanOptions:
    """Return the options of a plan; None = the default of the target. `int8`: see PlanOptions.

    Raises UsageError for what can't be built.
    """
    chosen = precision or ("int8" if int8 is not None else PRECISIONS[target][0])
    if chosen not in PRECISIONS[target]:
        raise UsageError(
            f"precision {chosen} can't be built for target {target}",
            remedy=f"choose from: {', '.join(PRECISIONS[target])}",
        )
    if int8 is not None and chosen != "int8":
        raise UsageError(
            f"a table of INT8 layers says nothing about precision {chosen}", remedy="plan with --precision int8"
        )
    allowed = kv_types(target, chosen)
    if kv is not None and kv not in allowed:
        raise UsageError(
            f"a KV cache in {kv} does not go with target {target} in precision {chosen}",
            remedy=f"choose from: {', '.join(allowed)}",
        )
    return PlanOptions(target, chosen, kv or allowed[0], batch, capacity, int8, lowering)
