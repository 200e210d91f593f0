"""What is known of a study so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tam.lab.experiment import Arm, Plan
from tam.lab.store import TrialFolder


@dataclass(frozen=True)
class Outcome:
    """What is known of an arm: its finished trials, by seed."""

    arm: Arm
    lr: float | None
    edge: bool  # the lr is at an edge of its grid
    folders: dict[int, TrialFolder]
    wanted: int
    key: str  # of the figure that is compared

    def values(self, key: str) -> dict[int, float]:
        """A figure of the results, by seed; one that is not finite cannot be averaged."""
        found = {seed: (folder.result or {}).get(key, math.nan) for seed, folder in self.folders.items()}
        return {seed: value for seed, value in found.items() if math.isfinite(value)}

    @property
    def diverged(self) -> int:
        return sum(bool((folder.result or {}).get("diverged")) for folder in self.folders.values())

    @property
    def lost(self) -> int:
        """Diverged, and without a figure to count with."""
        return len(self.folders) - len(self.values(self.key))


def outcomes(plan: Plan) -> list[Outcome]:
    """Of every arm of a study."""
    found = []
    for arm in plan.study.arms:
        chosen, trials = plan.chosen(arm), plan.reported(arm) or []
        folders = {trial["seed"]: TrialFolder(plan.root, trial) for trial in trials}
        done = {seed: folder for seed, folder in folders.items() if folder.result is not None}
        lr, edge = chosen if chosen is not None else (None, False)
        found.append(Outcome(arm, lr, edge, done, len(plan.study.seeds), plan.study.outcome))
    return found


def twins(plan: Plan) -> dict[str, str]:
    """Arms whose lr, chosen or given, makes their trials those of an arm before them; and that arm."""
    found: dict[str, str] = {}
    first: dict[frozenset[str], str] = {}
    for outcome in (one for one in outcomes(plan) if one.folders):
        keys = frozenset(folder.key for folder in outcome.folders.values())
        name = first.setdefault(keys, outcome.arm.name)
        if name != outcome.arm.name:
            found[outcome.arm.name] = name
    return found
