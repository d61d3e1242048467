"""Run the chosen suites on one bed, one after another, and put the report together."""

from __future__ import annotations

import tempfile
from collections.abc import Set
from datetime import datetime, timezone
from pathlib import Path

from edge_tools.bench.bed import Bed
from edge_tools.bench.machine import LoadWatch, describe_machine
from edge_tools.bench.report import EngineFacts, Report
from edge_tools.bench.suite_batch import measure_batch
from edge_tools.bench.suite_cold import ColdResult, measure_cold
from edge_tools.bench.suite_context import measure_context
from edge_tools.bench.suite_decode import measure_decode
from edge_tools.bench.suite_mqtt import MqttResult, measure_mqtt
from edge_tools.bench.suite_prefill import measure_prefill
from edge_tools.broker import running_broker
from edge_tools.daemon import served
from edge_tools.progress import Shown

SCHEMA = 1
SUITES = frozenset({"decode", "batch", "prefill", "context"})
SERVING = frozenset({"mqtt", "cold"})  # these need a broker


def measure(bed: Bed, engine: EngineFacts, suites: Set[str], progress: Shown) -> Report:
    """Measure the machine, warm up, run `suites` (of SUITES and SERVING) and return the report."""
    progress.step("measuring the read bandwidth", None)
    machine = describe_machine(int(engine.backend["threads"]))
    progress.step("warming up", None)
    bed.warm_up()
    watch, gb_s = LoadWatch(), machine.bandwidth_gb_s

    def asked(suite: str) -> bool:
        if suite in suites:
            progress.step(suite, None)
        return suite in suites

    # Evaluated in the order written: the bare suites first, then those that start processes, then the load.
    return Report(
        schema=SCHEMA,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seed=bed.seed,
        engine=engine,
        machine=machine,
        decode=measure_decode(bed, gb_s) if asked("decode") else None,
        batch=measure_batch(bed, gb_s) if asked("batch") else None,
        prefill=measure_prefill(bed) if asked("prefill") else None,
        context=measure_context(bed, gb_s) if asked("context") else None,
        mqtt=_mqtt(bed, Path(engine.folder)) if asked("mqtt") else None,
        cold=_cold(Path(engine.folder)) if asked("cold") else None,
        load=watch.stop(),
    )


def _mqtt(bed: Bed, engine: Path) -> MqttResult:
    with tempfile.TemporaryDirectory(prefix="edge-bench-") as name:
        folder = Path(name)
        with running_broker(folder) as broker, served(engine, broker.port, folder) as device:
            return measure_mqtt(bed, device.client)


def _cold(engine: Path) -> ColdResult:
    with tempfile.TemporaryDirectory(prefix="edge-bench-") as name:
        folder = Path(name)
        with running_broker(folder) as broker:
            return measure_cold(engine, broker.port, folder)
