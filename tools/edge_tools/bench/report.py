"""Put the results of a bench run together: one record for machines, tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.table import Table

from edge_tools.bench.machine import Load, Machine
from edge_tools.bench.suite_batch import BatchResult
from edge_tools.bench.suite_cold import ColdResult
from edge_tools.bench.suite_context import ContextResult
from edge_tools.bench.suite_decode import DecodeResult
from edge_tools.bench.suite_mqtt import MqttResult
from edge_tools.bench.suite_prefill import PrefillResult


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What was measured."""

    folder: str
    manifest_sha256: str
    model: str
    target: str
    precision: str
    lowering: str
    capacity: int
    slots: int
    weight_bytes: int
    backend: dict[str, str]


@dataclass(frozen=True, slots=True)
class Report:
    """One run of the bench; a suite that did not run is None. This is the JSON line."""

    schema: int
    created: str  # UTC, ISO 8601
    seed: int
    engine: EngineFacts
    machine: Machine
    decode: DecodeResult | None
    batch: BatchResult | None
    prefill: list[PrefillResult] | None
    context: list[ContextResult] | None
    mqtt: MqttResult | None
    cold: ColdResult | None
    load: Load


def shown(report: Report) -> Iterator[Table | str]:
    """Yield what a person reads, in order: a table per suite, and a line below it that sums it up."""
    yield _head(report)
    if report.decode:
        yield _decode(report.decode)
        yield _decode_line(report.decode)
    if report.batch:
        yield _batch(report.batch)
        yield _batch_line(report.batch)
    if report.prefill:
        yield _prefill(report.prefill)
    if report.context:
        yield _context(report.context)
    if report.mqtt:
        yield _mqtt(report.mqtt)
        yield _mqtt_line(report.mqtt)
    if report.cold:
        yield _cold(report.cold)


def _head(report: Report) -> Table:
    engine, machine, load = report.engine, report.machine, report.load
    table = Table(show_header=False, title="Bench", title_justify="left")
    table.add_row("engine", f"{engine.model}, {engine.precision}, lowering {engine.lowering}, {engine.folder}")
    table.add_row("backend", ", ".join(f"{k} {v}" for k, v in engine.backend.items()))
    table.add_row("machine", f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, {machine.system}")
    table.add_row("read bandwidth", f"{machine.bandwidth_gb_s} GB/s with {machine.threads} threads")
    table.add_row(
        "load", f"{load.start} at the start, {load.end} at the end; other programs used {load.others_share:.0%}"
    )
    return table


def _decode(result: DecodeResult) -> Table:
    table = Table("", "P50 ms", "P99 ms", title="Decode, batch 1", title_justify="left")
    for name, stats in (("step", result.step), ("engine call", result.engine), ("outside the engine", result.outside)):
        table.add_row(name, f"{stats.p50_ms:.2f}", f"{stats.p99_ms:.2f}")
    return table


def _decode_line(result: DecodeResult) -> str:
    return (
        f"{result.tokens_per_s:.1f} tokens/s; {result.limit_share:.0%} of the bandwidth limit "
        f"({result.limit_ms:.2f} ms); outside the engine {result.outside_share:.1%} of a step"
    )


def _batch(result: BatchResult) -> Table:
    table = Table("", "P50 ms", "P99 ms", title="Batch", title_justify="left")
    table.add_row("one slot", f"{result.alone.p50_ms:.2f}", f"{result.alone.p99_ms:.2f}")
    table.add_row(f"{result.slots} slots", f"{result.together.p50_ms:.2f}", f"{result.together.p99_ms:.2f}")
    return table


def _batch_line(result: BatchResult) -> str:
    return (
        f"{result.tokens_per_s:.1f} tokens/s together, {result.gain:.2f} x one slot; "
        f"{result.limit_share:.0%} of the bandwidth limit"
    )


def _prefill(results: list[PrefillResult]) -> Table:
    table = Table("prompt tokens", "P50 ms", "P99 ms", "tokens/s", title="Prefill", title_justify="left")
    for r in results:
        table.add_row(str(r.length), f"{r.time.p50_ms:.1f}", f"{r.time.p99_ms:.1f}", f"{r.tokens_per_s:.0f}")
    return table


def _context(results: list[ContextResult]) -> Table:
    table = Table(
        "tokens in the slot", "P50 ms", "P99 ms", "tokens/s", "of the limit", title="Context", title_justify="left"
    )
    for r in results:
        table.add_row(
            str(r.length), f"{r.step.p50_ms:.2f}", f"{r.step.p99_ms:.2f}", f"{r.tokens_per_s:.1f}",
            f"{r.limit_share:.0%}",
        )  # fmt: skip
    return table


def _mqtt(result: MqttResult) -> Table:
    table = Table("", "first token P50 ms", "P99 ms", "tokens/s", title="MQTT", title_justify="left")
    for name, ttft, speed in (
        ("bare session", result.bare_ttft, result.bare_tokens_per_s),
        ("over MQTT", result.mqtt_ttft, result.mqtt_tokens_per_s),
    ):
        table.add_row(name, f"{ttft.p50_ms:.1f}", f"{ttft.p99_ms:.1f}", f"{speed:.1f}")
    return table


def _mqtt_line(result: MqttResult) -> str:
    return (
        f"{result.ratio:.2f} x the speed of the bare session; the first token comes {result.added_ttft_p50_ms:.1f} ms "
        f"later (P99 {result.added_ttft_p99_ms:.1f} ms)"
    )


def _cold(result: ColdResult) -> Table:
    table = Table("phase", "P50 ms", title="Cold start, file cache warm", title_justify="left")
    for name, ms in result.phases_ms.items():
        table.add_row(f"worker: {name}", f"{ms:.0f}")
    table.add_row("start to ready", f"{result.ready.p50_ms:.0f}")
    return table
