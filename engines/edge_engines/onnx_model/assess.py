"""Assess a model for INT8: ranges, scales, error and effect of each unit, choice under the gate. The steps in order.

Three disjoint sets of samples: calibration gives ranges, ranking chooses scales and orders units, the gate judges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from edge_engines.onnx_model.baseline import Baseline
from edge_engines.onnx_model.calibrate import collect_ranges
from edge_engines.onnx_model.code_file import store_codes
from edge_engines.onnx_model.local import LocalError, measure_local
from edge_engines.onnx_model.outputs import Agreement
from edge_engines.onnx_model.ranges import Histogram
from edge_engines.onnx_model.rewrite import Form
from edge_engines.onnx_model.samples import Samples, Split
from edge_engines.onnx_model.trial import Trials
from edge_engines.onnx_model.units import Unit
from edge_engines.progress import Progress
from edge_engines.qdq.codes import activation_scale
from edge_engines.sensitivity.select import THRESHOLD, Candidate, Choice, choose_int8

GATE = 0.1  # largest upper 95 % bound of the mean relative L2 error of the outputs: cosine about 0.995
TOP1 = 0.02  # largest share of samples whose best class changes; one sample is always allowed
_DEFAULT_RULE = "absmax"
_LARGEST_EXPONENT = 700.0  # of a double


@dataclass(frozen=True, slots=True)
class UnitScore:
    """Everything that was measured of one unit."""

    unit: Unit
    rule: str  # that gave the scale of its input: the clipping with the least local error
    scale: float
    local: LocalError
    effect: Agreement  # of the outputs, when it alone runs INT8


@dataclass(frozen=True, slots=True)
class Assessment:
    """What INT8 does to a model, and the choice that follows."""

    scores: Sequence[UnitScore]  # in graph order
    choice: Choice
    joint: Agreement  # of the chosen set on the gate's samples
    trials: Trials


def assess(
    model: onnx.ModelProto,
    folder: Path,
    units: Sequence[Unit],
    samples: Samples,
    split: Split,
    ranking: Baseline,
    judged: Baseline,
    *,
    half: onnx.ModelProto | None,
    form: Form,
    threshold: float = THRESHOLD,
    gate: float = GATE,
    progress: Progress,
) -> Assessment:
    """Choose the units that run INT8. `model` is the plain float graph in `folder`.

    `half` is its FP16 form where that will be written, `form` is how INT8 is. Raises BuildError.
    """
    progress.step("calibrating", len(split.calibration))
    ranges = collect_ranges(model, folder, units, samples.batches(split.calibration), progress)
    progress.step("rounding weights", len(units))
    stored = store_codes(model, folder, units, progress)
    candidates = {unit.name: candidate_scales(ranges[unit.tensor]) for unit in units}
    progress.step("measuring each layer", len(split.ranking))
    local = measure_local(model, folder, units, candidates, stored, samples.batches(split.ranking), progress)
    rules = {unit.name: best_rule(local[unit.name]) for unit in units}
    scales = {unit.name: candidates[unit.name][rules[unit.name]] for unit in units}
    trials = Trials(model, half, folder, units, scales, stored, form)
    progress.step("measuring the effect of each layer on the outputs", len(units))
    scores = []
    for unit in units:
        effect = trials.effect(unit.name, ranking)
        rule = rules[unit.name]
        scores.append(UnitScore(unit, rule, scales[unit.name], local[unit.name][rule], effect))
        progress.advance(1)
    return _choose(scores, trials, judged, threshold, gate, progress)


def candidate_scales(histogram: Histogram) -> dict[str, float]:
    """Return the scales worth trying for a tensor, by the rule that gives each; FP16 holds them exactly."""
    return {
        rule: float(np.float16(activation_scale(point, histogram.name))) for rule, point in histogram.clips().items()
    }


def best_rule(errors: Mapping[str, LocalError]) -> str:
    """Return the clipping with the least local error; the whole range where nothing is better."""
    return min(errors, key=lambda rule: (errors[rule].judged, rule != _DEFAULT_RULE))


def bound(found: Agreement, gate: float) -> float:
    """Return what the gate looks at: the error's upper bound, or the share of changed classes on the same measure."""
    if found.same_top1 is None:
        return found.upper
    allowed = max(TOP1, 1 / found.samples)
    return max(found.upper, gate * (1 - found.same_top1) / allowed)


def as_ratio(error: float) -> float:
    """Return an error, as a multiple of the gate, on the scale of a perplexity ratio, which the choice works on.

    There effects of units add up to the logarithm of the ratio; errors of outputs add up as powers: exp(error²).
    """
    return math.exp(min(error**2, _LARGEST_EXPONENT))


def _choose(
    scores: Sequence[UnitScore], trials: Trials, judged: Baseline, threshold: float, gate: float, progress: Progress
) -> Assessment:
    progress.step("choosing layers under the gate", None)
    known: dict[frozenset[str], Agreement] = {}

    def check(int8: frozenset[str]) -> float:
        known[int8] = trials.agree(int8, judged)
        return as_ratio(bound(known[int8], gate) / gate)

    candidates = [_candidate(score, gate) for score in scores]
    choice = choose_int8(candidates, check, threshold=threshold, gate=as_ratio(1.0))
    joint = known.get(choice.int8) or trials.agree(choice.int8, judged)
    return Assessment(scores, choice, joint, trials)


def _candidate(score: UnitScore, gate: float) -> Candidate:
    """Describe a unit for the choice, its effect as a share of what the gate allows."""
    return Candidate(
        unit=score.unit.name,
        num_bytes=score.unit.num_weights,  # FP16 to INT8
        local_error=score.local.judged,
        kl=(score.effect.error / gate) ** 2,
    )
