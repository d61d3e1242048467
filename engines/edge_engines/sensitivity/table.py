"""Write and read sensitivity.json: what was measured of each unit, what was chosen, and why."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from edge_engines.sensitivity.assess import Assessment
from edge_runtime.errors import BuildError

FORMAT = 1
FILE_NAME = "sensitivity.json"


class UnitRow(Struct, frozen=True, forbid_unknown_fields=True):
    """One unit: its errors when it alone runs INT8, and the choice."""

    unit: str
    weights: int
    pooled_error: float
    per_token_error: float
    worst_token_error: float
    kl: float  # nats per token
    same_top1: float
    precision: Literal["int8", "fp16"]
    reason: str


class GateRow(Struct, frozen=True, forbid_unknown_fields=True):
    """The chosen set on the gate's text."""

    limit: float
    ratio: float
    upper: float  # 95 % bound, which the limit is held against
    base_perplexity: float
    kl: float
    same_top1: float
    checks: int


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of sensitivity.json. `precision` of a unit may be edited; the rest is what was measured."""

    format: int
    model: str
    checkpoint_sha256: str
    texts: dict[str, str]  # digest of each text
    threshold: float
    alphas: dict[str, float]  # smoothing per kind of unit
    scales: dict[str, float]  # activation scale per unit
    gate: GateRow
    int8_share: float  # of the body's weights
    seconds: float
    model_passes: float
    units: list[UnitRow]


def make_table(
    found: Assessment,
    *,
    model: str,
    checkpoint_sha256: str,
    texts: dict[str, str],
    threshold: float,
    gate: float,
    seconds: float,
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
        gate=GateRow(
            limit=gate,
            ratio=found.ratio.ratio,
            upper=found.ratio.upper,
            base_perplexity=found.base_perplexity,
            kl=found.joint.kl,
            same_top1=found.joint.same_top1,
            checks=found.choice.num_checks,
        ),
        int8_share=found.int8_share,
        seconds=round(seconds, 1),
        model_passes=round(found.num_model_passes, 1),
        units=[
            UnitRow(
                unit=score.unit,
                weights=score.num_weights,
                pooled_error=score.local.pooled,
                per_token_error=score.local.per_token,
                worst_token_error=score.local.worst_token,
                kl=score.effect.kl,
                same_top1=score.effect.same_top1,
                precision="int8" if score.unit in found.choice.int8 else "fp16",
                reason=found.choice.reasons[score.unit],
            )
            for score in found.scores
        ],
    )


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
        raise BuildError(f"{path}: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BuildError(f"{path}: not a valid {FILE_NAME}: {error}", remedy="measure it again") from error
    if table.format != FORMAT:
        raise BuildError(f"{path}: format {table.format}, this version reads {FORMAT}", remedy="measure it again")
    return table
