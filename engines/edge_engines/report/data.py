"""Say what a report shows: the content of report.json, and all that the page is made of.

Lists that are empty and fields that are None were not measured; the page leaves their section out.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

FORMAT = 1


class Subject(Struct, frozen=True, forbid_unknown_fields=True):
    """What was built, or was to be built."""

    model: str
    checkpoint_sha256: str
    source: str | None = None  # name of the checkpoint's file or folder
    family: str | None = None
    parameters: int | None = None
    target: str | None = None
    precision: str | None = None
    lowering: str | None = None
    capacity: int | None = None  # C
    max_batch: int | None = None  # B
    created: str | None = None  # UTC, ISO 8601
    tool_version: str | None = None


class GateResult(Struct, frozen=True, forbid_unknown_fields=True):
    """The chosen set on the gate's text. A ratio of None was not finite."""

    subject: Literal["engine", "simulation"]  # what was run: the written engine has the last word
    limit: float
    ratio: float | None  # perplexity by that of the baseline
    low: float | None  # 95 % interval
    high: float | None
    upper: float | None  # 95 % bound from the standard error, which the limit is held against
    base_perplexity: float
    kl: float  # nats per token, of the simulation on the ranking text
    same_top1: float  # share of its tokens, 0 to 1
    tokens: int | None = None  # of the gate's text
    kl_p99: float | None = None
    kl_max: float | None = None
    by_domain: dict[str, float] = msgspec.field(default_factory=dict)  # ratio per domain of the gate's text


class Agreement(Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine compared with the plain reference on a fixed prompt."""

    tokens: int
    relative_error: float  # of the last logits, L2
    limit: float
    same_top1: bool
    subject: str  # "engine" or "graph"


class UnitMeasures(Struct, frozen=True, forbid_unknown_fields=True):
    """What INT8 does to one unit when it alone runs it."""

    pooled: float  # relative L2 error of its output over all tokens
    per_token: float  # mean over tokens of the same
    worst_token: float
    kl: float  # nats per token at the logits
    same_top1: float

    @property
    def score(self) -> float:
        """What the threshold is held against."""
        return max(self.pooled, self.per_token)


class UnitResult(Struct, frozen=True, forbid_unknown_fields=True):
    """One unit: its precision, the reason, and what was measured."""

    unit: str
    kind: str  # qkv, o, gate_up, down, head, embed, or the last part of another name
    precision: str
    reason: str
    weights: int | None = None
    measures: UnitMeasures | None = None
    score_without_smoothing: float | None = None


class GateCheck(Struct, frozen=True, forbid_unknown_fields=True):
    """One set of INT8 units that was held against the gate. None: not finite."""

    units: int  # how many run INT8
    int8_share: float  # of the body's weights, 0 to 1
    ratio: float | None
    upper: float | None


class Part(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes of one part of the engine; `key` names its colour: embed, head, rest or a precision."""

    key: str
    name: str
    predicted: int | None
    real: int | None


class Board(Struct, frozen=True, forbid_unknown_fields=True):
    """The memory of one board in one power mode."""

    name: str
    mode: str
    gb_per_s: float  # 10^9 bytes per second, nominal


class Ceiling(Struct, frozen=True, forbid_unknown_fields=True):
    """Most tokens per second one slot can decode on a board: its bandwidth over the bytes of a step."""

    board: Board
    empty: float  # with an empty slot: weights alone
    full: float | None  # with a full slot: weights and all KV rows


class Sample(Struct, frozen=True, forbid_unknown_fields=True):
    """What baseline and engine write after the same prompt, both greedily."""

    prompt: str
    baseline: str
    engine: str


class Step(Struct, frozen=True, forbid_unknown_fields=True):
    """One step of the build."""

    name: str
    seconds: float


class Cost(Struct, frozen=True, forbid_unknown_fields=True):
    """What the build took."""

    seconds: float | None = None
    peak_memory_bytes: int | None = None
    model_passes: float | None = None  # over the ranking text
    measuring_seconds: float | None = None
    cache_hits: int | None = None  # results taken from the journal of an earlier run


class Histogram(Struct, frozen=True, forbid_unknown_fields=True):
    """Per-token relative errors of one unit: `counts[i]` tokens lie in `edges[i]` to `edges[i + 1]`."""

    unit: str
    edges: list[float]
    counts: list[int]
    spike_token: str | None = None  # text of the token with the largest error


class ParetoPoint(Struct, frozen=True, forbid_unknown_fields=True):
    """One choice of precisions: what it costs and what it does."""

    name: str
    engine_bytes: int
    ratio: float
    ms_per_token: float | None = None  # predicted
    board: str | None = None
    chosen: bool = False


class ReportData(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of report.json."""

    format: int
    passed: bool
    subject: Subject
    cost: Cost
    refusal: str | None = None  # why there is no engine
    gate: GateResult | None = None
    agreement: Agreement | None = None
    threshold: float | None = None
    chosen: GateCheck | None = None  # in simulation, as the checks are
    units: list[UnitResult] = msgspec.field(default_factory=list)  # in graph order
    checks: list[GateCheck] = msgspec.field(default_factory=list)
    rule_only: GateCheck | None = None  # what the pooled error alone would choose, nothing smoothed
    engine_bytes: int | None = None  # of all files
    parts: list[Part] = msgspec.field(default_factory=list)
    bytes_per_token: int | None = None  # weights read by one decode step
    kv_slot_bytes: int | None = None  # of one full slot
    ceilings: list[Ceiling] = msgspec.field(default_factory=list)
    samples: list[Sample] = msgspec.field(default_factory=list)
    steps: list[Step] = msgspec.field(default_factory=list)
    alphas: dict[str, float] = msgspec.field(default_factory=dict)  # smoothing per kind of unit
    texts: dict[str, str] = msgspec.field(default_factory=dict)  # digest of each text
    options: dict[str, str] = msgspec.field(default_factory=dict)
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    residual: list[float] = msgspec.field(default_factory=list)  # relative error of the residual stream, per layer
    histograms: list[Histogram] = msgspec.field(default_factory=list)
    pareto: list[ParetoPoint] = msgspec.field(default_factory=list)
    plan: str | None = None  # sensitivity.json, to paste back
