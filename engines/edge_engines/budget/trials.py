"""Try choices of forms on the gate's text, and keep what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from edge_engines.budget.costs import Costs
from edge_engines.budget.forms import Forms
from edge_engines.budget.front import Point
from edge_engines.budget.judge import FormJudge, Verdict
from edge_engines.budget.measure import spelled
from edge_engines.budget.table import CheckRow
from edge_engines.progress import Progress


@dataclass(frozen=True, slots=True)
class Trial:
    """One choice and the gate's verdict."""

    forms: Forms
    effect: float  # sum of the units' effects
    verdict: Verdict


class Trials:
    """Call it with a point of the front to have the upper 95 % bound of its perplexity ratio."""

    def __init__(self, judge: FormJudge, costs: Costs, progress: Progress) -> None:
        self._judge, self._costs, self._progress = judge, costs, progress
        self._made: dict[str, Trial] = {}  # in the order in which they were asked for

    def __call__(self, point: Point) -> float:
        """Return the upper 95 % bound of a choice's ratio."""
        return self.of(point.forms, point.effect).verdict.ratio.upper

    def of(self, forms: Forms, effect: float) -> Trial:
        """Return the trial of a choice; each is made once."""
        key = spelled(forms)
        if key not in self._made:
            found = self._made[key] = Trial(forms, effect, self._judge.judge(forms))
            ratio = found.verdict.ratio
            size = self._costs.engine_bytes(forms) / 1e6
            self._progress.note(
                f"{name_of(forms)}: {size:.1f} MB, perplexity x {ratio.ratio:.4f}, at most {ratio.upper:.4f}"
            )
        return self._made[key]

    def rows(self, chosen: Forms) -> list[CheckRow]:
        """Return all trials for the record."""
        return [
            CheckRow(
                name=name_of(trial.forms),
                engine_bytes=self._costs.engine_bytes(trial.forms),
                step_bytes=self._costs.step_bytes(trial.forms),
                kl=trial.effect,
                ratio=trial.verdict.ratio.ratio,
                upper=trial.verdict.ratio.upper,
                is_chosen=trial.forms == chosen,
            )
            for trial in self._made.values()
        ]


def name_of(forms: Forms) -> str:
    """Return a choice in a few words: "all int8", or how many units have each form."""
    counts = Counter(forms.values()).most_common()
    return f"all {counts[0][0]}" if len(counts) == 1 else ", ".join(f"{count} {form}" for form, count in counts)
