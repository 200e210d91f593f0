"""The comparisons of a study: by how much variants differ, and at which learning rates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import isclose

from tam.lab import optimizers
from tam.lab.core.controls import plain, settled_step
from tam.lab.core.ladder_plan import LadderPlan
from tam.lab.core.plan import Outcome, Plan
from tam.lab.core.results import TrialRecord
from tam.lab.core.study import Study, Variant
from tam.lab.report.forest import ForestRow, Mark, Shape
from tam.lab.report.statistics import Estimate, estimate

SAME = 0.01  # relative difference up to which two effective learning rates are the same


@dataclass(frozen=True)
class Comparison:
    """The difference between two variants of a study, and how their learning rates compare."""

    variant: str
    other: str
    shape: Shape  # "square": equal effective lr; "hollow": another one; "triangle": another seed's damping
    estimate: Estimate
    lost: int  # runs without an outcome, on either side
    trials: frozenset[str]  # the keys of all runs

    @property
    def counts(self) -> bool:
        """Whether it says which side is ahead. The rest of the seeds does not, if some runs were lost."""
        return self.estimate.has_interval and not self.lost


@dataclass(frozen=True)
class StudyResults:
    """The outcomes of a study."""

    plan: Plan

    @property
    def study(self) -> Study:
        return self.plan.study

    @cached_property
    def outcomes(self) -> Mapping[str, Outcome]:
        """The finished trials of each variant that has some planned."""
        return {one.variant.name: one for one in self.plan.outcomes() if one.planned}

    @cached_property
    def records(self) -> list[TrialRecord]:
        """The finished trials of all variants; of a ladder, those of all rungs."""
        if isinstance(self.plan, LadderPlan):
            return self.plan.records()
        return [record for one in self.outcomes.values() for record in one.records.values()]

    @cached_property
    def duplicates(self) -> Mapping[str, str]:
        """The variants whose trials are those of an earlier variant."""
        return self.plan.duplicates()

    def effective_lr(self, name: str) -> float | None:
        """Return the lr of SGDM, Adam or AdamW whose settled steps have the same length.

        In a ladder, it is the lr of the study's baseline.
        """
        lr = self.outcomes[name].lr
        if lr is not None and isinstance(self.plan, LadderPlan):
            return self.plan.effective_lr(self.study.variant(name), lr)
        return None if lr is None else lr * self.effective_ratio(self.study.variant(name))

    def effective_ratio(self, variant: Variant) -> float:
        """Return the effective lr of an lr of 1."""
        settled = settled_step(variant.optimizer, variant.options)
        return settled / settled_step(plain(variant.optimizer), {})

    def difference(self, name: str, other: str) -> Estimate | None:
        """Return one variant minus another, in the units of the outcome. Higher may be worse."""
        if not (name in self.outcomes and other in self.outcomes):
            return None
        ours, theirs = (self.outcomes[one].values(self.study.outcome) for one in (name, other))
        return estimate(ours, theirs, lower=False)

    def comparisons(self) -> Iterator[Comparison]:
        """Return the comparisons of TAM and its relatives with others, as far as they were run."""
        for name, other in dict.fromkeys(self.study.comparisons()):
            if not has_torque(self.study.variant(name)) or {name, other} & self.duplicates.keys():
                continue
            found, control = self.difference(name, other), self.study.variant(other)
            if found is not None and control.damping in (None, "another"):
                shape: Shape = "triangle" if control.damping else self._shape(name, other)
                sides = [self.outcomes[one] for one in (name, other)]
                keys = frozenset(record.key for side in sides for record in side.records.values())
                yield Comparison(name, other, shape, found, sum(side.lost for side in sides), keys)

    def _shape(self, name: str, other: str) -> Shape:
        ours, theirs = self.effective_lr(name), self.effective_lr(other)
        is_same = ours is not None and theirs is not None and isclose(ours, theirs, rel_tol=SAME)
        return "square" if is_same and self.are_related(name, other) else "hollow"

    def are_related(self, name: str, other: str) -> bool:
        """Return True if two variants are of one family. Only there an equal effective lr means something."""
        return len({plain(self.study.variant(one).optimizer) for one in (name, other)}) == 1

    def favours(self, found: Estimate) -> str:
        """Return whom an interval favours: "first", "second" or "" if it includes 0 or is not known."""
        gain = self.gain(found)
        return "first" if gain.low > 0 else "second" if gain.high < 0 else ""

    def gain(self, found: Estimate) -> Estimate:
        """Return a difference with the sign that makes a positive one favour the first variant."""
        if self.study.higher:
            return found
        return replace(found, mean=-found.mean, low=-found.high, high=-found.low)

    def forest_row(self, comparison: Comparison, with_preset: bool) -> ForestRow | None:
        """Return a comparison in units of the study's margin, positive where it favours TAM.

        None if the study has no margin.
        """
        margin = self.study.margin
        if not margin:
            return None
        gain, lost = self.gain(comparison.estimate), comparison.lost
        mark = Mark(comparison.shape, gain.mean / margin, gain.low / margin, gain.high / margin)
        label, text = f"{self.study.name}: {comparison.variant}", gain.format(self.study.digits)
        count = f"n = {gain.n}" + (f", {lost} without an outcome" if lost else "")
        count += f", preset {self.plan.preset}" if with_preset else ""
        return ForestRow(label, f"against {comparison.other}", [mark], text, count)


def has_torque(variant: Variant) -> bool:
    """Return True for TAM, AdaTAM and their relatives, but not for their controls."""
    return optimizers.get(variant.optimizer).has_alignment and not variant.control_of


def distinct_comparisons(every_result: Sequence[StudyResults]) -> list[tuple[StudyResults, Comparison]]:
    """Return the comparisons of all studies, without those whose runs are all in another one.

    Presets can share studies, and some have fewer seeds than others.
    """
    found = [(results, one) for results in every_result for one in results.comparisons()]
    runs = [one.trials | {f"outcome {results.study.outcome}"} for results, one in found]
    return [
        one
        for i, one in enumerate(found)
        if not any(runs[i] < other or (runs[i] == other and j < i) for j, other in enumerate(runs))
    ]
