"""Gather what a report shows, from the table of sensitivity, the manifest and what the build measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from edge_engines.report.data import (
    FORMAT,
    Agreement,
    Board,
    Ceiling,
    Cost,
    GateCheck,
    GateResult,
    Part,
    ReportData,
    Sample,
    Step,
    Subject,
    UnitMeasures,
    UnitResult,
)
from edge_engines.sensitivity.table import CheckRow, GateRow, Table, UnitRow
from edge_runtime.manifest import Manifest, UnitPrecision


def report_of(
    table: Table | None,
    manifest: Manifest | None,
    *,
    refusal: str | None = None,
    parts: Sequence[Part] = (),
    boards: Sequence[Board] = (),
    samples: Sequence[Sample] = (),
    steps: Sequence[Step] = (),
    cache_hits: int | None = None,
) -> ReportData:
    """Return what the report of a build shows.

    `table` is None where no INT8 was chosen, `manifest` where no engine was built; one of them is needed. `refusal` is
    the line that says why there is no engine. `parts` are those of `list_parts`.
    """
    assert table is not None or manifest is not None
    gate = _gate(table, manifest)
    holds = gate is None or (gate.upper is not None and gate.upper <= gate.limit)
    bytes_per_token = _bytes_per_token(manifest, parts) if manifest else None
    kv_slot_bytes = manifest.kv_bytes // manifest.geometry.max_batch if manifest else None
    return ReportData(
        format=FORMAT,
        passed=refusal is None and holds,
        refusal=refusal,
        subject=_subject(table, manifest),
        cost=_cost(table, manifest, cache_hits),
        gate=gate,
        agreement=_agreement(manifest),
        threshold=table.threshold if table else None,
        chosen=_chosen(table) if table else None,
        units=_units(table, manifest),
        checks=[_check(row) for row in table.checks] if table else [],
        rule_only=_check(table.rule_only) if table and table.rule_only else None,
        engine_bytes=sum(entry.size for entry in manifest.files) or None if manifest else None,
        parts=list(parts),
        bytes_per_token=bytes_per_token,
        kv_slot_bytes=kv_slot_bytes,
        ceilings=[_ceiling(board, bytes_per_token, kv_slot_bytes) for board in boards] if bytes_per_token else [],
        samples=list(samples),
        steps=list(steps),
        alphas=dict(table.alphas) if table else {},
        texts=dict(table.texts) if table else {},
        options=dict(manifest.build.options) if manifest else {},
        versions=dict(manifest.build.versions) if manifest else {},
        plan=msgspec.json.format(msgspec.json.encode(table), indent=1).decode() if table else None,
    )


def _subject(table: Table | None, manifest: Manifest | None) -> Subject:
    if manifest is None:
        assert table is not None
        return Subject(model=table.model, checkpoint_sha256=table.checkpoint_sha256)
    model = manifest.model
    return Subject(
        model=model.name,
        checkpoint_sha256=model.checkpoint_sha256,
        source=model.source,
        family=model.family,
        parameters=model.parameters,
        target=manifest.target,
        precision=manifest.precision,
        lowering=manifest.lowering,
        capacity=manifest.geometry.capacity,
        max_batch=manifest.geometry.max_batch,
        created=manifest.build.created,
        tool_version=manifest.build.tool_version,
    )


def _gate(table: Table | None, manifest: Manifest | None) -> GateResult | None:
    """Return how the written engine stands; what was simulated where no engine was run."""
    facts = manifest.gate if manifest else None
    row = table.gate if table else None
    if facts is None:
        return _simulated_gate(row) if row else None
    return GateResult(
        subject="engine",
        limit=facts.limit,
        ratio=_finite(facts.ratio),
        low=_finite(facts.ratio**2 / facts.upper),  # as far below as the bound is above, in logarithms
        high=_finite(facts.upper),
        upper=_finite(facts.upper),
        base_perplexity=facts.base_perplexity,
        kl=facts.kl,
        same_top1=facts.same_top1,
        tokens=facts.tokens,
        kl_p99=row.kl_p99 if row else None,
        kl_max=row.kl_max if row else None,
        by_domain=_finite_ones(row.by_domain) if row else {},
    )


def _simulated_gate(row: GateRow) -> GateResult:
    return GateResult(
        subject="simulation",
        limit=row.limit,
        ratio=_finite(row.ratio),
        low=_finite(row.low),
        high=_finite(row.high),
        upper=_finite(row.upper),
        base_perplexity=row.base_perplexity,
        kl=row.kl,
        same_top1=row.same_top1,
        kl_p99=row.kl_p99,
        kl_max=row.kl_max,
        by_domain=_finite_ones(row.by_domain),
    )


def _agreement(manifest: Manifest | None) -> Agreement | None:
    if manifest is None or manifest.verify is None:
        return None
    facts = manifest.verify
    return Agreement(facts.tokens, facts.relative_error, facts.limit, facts.same_top1, facts.subject)


def _units(table: Table | None, manifest: Manifest | None) -> list[UnitResult]:
    """Return the units in graph order: the manifest's say what was built, the table's what was measured."""
    rows = {row.unit: row for row in table.units} if table else {}
    if manifest is None:
        return [_unit(name, row.precision, row.reason, row) for name, row in rows.items()]
    return [
        _unit(built.unit, built.precision, _reason(built, rows.get(built.unit)), rows.get(built.unit))
        for built in manifest.units
    ]


def _reason(built: UnitPrecision, row: UnitRow | None) -> str:
    """Return the reason of the choice, or the builder's where it could not follow the choice."""
    if row is not None and (row.precision == "int8") == (built.precision == "int8"):
        return row.reason
    return built.reason


