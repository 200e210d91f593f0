"""H5 and H7 of registered.md on the SGD side: what each draw of the seeds says."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from tam.lab.core.ladder_plan import LadderPlan
from tam.lab.core.results import TrialRecord
from tam.lab.experiments.sgd_ladder.studies import variants
from tam.lab.report.hypotheses import EDGE, Array, Draws, draw_ladder

NAMES = {number: variant.name for number, variant in variants((1.0,)).items()}  # of S1, S1n ...
COMPARED = ("S1n", "S2n", "S3n", "S4", "S5", "S5c")
QUARTER_OCTAVE = 2**0.25
FROZEN_STEPS, FROZEN_SHARE = 50, 0.2
Truth = NDArray[np.bool_]  # of a statement: for the measured means, then for every draw
TrialFigures = list[tuple[float, float]]  # of a trial: its loss, and whether it froze


class Network:
    """One ladder of the SGD side."""

    def __init__(self, plan: LadderPlan, draws: Draws) -> None:
        self.plan = plan
        self.knees: dict[str, Array] = {}  # the upper ones by variant: as measured, then of every draw
        self.frozen: Truth = np.zeros(0, dtype=bool)  # H5 (c)
        self.frozen_runs = 0, 0  # with gain 5, of those around the measured knee
        for number in COMPARED:
            self._add_variant(number, draws)

    def _add_variant(self, number: str, draws: Draws) -> None:
        """Draw the seeds of a variant at all its rungs."""
        figures = self._figures(number)
        drawn = draw_ladder(figures, draws, self.plan.rules)
        self.knees[number] = drawn.upper_knee
        if number == "S4":
            self._count_frozen(figures, drawn.means[..., 1])

    def _figures(self, number: str) -> dict[float, TrialFigures]:
        """Return the figures of a variant's trials by SGDM's lr. The stop rule's count as the cap."""
        plan, variant = self.plan, self.plan.study.variant(NAMES[number])
        figures: dict[float, TrialFigures] = {}
        for lr, records in plan.ladder(variant).items():
            own = [(plan.loss(record), float(has_frozen(record))) for record in records.values()]
            figures[plan.effective_lr(variant, lr)] = own
        for lr in plan.skipped_rungs(variant):
            run = figures.setdefault(plan.effective_lr(variant, lr), [])
            run += [(plan.rules.cap, math.nan)] * (len(plan.study.seeds) - len(run))
        return dict(sorted(figures.items()))

    def _count_frozen(self, figures: dict[float, TrialFigures], shares: Array) -> None:
        """Decide H5 (c) in every draw, at the two rungs around the knee. Rungs that were not run are none."""
        lrs = [lr for lr, own in figures.items() if not any(math.isnan(frozen) for _, frozen in own)]
        sizes = np.array([len(figures[lr]) for lr in lrs])
        lower = (np.array(lrs) < self.knees["S4"][:, None] * (1 - EDGE)).sum(1) - 1
        pair = np.clip(lower, 0, len(lrs) - 2)[:, None] + np.arange(2)
        frozen = (np.take_along_axis(shares[:, : len(lrs)], pair, 1) * sizes[pair]).sum(1)
        self.frozen = cast(Truth, frozen >= FROZEN_SHARE * sizes[pair].sum(1) - EDGE)
        self.frozen_runs = round(frozen[0]), int(sizes[pair[0]].sum())

    def pumps(self) -> Truth:
        """H5 (a) and (b): a short average of the cosine lowers the upper knee, a long one does not."""
        limit = self.knees["S1n"] / QUARTER_OCTAVE
        return (self.knees["S2n"] < limit) & (self.knees["S3n"] >= limit)

    def restarts_help(self) -> Truth:
        """H7: soft restarts raise the upper knee by a quarter octave."""
        return self.knees["S5"] >= QUARTER_OCTAVE * self.knees["S5c"]

    def octaves(self, number: str, other: str) -> float:
        """Return by how many octaves one variant's knee is above another's, as measured."""
        return math.log2(self.knees[number][0] / self.knees[other][0])


def has_frozen(record: TrialRecord) -> bool:
    """Return True if d stayed near 0 for too long."""
    return bool(record.result.get("frozen_steps", 0) > FROZEN_STEPS)


def both(truths: Sequence[Truth]) -> Truth:
    """Return in which draws a statement holds for every network."""
    return cast(Truth, np.logical_and.reduce(truths))
