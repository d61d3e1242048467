"""Write and read sensitivity.json: what was measured of each unit, what was chosen, and why."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from edge_engines.sensitivity.assess import Assessment, UnitScore
from edge_engines.sensitivity.blocks import EMBED, HEAD
from edge_engines.sensitivity.gate import Check
from edge_engines.sensitivity.select import Reason
from edge_runtime.errors import BuildError

FORMAT = 2
FILE_NAME = "sensitivity.json"


class UnitRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One unit: its errors when it alone runs INT8, and the choice.

    In a tied model `embed` and `head` are one table: both rows have its size, and the effect of both together.
    """

    unit: str
    weights: int
    pooled_error: float
    per_token_error: float
    worst_token_error: float
    score_without_smoothing: float  # the larger of pooled and per-token error when nothing is smoothed
    kl: float  # nats per token: mean, 99th percentile and largest
    kl_p99: float
    kl_max: float
    same_top1: float
    precision: Literal["int8", "fp16"]
    reason: Reason

    @property
    def score(self) -> float:
        """What the threshold is held against."""
        return max(self.pooled_error, self.per_token_error)


class CheckRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One set of units on the gate's text."""

    units: int
    int8_share: float  # of the body's weights
    ratio: float
    upper: float


class GateRow(Struct, frozen=True, forbid_unknown_fields=True):
    """The chosen set on the gate's text; KL and the likeliest token are of the ranking text."""

    limit: float
    ratio: float
    low: float  # 95 % interval of the bootstrap
    high: float
    upper: float  # 95 % bound, which the limit is held against
    by_domain: dict[str, float]  # ratio
    base_perplexity: float
    kl: float
    kl_p99: float
    kl_max: float
    same_top1: float
    checks: int


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of sensitivity.json.

    `precision` of a unit and `alphas` may be edited, to be built with as they are; the rest is what was measured.
    """

    format: int
    model: str
    checkpoint_sha256: str
    texts: dict[str, str]  # digest of each text
    threshold: float
    alphas: dict[str, float]  # smoothing per kind of unit
    scales: dict[str, float]  # activation scale per unit
    gate: GateRow
    checks: list[CheckRow]  # in the order in which they were made
    rule_only: CheckRow | None  # what the pooled error alone would choose, nothing smoothed
    int8_share: float  # of the body's weights
    seconds: float
    model_passes: float
    units: list[UnitRow]
    cache_hits: int = 0  # results that had been measured before; `seconds` and `model_passes` are without them


def make_table(
    found: Assessment,
    *,
    model: str,
    checkpoint_sha256: str,
    texts: dict[str, str],
    threshold: float,
    gate: float,
    seconds: float,
    cache_hits: int,
) -> Table:
    """Return the table of an assessment."""
    return Table(
        format=FORMAT,
        model=model,
        checkpoint_sha256=checkpoint_sha256,
        texts=texts,
        threshold=threshold,
        alphas=dict(found.alphas),
        scales=dict(found.scales),
        gate=_gate_row(found, gate),
        checks=[_check_row(check, found.scores) for check in found.checks],
        rule_only=_check_row(found.rule_only, found.scores) if found.rule_only else None,
        int8_share=int8_share(found.choice.int8, found.scores),
        seconds=round(seconds, 1),
        model_passes=round(found.num_model_passes, 1),
        units=[_unit_row(score, found) for score in found.scores],
        cache_hits=cache_hits,
    )


def int8_share(int8: Collection[str], scores: Sequence[UnitScore]) -> float:
    """Return the share of the body's weights that runs INT8: embedding and head do not count."""
    body = {score.unit: score.num_weights for score in scores if score.unit not in (EMBED, HEAD)}
    return sum(num for unit, num in body.items() if unit in int8) / sum(body.values())


def write_table(folder: Path, table: Table) -> Path:
    """Write `folder/sensitivity.json` so that it is whole or absent, and return its path. Raises BuildError."""
    path = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{FILE_NAME}.", delete=False) as stream:
            try:
                stream.write(msgspec.json.format(msgspec.json.encode(table), indent=1) + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
                os.replace(stream.name, path)
            except BaseException:
                os.unlink(stream.name)
                raise
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}", remedy="name a folder you may write to with -o") from error
    return path


def read_table(path: Path) -> Table:
    """Read a sensitivity.json. Raises BuildError naming the file and the field at fault."""
    try:
        table = msgspec.json.decode(path.read_bytes(), type=Table)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}", remedy=f"name a {FILE_NAME} that was measured before") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BuildError(f"{path}: not a valid {FILE_NAME}: {error}", remedy="measure it again") from error
    if table.format != FORMAT:
        raise BuildError(f"{path}: format {table.format}, this version reads {FORMAT}", remedy="measure it again")
    return table


def _unit_row(score: UnitScore, found: Assessment) -> UnitRow:
    return UnitRow(
        unit=score.unit,
        weights=score.num_weights,
        pooled_error=score.local.pooled,
        per_token_error=score.local.per_token,
        worst_token_error=score.local.worst_token,
        score_without_smoothing=score.score_without_smoothing,
        kl=score.effect.kl,
        kl_p99=score.effect.kl_p99,
        kl_max=score.effect.kl_max,
        same_top1=score.effect.same_top1,
        precision="int8" if score.unit in found.choice.int8 else "fp16",
        reason=found.choice.reasons[score.unit],
    )


def _check_row(check: Check, scores: Sequence[UnitScore]) -> CheckRow:
    return CheckRow(len(check.int8), int8_share(check.int8, scores), check.ratio.ratio, check.ratio.upper)


def _gate_row(found: Assessment, limit: float) -> GateRow:
    ratio, joint = found.final.ratio, found.joint
    return GateRow(
        limit=limit,
        ratio=ratio.ratio,
        low=ratio.low,
        high=ratio.high,
        upper=ratio.upper,
        by_domain=dict(found.final.by_domain),
        base_perplexity=found.base_perplexity,
        kl=joint.kl,
        kl_p99=joint.kl_p99,
        kl_max=joint.kl_max,
        same_top1=joint.same_top1,
        checks=len(found.checks),
    )
