"""Which trials a study needs, given the results so far. Nothing here reads or writes files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, mean
from typing import Any

from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError
from tam.lab.core.registry import Experiment
from tam.lab.core.results import Results, TrialRecord
from tam.lab.core.study import HALF_DECADE, Study, Variant
from tam.step.rule import damping_of

MAX_EXTENSIONS = 4  # of a grid, on each side
SAME_AS_BASELINE = 0.01  # constant damping with 2 mean(d) this close to 1 is the baseline at half the lr


@dataclass(frozen=True)
class Outcome:
    """What is known of a variant: its finished trials, by seed."""

    variant: Variant
    lr: float | None  # None while it is not selected
    at_edge: bool  # the lr is at an edge of its grid
    records: dict[int, TrialRecord]
    planned: int  # trials, one per seed; 0 for a control that is left out
    key: str  # of the metric that is compared

    def values(self, key: str) -> dict[int, float]:
        """Return a figure of the results by seed, without those that are not finite."""
        figures = {seed: figure_of(record, key) for seed, record in self.records.items()}
        return {seed: figure for seed, figure in figures.items() if math.isfinite(figure)}

    @property
    def diverged(self) -> int:
        return sum(record.diverged for record in self.records.values())

    @property
    def lost(self) -> int:
        """The number of trials that diverged without a figure to compare."""
        return len(self.records) - len(self.values(self.key))


class Plan:
    """The trials of one study, as far as the results determine them."""

    def __init__(
        self, experiment: Experiment, study: Study, results: Results, preset: str = "",
        whole: Study | None = None,
    ) -> None:  # fmt: skip
        self.experiment, self.study, self.results, self.preset = experiment, study, results, preset
        self.whole = whole or study  # with the variants that were not asked for
        self._trials: dict[tuple[object, ...], TrialConfig] = {}  # made once: they are checked and hashed

    def trial(self, variant: Variant, lr: float, seed: int, *, test: bool, **more: Any) -> TrialConfig:
        arguments = variant.name, lr, seed, test, *more.items()
        if arguments not in self._trials:
            settings = {**self.study.workload, **variant.settings, **more}
            try:
                self._trials[arguments] = self.experiment.config(
                    optimizer=variant.optimizer, options=dict(variant.options), lr=lr, seed=seed, test=test,
                    **settings,
                )  # fmt: skip
            except (TypeError, ValueError) as error:  # of overrides that somebody else has stored
                raise LabError(f"{self.study.name} cannot have these settings: {error}") from error
        return self._trials[arguments]

    def record(self, trial: TrialConfig) -> TrialRecord | None:
        """Return the trial's record if it is finished."""
        return self.results.get(trial.key)

    def grid(self, variant: Variant) -> list[float]:
        """Return the lrs of a variant, ascending. All grids are extended if a winner is at an edge."""
        if self.study.extend and len(variant.lrs) > 1:
            return _extended_grid(variant, *self._extensions())
        return sorted(variant.lrs)

    def _extensions(self) -> tuple[int, int]:
        """Return how far all grids are extended below and above, given the results so far."""
        low = high = 0
        while True:
            winners = [self._winner(one, _extended_grid(one, low, high)) for one in self._tuned_variants()]
            places = [winner for winner in winners if winner is not None]
            if len(places) < len(winners):
                return low, high  # these must be run first
            more = low + any(i == 0 for i, _ in places), high + any(i == last for i, last in places)
            if more == (low, high) or max(more) > MAX_EXTENSIONS:
                return low, high
            low, high = more

    def _tuned_variants(self) -> list[Variant]:
        """Return the variants with a grid. Grids are extended for all of them or none, asked for or not."""
        variants = self.whole.variants if self.study.extend else self.study.variants
        return [variant for variant in variants if len(variant.lrs) > 1]

    def tuning_trials(self, variant: Variant, lrs: Sequence[float]) -> list[TrialConfig]:
        """Return the trials that compare these lrs."""
        return [self.trial(variant, lr, seed, test=False) for lr in lrs for seed in self.study.tuning_seeds]

    def _winner(self, variant: Variant, lrs: Sequence[float]) -> tuple[int, int] | None:
        """Return the index of the best lr and the last index. None if trials are missing."""
        tuning_scores = [self.tuning_score(variant, lr) for lr in lrs]
        scores = [score if self.study.higher else -score for score in tuning_scores if score is not None]
        if len(scores) < len(lrs):
            return None
        return max(range(len(lrs)), key=scores.__getitem__), len(lrs) - 1

    def tuning_score(self, variant: Variant, lr: float) -> float | None:
        """Return the mean outcome of an lr over the tuning seeds, the worst possible if one diverged."""
        records = [self.record(trial) for trial in self.tuning_trials(variant, [lr])]
        finished = [record for record in records if record is not None]
        if not finished or len(finished) < len(records):
            return None
        if any(record.diverged for record in finished):
            return float("-inf" if self.study.higher else "inf")
        return mean(figure_of(record, self.study.outcome) for record in finished)

    def tuning_outcomes(self, variant: Variant, lr: float) -> dict[int, float]:
        """Return the outcome of an lr by tuning seed, without those that diverged."""
        records = [(trial.seed, self.record(trial)) for trial in self.tuning_trials(variant, [lr])]
        return {
            seed: figure_of(record, self.study.outcome)
            for seed, record in records
            if record is not None and not record.diverged
        }

    def selected_lr(self, variant: Variant) -> tuple[float, bool] | None:
        """Return the lr of a variant and whether it is at an edge of its grid. None if not known yet."""
        if variant.control_of is not None:
            source = self.selected_lr(self.study.variant(variant.control_of))
            return None if source is None else (source[0] * variant.lr_ratio, False)
        lrs = self.grid(variant)
        if len(lrs) == 1:
            return lrs[0], False
        winner = self._winner(variant, lrs)
        if winner is None or not math.isfinite(self.tuning_score(variant, lrs[winner[0]]) or 0.0):
            return None  # some were not run, or all have diverged
        return lrs[winner[0]], winner[0] in (0, winner[1])

    def comparison_trials(self, variant: Variant) -> list[TrialConfig] | None:
        """Return the trials of the comparison, one per seed. None if the lr is not known yet.

        A control that is left out has none.
        """
        if self.why_left_out(variant):
            return []
        selected = self.selected_lr(variant)
        if selected is None:
            return None
        return self.trials_at(variant, selected[0], source_lr=selected[0], test=True)

    def trials_at(self, variant: Variant, lr: float, source_lr: float, *, test: bool) -> list[TrialConfig]:
        """Return the trials of a variant at an lr, one per seed. A control takes its source's d at an lr."""
        seeds = self.study.seeds
        if variant.damping is None:
            return [self.trial(variant, lr, seed, test=test) for seed in seeds]
        source = self.study.variant(variant.control_of or "")
        # The next seed of the whole study, also if only some of its seeds are run: a control is one trial.
        every, step = self.whole.seeds, int(variant.damping == "another")
        source_seeds = [every[(every.index(seed) + step) % len(every)] for seed in seeds]
        keys = [self.trial(source, source_lr, seed, test=test).key for seed in source_seeds]
        return [
            self.trial(variant, lr, seed, test=test, damping=variant.damping, damping_of=key)
            for seed, key in zip(seeds, keys, strict=True)
        ]

    def why_left_out(self, variant: Variant) -> str:
        """Return why a control has no trials, given the results so far. Empty if it has some."""
        if variant.damping == "another" and len(self.whole.seeds) < 2:
            return "the study has one seed"
        if variant.damping == "mean" and variant.options.get("scope", "global") == "global":
            d = self.mean_damping(self.study.variant(variant.control_of or ""))
            if d is not None and abs(2 * d - 1) <= SAME_AS_BASELINE:
                return f"2 x mean(d) is {2 * d:.3f}, so it is the baseline at the effective lr"
        return ""

    def mean_damping(self, source: Variant) -> float | None:
        """Return the mean d of a variant over its finished seeds. None if there is none with a d.

        All seeds of the whole study count: a part of it leaves out the same controls.
        """
        selected = self.selected_lr(source)
        if selected is None:
            return None
        records = [self.record(self.trial(source, selected[0], seed, test=True)) for seed in self.whole.seeds]
        means = [
            fmean(alignments)
            for record in records
            if record is not None and not record.diverged
            and (alignments := [row["alignment"] for row in record.metrics if "alignment" in row])
        ]  # fmt: skip
        return damping_of(fmean(means), source.options.get("gain", 1.0)) if means else None

    def to_run(self) -> list[tuple[Variant, TrialConfig]]:
        """Return the trials that can run now and have no result. Empty if the study is done."""
        tuning = [
            (variant, trial)
            for variant in self._tuned_variants()
            for trial in self.tuning_trials(variant, self.grid(variant))
            if self.record(trial) is None
        ]
        if tuning:  # no test data is read before every lr is selected
            return tuning
        return [
            (variant, trial)
            for variant in self.study.variants
            for trial in self.comparison_trials(variant) or []
            if self.can_run(trial)
        ]

    def can_run(self, trial: TrialConfig) -> bool:
        """Return True if a trial has no result, and the d it takes over is recorded."""
        if self.record(trial) is not None or trial.damping_of is None:
            return self.record(trial) is None
        source = self.results.get(trial.damping_of)
        return source is not None and not source.diverged  # one that diverged has no d

    def is_finished(self) -> bool:
        """Return True if every planned trial of the comparison has a result."""
        return all(len(outcome.records) >= outcome.planned for outcome in self.outcomes())

    def outcomes(self) -> list[Outcome]:
        """Return the finished trials of every variant."""
        outcomes = []
        for variant in self.study.variants:
            lr, at_edge = self.selected_lr(variant) or (None, False)
            trials = self.comparison_trials(variant) or []
            planned = 0 if self.why_left_out(variant) else len(self.study.seeds)
            finished = {trial.seed: record for trial in trials if (record := self.record(trial)) is not None}
            outcomes.append(Outcome(variant, lr, at_edge, finished, planned, self.study.outcome))
        return outcomes

    def duplicates(self) -> dict[str, str]:
        """Return the variants whose trials are those of an earlier variant, and that variant."""
        names: dict[str, str] = {}
        first: dict[frozenset[str], str] = {}
        for outcome in (one for one in self.outcomes() if one.records):
            keys = frozenset(record.key for record in outcome.records.values())
            names[outcome.variant.name] = first.setdefault(keys, outcome.variant.name)
        return {name: earlier for name, earlier in names.items() if name != earlier}


def figure_of(record: TrialRecord, key: str) -> float:
    """Return a number of a result. NaN if it has none."""
    value = record.result.get(key)
    if value is not None and not isinstance(value, int | float):
        raise LabError(f"the result.json of trial {record.key} is damaged: {key!r} is no number")
    return math.nan if value is None else float(value)


def _extended_grid(variant: Variant, low: int, high: int) -> list[float]:
    """Return a variant's grid with this many half decades more below and above."""
    lrs = sorted(variant.lrs)
    below = [lrs[0] / HALF_DECADE**i for i in range(low, 0, -1)]
    return below + lrs + [lrs[-1] * HALF_DECADE**i for i in range(1, high + 1)]
