"""Try what would make an engine fit: each single change first, all of them together where none is enough."""

from __future__ import annotations

from dataclasses import dataclass, replace

from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.planning.memory import plan_memory
from edge_engines.planning.options import PRECISIONS, PlanOptions, kv_types
from edge_runtime.memory import fits

CONTEXT_STEP = 64  # contexts that are tried are multiples of it


@dataclass(frozen=True, slots=True)
class Alternative:
    """One engine that was planned, the arguments that change, and whether it fits."""

    change: str  # "--context 256"
    needed: int
    is_enough: bool


def try_alternatives(spec: ModelSpec, options: PlanOptions, available: int) -> list[Alternative]:
    """Return what was tried, in the order of what a user gives up least; the last ones change several things.

    `int8` of the options, the choice of units, is kept where the precision is.
    """
    singles = [_tried(spec, options, other, available) for other in _single_changes(spec, options, available)]
    if any(found.is_enough for found in singles):
        return singles
    known = {found.change for found in singles}
    smallest = _smallest(spec, options)
    together = [_tried(spec, options, smallest, available)]
    if not together[0].is_enough:
        together.append(_tried(spec, options, _largest_context(spec, smallest, available), available))
    return singles + [found for found in together if found.change and found.change not in known]


def _single_changes(spec: ModelSpec, options: PlanOptions, available: int) -> list[PlanOptions]:
    changes = []
    if "int8" in kv_types(options.target, options.precision) and options.kv != "int8":
        changes.append(replace(options, kv="int8"))
    if (shorter := _largest_context(spec, options, available)).capacity < options.capacity:
        changes.append(shorter)
    if options.batch > 1:
        changes.append(replace(options, batch=1))
    return changes + _other_precisions(options)


def _other_precisions(options: PlanOptions) -> list[PlanOptions]:
    """Return the same engine in the other precisions; a float KV cache follows what each computes in."""
    others = []
    for precision in PRECISIONS[options.target]:
        if precision != options.precision:
            allowed = kv_types(options.target, precision)
            kv = options.kv if options.kv in allowed else allowed[0]
            others.append(replace(options, precision=precision, kv=kv, int8=None))
    return others


def _smallest(spec: ModelSpec, options: PlanOptions) -> PlanOptions:
    """Return the engine of this context that needs least."""
    precisions = [options, *_other_precisions(options)]
    engines = [replace(other, batch=1, kv=kv) for other in precisions for kv in kv_types(other.target, other.precision)]
    return min(engines, key=lambda other: plan_memory(spec, other).needed)


def _largest_context(spec: ModelSpec, options: PlanOptions, available: int) -> PlanOptions:
    """Return the engine with the largest context below that of `options` that fits; with the smallest if none does.

    Bisection over multiples of CONTEXT_STEP: what is needed grows with the context.
    """
    least, most = 1, max(1, (options.capacity - 1) // CONTEXT_STEP)
    while least < most:
        middle = (least + most + 1) // 2
        plan = plan_memory(spec, replace(options, capacity=middle * CONTEXT_STEP))
        if fits(plan.needed, available).is_enough:
            least = middle
        else:
            most = middle - 1
    return replace(options, capacity=min(options.capacity, least * CONTEXT_STEP))


def _tried(spec: ModelSpec, options: PlanOptions, other: PlanOptions, available: int) -> Alternative:
    needed = plan_memory(spec, other).needed
    return Alternative(_difference(options, other), needed, fits(needed, available).is_enough)


def _difference(options: PlanOptions, other: PlanOptions) -> str:
    """Return the arguments that turn one engine into the other."""
    words = []
    if other.precision != options.precision:
        words.append(f"--precision {other.precision}")
    if other.kv != options.kv:
        words.append(f"--kv {other.kv}")
    if other.batch != options.batch:
        words.append(f"--batch {other.batch}")
    if other.capacity != options.capacity:
        words.append(f"--context {other.capacity}")
    return " ".join(words)
