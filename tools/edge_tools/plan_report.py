"""Put a memory plan together with its device and its speed limits: tables for people, one record for machines."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.table import Table

from edge_engines.checkpoint.spec import ModelSpec
from edge_engines.planning.alternatives import Alternative, try_alternatives
from edge_engines.planning.memory import MemoryPlan, plan_memory
from edge_engines.planning.options import PlanOptions
from edge_engines.planning.roofline import Ceiling, ceiling
from edge_runtime.memory import Fit, fits, in_mb
from edge_tools.plan_device import Device

SCHEMA = 1
WIDTH = 110


@dataclass(frozen=True, slots=True)
class PlanReport:
    """One engine on one device. `alternatives` are empty where it fits."""

    schema: int
    model: str
    device: Device
    plan: MemoryPlan
    fit: Fit  # serving
    build_fit: Fit  # building on the device itself
    ceilings: tuple[Ceiling, ...]
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...]


def make_report(model: str, spec: ModelSpec, options: PlanOptions, device: Device) -> PlanReport:
    """Plan an engine and hold it against a device."""
    plan = plan_memory(spec, options)
    fit = fits(plan.needed, device.available_bytes)
    tried = () if fit.is_enough else tuple(try_alternatives(spec, options, device.available_bytes))
    return PlanReport(
        schema=SCHEMA,
        model=model,
        device=device,
        plan=plan,
        fit=fit,
        build_fit=fits(plan.build_peak_bytes, device.available_bytes),
        ceilings=tuple(ceiling(plan, b.mode, b.gb_s) for b in device.bandwidths),
        alternatives=tried,
        notes=tuple(_notes(options, device, tried)),
    )


def as_json(report: PlanReport) -> str:
    """Return the report as one JSON object: bytes, 10^9 bytes per second and tokens per second."""
    record = msgspec.to_builtins(report)
    record["fits"] = report.fit.is_enough
    record["build_fits"] = report.build_fit.is_enough
    record["plan"]["needed"] = report.plan.needed
    if units := record["plan"]["options"]["int8"]:
        record["plan"]["options"]["int8"] = sorted(units)
    return msgspec.json.encode(record).decode()


def shown(report: PlanReport) -> Iterator[str]:
    """Yield what a person reads, in order."""
    yield _written(_memory_table(report))
    if report.ceilings:
        yield _written(_ceiling_table(report))
    if report.alternatives:
        yield _written(_alternative_table(report))
    yield from (f"note: {note}" for note in report.notes)
    yield _build_line(report)
    if report.fit.is_enough:
        spare = report.fit.usable - report.fit.needed
        yield f"serving fits: {in_mb(report.fit.needed)} of {in_mb(report.fit.usable)}, {in_mb(spare)} are left"


def _notes(options: PlanOptions, device: Device, tried: Sequence[Alternative]) -> Iterator[str]:
    is_int8 = options.precision == "int8" or any("--precision int8" in other.change for other in tried)
    if is_int8 and options.int8 is None:
        yield "every layer is taken to be in INT8; which ones may be: edge-runtime sensitivity, then --plan"
    if device.is_board:
        yield f"memory of {device.title}: {device.source}"
    elif options.target != "ort-cpu":
        yield "memory and bandwidth are those of the system; a graphics card has its own, which are not read"


def _memory_table(report: PlanReport) -> Table:
    options, fit, plan = report.plan.options, report.fit, report.plan
    title = f"{report.model}: {options.target}, {options.precision}, {options.batch} x {options.capacity} tokens"
    table = Table("memory", "precision", "MB", "known by", title=title, title_justify="left")
    for line in plan.lines:
        table.add_row(line.what, line.precision, _mb(line.num_bytes), line.basis)
    table.add_section()
    table.add_row("needed to serve", "", _mb(fit.needed), "")
    table.add_row(f"available on {report.device.name}", "", _mb(fit.available), "")
    table.add_row(f"usable, {fit.kept_back:.0%} kept back", "", _mb(fit.usable), "")
    table.add_section()
    table.add_row("engine on the disk", "", _mb(plan.engine_bytes), "")
    table.add_row("peak of the build", "", _mb(plan.build_peak_bytes), "")
    return table


def _ceiling_table(report: PlanReport) -> Table:
    full = report.plan.options.capacity
    table = Table(
        "power mode" if report.device.is_board else "bandwidth", "GB/s", "1 slot, short", f"1 slot, {full}",
        "2 slots, short", f"2 slots, {full}",
        title="Tokens/s that memory bandwidth allows at most", title_justify="left",
    )  # fmt: skip
    defaults = {b.mode for b in report.device.bandwidths if b.is_default and report.device.is_board}
    for c in report.ceilings:
        mode = f"{c.mode} (default)" if c.mode in defaults else c.mode
        rates = (f"{rate:.0f}" if rate is not None else "-" for rate in (c.short, c.full, c.short_two, c.full_two))
        table.add_row(mode, f"{c.bandwidth_gb_s:.1f}", *rates)
    return table


def _alternative_table(report: PlanReport) -> Table:
    table = Table("tried instead", "MB", "", title="What would make it fit", title_justify="left")
    for other in report.alternatives:
        table.add_row(other.change, _mb(other.needed), "fits" if other.is_enough else "does not fit")
    return table


def _build_line(report: PlanReport) -> str:
    fit, name = report.build_fit, report.device.name
    if fit.is_enough:
        return f"building fits on {name}, too: {in_mb(fit.needed)} at its peak"
    where = "one with more memory, the same TensorRT and compute capability"
    other = where if report.plan.options.target == "tensorrt" else "a larger machine"
    return (
        f"building does not fit on {name}: {in_mb(fit.needed)} at its peak, {in_mb(fit.missing)} too much; use {other}"
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f}"


def _written(table: Table) -> str:
    """Return a table as text, as wide as it needs to be."""
    stream = io.StringIO()
    Console(file=stream, width=WIDTH, highlight=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
