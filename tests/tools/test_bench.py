"""The bench on a scripted engine: what it reports, and that its figures follow from what it measured."""

from __future__ import annotations

import msgspec
import pytest
from rich.table import Table

from edge_runtime.backends.scripted import ScriptedBackend, hash_script, scripted_manifest
from edge_tools.bench.bed import Bed
from edge_tools.bench.machine import Load, LoadWatch, measure_bandwidth
from edge_tools.bench.report import EngineFacts, Report, shown
from edge_tools.bench.run import SUITES, measure
from edge_tools.bench.stats import summarise
from edge_tools.bench.suite_context import measure_context
from edge_tools.bench.suite_prefill import measure_prefill
from edge_tools.progress import LineProgress


def bed_of(*, capacity: int = 128, max_batch: int = 2) -> Bed:
    manifest = scripted_manifest(capacity=capacity, max_batch=max_batch)
    return Bed(ScriptedBackend(manifest, hash_script(range(256))), seed=1)


def report_of(bed: Bed, suites: frozenset[str]) -> Report:
    facts = EngineFacts(
        folder="out", manifest_sha256="0", model="scripted", target="ort-cpu", precision="fp32", lowering="ort",
        capacity=bed.capacity, slots=bed.slots, weight_bytes=0, backend={"threads": "1"},
    )  # fmt: skip
    with open("/dev/null", "w") as nowhere:
        return measure(bed, facts, suites, LineProgress(nowhere))


def test_every_suite_reports_and_has_a_table() -> None:
    report = report_of(bed_of(), SUITES)
    assert report.decode
    assert report.batch
    assert report.prefill
    assert report.context
    titles = [str(part.title) for part in shown(report) if isinstance(part, Table)]
    assert titles == ["Bench", "Decode, batch 1", "Batch", "Prefill", "Context"]


def test_a_suite_that_was_not_asked_for_is_null_in_the_json_line() -> None:
    line = msgspec.json.encode(report_of(bed_of(), frozenset({"prefill"})))
    record = msgspec.json.decode(line)
    assert b"\n" not in line
    assert record["decode"] is record["batch"] is record["context"] is None
    assert [entry["length"] for entry in record["prefill"]] == [37, 128]
    assert record["machine"]["bandwidth_gb_s"] > 0


@pytest.mark.parametrize("capacity", [8, 37, 38, 128])
def test_small_engines_are_measured_within_their_capacity(capacity: int) -> None:
    bed = bed_of(capacity=capacity)
    assert report_of(bed, SUITES).decode
    assert max(r.length for r in measure_prefill(bed)) <= capacity
    assert max(r.length for r in measure_context(bed, 1.0)) < capacity


def test_an_engine_with_one_slot_has_no_batch_figures() -> None:
    assert report_of(bed_of(max_batch=1), SUITES).batch is None


def test_time_outside_the_engine_is_step_less_engine_call() -> None:
    bed = bed_of()
    bed.prefill_ms(0, 37)
    decoded = bed.decode([0], 37, 8)
    assert len(decoded.step_ms) == len(decoded.engine_ms) == 8
    assert all(outside > 0 for outside in decoded.outside_ms)


def test_limit_counts_weights_once_and_the_rows_of_each_slot() -> None:
    bed = bed_of()
    row = bed.manifest.kv_bytes / (bed.slots * bed.capacity)
    # weight_bytes is 0 here; 10^9 bytes/s are 10^6 bytes/ms
    assert bed.limit_ms(2, 100, bandwidth_gb_s=1.0) == pytest.approx(2 * 100 * row / 1e6)


def test_percentiles_are_linear_between_samples() -> None:
    stats = summarise([float(i) for i in range(101)])
    assert (stats.count, stats.mean_ms, stats.p50_ms, stats.p99_ms) == (101, 50.0, 50.0, 99.0)


def test_other_programs_make_the_machine_busy() -> None:
    assert Load(0.0, 0.0, others_share=0.2).busy
    assert not Load(2.0, 2.0, others_share=0.05).busy


def test_our_own_work_does_not_count_as_load_of_others() -> None:
    watch = LoadWatch()
    assert measure_bandwidth(threads=1) > 0
    load = watch.stop()
    assert 0 <= load.others_share <= 1
