"""H5 and H7 of registered.md on the SGD side: what each draw of the seeds says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tam.lab.core.ladder_plan import LadderPlan
from tam.lab.core.study import Ladder
from tam.lab.experiments.sgd_ladder.studies import variants
from tam.lab.report.hypotheses import Array, Draws, knees

NAMES = {number: variant.name for number, variant in variants((1.0,)).items()}  # of S1, S1n ...
QUARTER_OCTAVE = 2**0.25
FROZEN_STEPS, FROZEN_SHARE = 50, 0.2
Truth = NDArray[np.bool_]  # of a statement: for the measured means, then for every draw


class Network:
    """One ladder of the SGD side."""

    def __init__(self, plan: LadderPlan) -> None:
        self.plan, self._draws = plan, Draws()

    @cached_property
    def knees(self) -> dict[str, Array]:
        """The upper knees by variant: as measured, then of every draw."""
        return {one: self._knee(one) for one in ("S1n", "S2n", "S3n", "S4", "S5", "S5c")}

    def _knee(self, number: str) -> Array:
        """Return a variant's upper knee. It is the lowest rung if every trial of the best one failed."""
        assert isinstance(self.plan.study, Ladder)
        variant = self.plan.study.variant(NAMES[number])
        losses = self.plan.losses(variant, with_skipped=True)
        lrs = np.array([lr for lr in sorted(losses) if losses[lr]])  # a control can lack all sources
        means = self._draws.means([losses[lr] for lr in lrs])
        upper = knees(means, lrs, self.plan.study.tolerance)[1]
        failed = {lr: k == n for lr, (k, n) in self.plan.failures(variant).items()}
        has_no_best = np.array([failed.get(lr, True) for lr in lrs])[means.argmin(1)]
        return np.where(has_no_best, lrs[0], upper)

    def pumps(self) -> Truth:
        """H5 (a) and (b): a short average of the cosine lowers the upper knee, a long one does not."""
        limit = self.knees["S1n"] / QUARTER_OCTAVE
        truth: Truth = (self.knees["S2n"] < limit) & (self.knees["S3n"] >= limit)
        return truth

    def freezes(self) -> tuple[int, int]:
        """H5 (c): how many runs with gain 5 froze, of those at the two rungs around their upper knee."""
        rungs = self.plan.ladder(self.plan.study.variant(NAMES["S4"]))
        lrs, knee = sorted(rungs), 2 * float(self.knees["S4"][0])  # TAM's own lr is twice SGDM's
        above = min(max(sum(lr < knee * (1 - 1e-9) for lr in lrs), 1), len(lrs) - 1)
        records = [record for lr in lrs[above - 1 : above + 1] for record in rungs[lr].values()]
        return sum(record.result["frozen_steps"] > FROZEN_STEPS for record in records), len(records)

    def restarts_help(self) -> Truth:
        """H7: soft restarts raise the upper knee by a quarter octave."""
        truth: Truth = self.knees["S5"] >= QUARTER_OCTAVE * self.knees["S5c"]
        return truth

    def octaves(self, number: str, other: str) -> float:
        """Return by how many octaves one variant's knee is above another's, as measured."""
        return math.log2(self.knees[number][0] / self.knees[other][0])


def both(truths: Sequence[Truth]) -> Truth:
    """Return in which draws a statement holds for every network."""
    truth: Truth = np.logical_and.reduce(truths)
    return truth
