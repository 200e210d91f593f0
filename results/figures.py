"""The figures that templates of docs/results/ ask for, and the checks of what they say in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from tam.lab.core.ladder import LadderSummary, mean_losses, summarize
from tam.lab.core.ladder_plan import LadderPlan
from tam.lab.core.runner import finished_trials
from tam.lab.experiments.pretrain.hypotheses import ROUNDING, SettledAlignment, settled_alignment
from tam.lab.report.claim_pages import format_estimate, format_part
from tam.lab.report.comparisons import StudyResults, has_torque
from tam.lab.report.evidence import REGISTERED, Evidence
from tam.lab.report.hypotheses import Array, DrawnLadder, Draws, draw_ladder
from tam.lab.report.statistics import Estimate
from tam.lab.report.verdicts import HOLDS, SCHEDULE, PartResult, Row
from tam.step.rule import damping_of

NOT_RUN = "not run"


@dataclass(frozen=True)
class Figures:
    """Figures by claim and part, or by EXPERIMENT/PRESET/STUDY and variant."""

    evidence: Evidence
    rows: Sequence[Row]

    def functions(self) -> dict[str, Callable[..., object]]:
        """Return what the templates can call."""
        named = (
            self.part, self.control, self.equal_lr, self.difference, self.estimate, self.outcome,
            self.damping_range, self.check, self.gated, self.verdict, self.trials, self.against,
            self.best_gap, self.gaps, self.knee_shift, self.mean_losses, self.octaves, self.rungs,
            self.settled, self.summary, self.zero_of_s,
        )  # fmt: skip
        return {function.__name__: function for function in named}

    @cached_property
    def _parts(self) -> dict[tuple[int, str], PartResult]:
        return {(row.claim.number, one.part.label): one for row in self.rows for one in row.parts}

    def part(self, number: int, label: str) -> str:
        """Return the figure of a part of a claim."""
        return format_part(self._parts[number, label]) or NOT_RUN

    def verdict(self, number: int, label: str) -> str:
        return self._parts[number, label].verdict

    def control(self, number: int, label: str, kind: str = "another") -> str:
        """Return the figure of TAM against a control."""
        return _text(self._parts[number, label], self.against(number, label, kind))

    def against(self, number: int, label: str, kind: str) -> Estimate:
        """Return TAM against a control, "another" seed's or "constant" damping."""
        controls = self._parts[number, label].controls
        return next(found for name, found in controls.items() if kind in name)

    def _ladder(self, source: str) -> LadderPlan:
        experiment, preset, study = source.split("/")
        plan = self.evidence.plans[experiment, preset, study]
        assert isinstance(plan, LadderPlan)
        return plan

    def summary(self, source: str, variant: str) -> LadderSummary:
        """Return the best rung of a variant of a ladder, as the baseline's lr, and its knees."""
        plan = self._ladder(source)
        return summarize(plan.losses(plan.study.variant(variant)), plan.rules.tolerance)

    def rungs(self, source: str) -> list[float]:
        """Return the learning rates of a ladder, as its baseline's."""
        plan = self._ladder(source)
        return plan.grid(plan.study.variant(plan.study.baseline))

    def mean_losses(self, source: str, variant: str) -> list[float]:
        """Return the mean loss of a variant at each rung."""
        plan = self._ladder(source)
        return [*mean_losses(plan.losses(plan.study.variant(variant))).values()]

    def settled(self, source: str, variant: str) -> SettledAlignment:
        """Return the settled s of a variant of a ladder."""
        plan = self._ladder(source)
        return settled_alignment(plan, plan.study.variant(variant))

    def zero_of_s(self, source: str, variant: str) -> float:
        """Return by how many octaves the lr at which s is 0 lies above the best rung. s must fall with lr.

        It is infinite if that lr lies outside of the rungs.
        """
        s, log_lrs = self.settled(source, variant), np.log2(self.rungs(source))
        zero = np.interp(0.0, s.by_rung[::-1], log_lrs[::-1], left=math.inf, right=-math.inf)
        return float(zero - log_lrs[s.best])

    def _drawn(self, source: str, *variants: str) -> list[DrawnLadder]:
        """Return draws of the seeds of some variants of a ladder."""
        plan, draws = self._ladder(source), Draws()
        losses = (plan.losses(plan.study.variant(name), with_skipped=True) for name in variants)
        return [draw_ladder(own, draws, plan.rules) for own in losses]

    def gaps(self, source: str, variant: str, other: str, lowest_lr: float) -> list[Estimate]:
        """Return a variant's mean loss minus another's at the rungs from this lr on, over draws."""
        (own, others), lrs = self._drawn(source, variant, other), self.rungs(source)
        differences = own.means - others.means
        return [
            self._estimate(source, differences[:, i])
            for i, lr in enumerate(lrs)
            if lr >= lowest_lr * (1 - ROUNDING)
        ]

    def knee_shift(self, source: str, variant: str, other: str) -> Estimate:
        """Return by how many octaves a variant's upper knee is above another's, over draws of the seeds."""
        own, others = self._drawn(source, variant, other)
        return self._estimate(source, np.log2(own.upper_knee / others.upper_knee))

    def best_gap(self, source: str, variant: str, other: str) -> Estimate:
        """Return a variant's best mean loss minus another's, over draws of the seeds."""
        own, others = self._drawn(source, variant, other)
        return self._estimate(source, own.means.min(1) - others.means.min(1))

    def _estimate(self, source: str, drawn: Array) -> Estimate:
        """Return what was measured, with the range of 95 % of the draws."""
        low, high = np.quantile(drawn[1:], [0.025, 0.975])
        n = len(self._ladder(source).study.seeds)
        return Estimate(float(drawn[0]), float(low), float(high), math.nan, n)

    def octaves(self, source: str, variant: str, other: str) -> str:
        return f"{self.knee_shift(source, variant, other).format(2)} octaves"

    def equal_lr(self, number: int, label: str) -> str:
        """Return the difference at the same lr instead of the same effective lr."""
        return _text(self._parts[number, label], self._parts[number, label].equal_lr)

    def estimate(self, source: str, variant: str, other: str) -> Estimate:
        """Return a difference, or raise if it was not run."""
        found = self._results(source).difference(variant, other)
        if found is None:
            raise ValueError(f"{source} has no difference between {variant!r} and {other!r}")
        return found

    def difference(self, source: str, variant: str, other: str) -> str:
        return self.estimate(source, variant, other).format(self._results(source).study.digits)

    def outcome(self, source: str, variant: str, digits: int = 1) -> str:
        """Return the mean outcome of a variant."""
        results = self._results(source)
        mean = fmean(results.outcomes[variant].values(results.study.outcome).values())
        return f"{mean:.{digits}f}"

    def damping_range(self, *experiments: str) -> str:
        """Return the lowest and highest mean d of the runs with TAM or AdaTAM."""
        means = []
        for plan in self.evidence.plans.values():
            if plan.experiment.name in experiments:
                for outcome in plan.outcomes():
                    rows = (row for one in outcome.records.values() for row in one.metrics)
                    s = [row["alignment"] for row in rows if "alignment" in row]
                    if s and has_torque(outcome.variant):
                        means.append(damping_of(fmean(s)))
        return f"{min(means):.2f} to {max(means):.2f}"

    def trials(self, experiment: str) -> int:
        """Return the number of stored trials of the registered presets."""
        plans = (
            plan
            for (name, preset, _), plan in self.evidence.plans.items()
            if name == experiment and preset.startswith(REGISTERED)
        )
        return len({key for plan in plans for key in finished_trials(plan)})

    def gated(self, kind: str) -> list[str]:
        """Return the parts that need controls and "hold", hold as a "schedule", or are "ahead" at all."""
        names = []
        for (number, label), one in self._parts.items():
            if one.part.rule == "superiority" and one.part.gate and one.estimate is not None:
                is_one = {
                    "hold": one.verdict == HOLDS,
                    "schedule": one.verdict == SCHEDULE,
                    "ahead": one.estimate.low > 0,
                }
                names += [f"{number}: {label}"] if is_one[kind] else []
        return names

    def check(self, condition: bool) -> str:
        """Return nothing, or raise if the results no longer bear out the sentence that follows."""
        if not condition:
            raise ValueError("the stored results do not bear out a sentence of this page: rewrite it")
        return ""

    def _results(self, source: str) -> StudyResults:
        experiment, preset, study = source.split("/")
        return StudyResults(self.evidence.plans[experiment, preset, study])


def _text(result: PartResult, found: Estimate | None) -> str:
    return NOT_RUN if found is None else format_estimate(result.part, found)
