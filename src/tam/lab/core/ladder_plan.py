"""Which trials a ladder needs, given the results so far, and what they say of each rung."""

from __future__ import annotations

import math
from functools import cached_property
from itertools import pairwise
from statistics import fmean

from tam.lab.core import ladder
from tam.lab.core.config import TrialConfig
from tam.lab.core.controls import settled_step
from tam.lab.core.plan import Outcome, Plan, figure_of
from tam.lab.core.registry import Experiment
from tam.lab.core.results import Results, TrialRecord
from tam.lab.core.study import Ladder, Study, Variant

MIN_FAILED_SEEDS = 4  # of a rung, all of its seeds, before those above can be left out


def make_plan(
    experiment: Experiment, study: Study, results: Results, preset: str = "", whole: Study | None = None
) -> Plan:
    """Return the plan of a study: a `LadderPlan` for a ladder."""
    kind = LadderPlan if isinstance(study, Ladder) else Plan
    return kind(experiment, study, results, preset, whole)


class LadderPlan(Plan):
    """The trials of a ladder: every variant at every rung with every seed."""

    @cached_property
    def rules(self) -> Ladder:
        """The study, which is a ladder."""
        if not isinstance(self.study, Ladder):
            raise TypeError(f"{self.study.name} is no ladder")
        return self.study

    def grid(self, variant: Variant) -> list[float]:
        return self.rules.grid(variant)

    def _tuned_variants(self) -> list[Variant]:
        return []

    def rung_trials(self, variant: Variant) -> dict[float, list[TrialConfig]]:
        """Return the trials of a variant by its own lr, one per seed, also those that are never run."""
        if self.why_left_out(variant):
            return {}
        source = self.study.variant(variant.control_of or variant.name)
        return {
            lr: self.trials_at(variant, lr, source_lr, test=False)
            for lr, source_lr in zip(self.grid(variant), self.grid(source), strict=True)
        }

    def comparison_trials(self, variant: Variant) -> list[TrialConfig]:
        """Return the trials at all rungs, without those that the stop rule leaves out."""
        skipped = self.skipped_rungs(variant)
        every = ((lr, trial) for lr, trials in self.rung_trials(variant).items() for trial in trials)
        return [trial for lr, trial in every if lr not in skipped or self.record(trial) is not None]

    def skipped_rungs(self, variant: Variant) -> list[float]:
        """Return the own lrs that are not run: those above two successive rungs where every seed failed.

        A rung whose trials were all run anyway is not among them.
        """
        count = len(self.study.seeds)
        if not self.rules.skip_above or count < MIN_FAILED_SEEDS:
            return []
        rungs = {lr: [*by_seed.values()] for lr, by_seed in self.ladder(variant).items()}
        lrs = self.grid(variant)
        all_failed = {lr for lr, records in rungs.items() if sum(map(has_failed, records)) == count}
        last = next((pair[1] for pair in pairwise(lrs) if {*pair} <= all_failed), lrs[-1])
        return [lr for lr in lrs if lr > last and len(rungs.get(lr, ())) < count]

    def why_left_out(self, variant: Variant) -> str:
        """Return why a control has no trials. Empty if it has some."""
        is_single = variant.damping == "another" and len(self.whole.seeds) < 2
        return "the study has one seed" if is_single else ""

    def ladder(self, variant: Variant) -> dict[float, dict[int, TrialRecord]]:
        """Return the finished trials of a variant by its own lr and seed, without rungs that have none."""
        found = {
            lr: {trial.seed: record for trial in trials if (record := self.record(trial)) is not None}
            for lr, trials in self.rung_trials(variant).items()
        }
        return {lr: records for lr, records in found.items() if records}

    def effective_lr(self, variant: Variant, lr: float) -> float:
        """Return the lr of the study's baseline with the same settled step; that of its source for a control.

        It is rounded to 6 significant digits.
        """
        if variant.control_of is not None:
            return self.effective_lr(self.study.variant(variant.control_of), lr / variant.lr_ratio)
        baseline = self.study.variant(self.study.baseline)
        own, reference = (settled_step(one.optimizer, one.options) for one in (variant, baseline))
        return float(f"{lr * own / reference:.6g}")

    def loss(self, record: TrialRecord) -> float:
        """Return the outcome of a trial. A diverged one, and a loss above the cap, count as the cap."""
        loss = math.inf if record.diverged else figure_of(record, self.study.outcome)
        return ladder.cap_loss(loss, self.rules.cap)

    def losses(self, variant: Variant, *, with_skipped: bool = False) -> dict[float, list[float]]:
        """Return the losses of a variant by effective lr, capped, in the order of the seeds.

        `with_skipped` adds the trials that the stop rule left out: each counts as the cap.
        """
        own = {lr: [*map(self.loss, records.values())] for lr, records in self.ladder(variant).items()}
        for lr in self.skipped_rungs(variant) if with_skipped else ():
            run = own.get(lr, [])
            own[lr] = run + [self.rules.cap] * (len(self.study.seeds) - len(run))
        return {self.effective_lr(variant, lr): own[lr] for lr in sorted(own)}

    def failures(self, variant: Variant) -> dict[float, tuple[int, int]]:
        """Return how many trials failed by effective lr, of how many that are finished."""
        failed = {lr: [*map(has_failed, records.values())] for lr, records in self.ladder(variant).items()}
        return ladder.count_failures({self.effective_lr(variant, lr): flags for lr, flags in failed.items()})

    def complete_rungs(self, variant: Variant) -> list[float]:
        """Return the own lrs with the most finished seeds: means over fewer seeds are not compared."""
        records = self.ladder(variant)
        most = max(map(len, records.values()), default=0)
        return [lr for lr, by_seed in records.items() if len(by_seed) == most]

    def selected_lr(self, variant: Variant) -> tuple[float, bool] | None:
        """Return the own lr of the best rung so far, and whether it is the lowest or highest one."""
        records, lrs = self.ladder(variant), self.grid(variant)
        means = {lr: fmean(map(self.loss, records[lr].values())) for lr in self.complete_rungs(variant)}
        best = min(means, key=means.__getitem__, default=None)
        return None if best is None else (best, best in (lrs[0], lrs[-1]))

    def outcomes(self) -> list[Outcome]:
        """Return the finished trials of every variant at its best rung so far."""
        outcomes = []
        for variant in self.study.variants:
            lr, at_edge = self.selected_lr(variant) or (None, False)
            records = {} if lr is None else self.ladder(variant)[lr]
            planned = 0 if self.why_left_out(variant) else len(self.study.seeds)
            outcomes.append(Outcome(variant, lr, at_edge, records, planned, self.study.outcome))
        return outcomes

    def records(self) -> list[TrialRecord]:
        """Return the finished trials of all variants and rungs."""
        rungs = (rung for variant in self.study.variants for rung in self.ladder(variant).values())
        return [*{record.key: record for rung in rungs for record in rung.values()}.values()]

    def is_finished(self) -> bool:
        every = (trial for variant in self.study.variants for trial in self.comparison_trials(variant))
        return all(self.record(trial) is not None for trial in every)

    def duplicates(self) -> dict[str, str]:
        """Return the variants whose trials, at all rungs, are those of an earlier variant."""
        first: dict[frozenset[str], str] = {}
        names = {}
        for variant in self.study.variants:
            rungs = self.ladder(variant).values()
            if keys := frozenset(record.key for records in rungs for record in records.values()):
                names[variant.name] = first.setdefault(keys, variant.name)
        return {name: earlier for name, earlier in names.items() if name != earlier}


def has_failed(record: TrialRecord) -> bool:
    """Return True if a trial failed, by its own account, or diverged if it gives none."""
    return bool(record.result.get("failed", record.diverged))