def _unit(name: str, precision: str, reason: str, row: UnitRow | None) -> UnitResult:
    return UnitResult(
        unit=name,
        kind=name.rpartition(".")[2],
        precision=precision,
        reason=reason,
        weights=row.weights if row else None,
        measures=_measures(row) if row else None,
        score_without_smoothing=_finite(row.score_without_smoothing) if row else None,
    )


def _measures(row: UnitRow) -> UnitMeasures | None:
    """Return the measures, or None when one of them is not a number to draw."""
    found = UnitMeasures(row.pooled_error, row.per_token_error, row.worst_token_error, row.kl, row.same_top1)
    return found if all(math.isfinite(value) for value in msgspec.structs.astuple(found)) else None


def _check(row: CheckRow) -> GateCheck:
    return GateCheck(row.units, row.int8_share, _finite(row.ratio), _finite(row.upper))


def _chosen(table: Table) -> GateCheck:
    count = sum(row.precision == "int8" for row in table.units)
    return GateCheck(count, table.int8_share, _finite(table.gate.ratio), _finite(table.gate.upper))


def _bytes_per_token(manifest: Manifest, parts: Sequence[Part]) -> int:
    """Return the weight bytes that one decode step reads: all but an embedding that is not the head, too."""
    return manifest.weight_bytes - sum(part.real or 0 for part in parts if part.key == "embed")


def _ceiling(board: Board, weight_bytes: int, kv_bytes: int | None) -> Ceiling:
    bandwidth = board.gb_per_s * 1e9
    return Ceiling(board, bandwidth / weight_bytes, bandwidth / (weight_bytes + kv_bytes) if kv_bytes else None)


def _cost(table: Table | None, manifest: Manifest | None, cache_hits: int | None) -> Cost:
    return Cost(
        seconds=manifest.build.seconds if manifest else None,
        peak_memory_bytes=manifest.build.peak_memory_bytes if manifest else None,
        model_passes=table.model_passes if table else None,
        measuring_seconds=table.seconds if table else None,
        cache_hits=cache_hits,
    )


def _finite_ones(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
