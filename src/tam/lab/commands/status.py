"""`tam lab status`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tam.lab.commands.options import AsJson, ResultsPath
from tam.lab.core.plan import Outcome, Plan
from tam.lab.core.results import load_existing_results
from tam.lab.core.selection import select_plans, selections_of
from tam.lab.core.store import TrialFolder


@dataclass(frozen=True)
class VariantStatus:
    """How far a variant is."""

    name: str
    lr: float | None  # None while it is not selected
    finished: int  # of the comparison trials, one per seed
    planned: int
    blocked: int  # comparison trials that can never run
    note: str  # why they cannot, or what the variant waits for


@dataclass(frozen=True)
class StudyStatus:
    """How far a study is."""

    experiment: str
    preset: str
    study: str
    to_run: int  # trials that can run now
    running: int  # of these, by another process
    variants: list[VariantStatus]

    def describe(self) -> str:
        progress = f"{count_trials(self.to_run)} can run now" if self.to_run else "done"
        progress += f", {self.running} of them running" if self.running else ""
        blocked = sum(variant.blocked for variant in self.variants)
        reasons = ", ".join(dict.fromkeys(variant.note for variant in self.variants if variant.blocked))
        return progress + (f"; {count_trials(blocked)} cannot run: {reasons}" if blocked else "")


def count_trials(count: int) -> str:
    return f"{count} trial{'' if count == 1 else 's'}"


def show_status(results: ResultsPath, as_json: AsJson = False) -> None:
    """Show how far the runs of a folder are."""
    studies = [study_status(plan, results) for plan in load_plans(results)]
    if as_json:
        print(json.dumps([asdict(study) | {"state": study.describe()} for study in studies], indent=1))
        return
    for study in studies:
        print(f"{study.experiment} {study.preset} {study.study}: {study.describe()}")
        for one in study.variants:
            blocked = f"{count_trials(one.blocked)} cannot run: " if one.blocked else ""
            note = f"; {blocked}{one.note}" if one.note else ""
            print(f"  {one.name}: {one.finished} of {one.planned} seeds{note}")


def load_plans(path: Path) -> list[Plan]:
    """Return the plans of everything that was run, without parts of what was run another time."""
    results = load_existing_results(path)
    plans = [plan for selection in selections_of(results) for plan in select_plans(selection, results)]
    whole_plans: list[Plan] = []
    for plan in sorted(plans, key=lambda plan: -plan.study.trials()):
        if not any(_covers(other, plan) for other in whole_plans):
            whole_plans.append(plan)
    return sorted(whole_plans, key=plans.index)


def _covers(plan: Plan, other: Plan) -> bool:
    """Return whether a plan has all variants and seeds of another one of the same study."""
    identity, other_identity = ((p.experiment.name, p.preset, p.study.identity) for p in (plan, other))
    names, other_names = ({variant.name for variant in p.study.variants} for p in (plan, other))
    has_seeds = len(plan.study.seeds) >= len(other.study.seeds)
    return identity == other_identity and names >= other_names and has_seeds


def study_status(plan: Plan, path: Path) -> StudyStatus:
    """Return how far a study is, given the results in this folder or packed file."""
    to_run = {trial.key: trial for _, trial in plan.to_run()}
    running = sum(TrialFolder(path, trial).busy() for trial in to_run.values())
    variants = [variant_status(plan, outcome, is_over=not to_run) for outcome in plan.outcomes()]
    return StudyStatus(plan.experiment.name, plan.preset, plan.study.name, len(to_run), running, variants)


def variant_status(plan: Plan, outcome: Outcome, is_over: bool) -> VariantStatus:
    """Return how far a variant is. `is_over`: no trial of the study can run now or later."""
    variant, blocked, note = outcome.variant, 0, ""
    missing = [trial for trial in plan.comparison_trials(variant) or [] if plan.record(trial) is None]
    sources = [plan.results.get(trial.damping_of) for trial in missing if trial.damping_of]
    diverged = sum(source is not None and source.diverged for source in sources)
    if outcome.lr is None:
        tuned = plan.study.variant(variant.control_of or variant.name)
        lrs = plan.grid(tuned)
        tried = sum(plan.tuning_score(tuned, lr) is not None for lr in lrs)
        if tried == len(lrs):
            blocked, note = outcome.planned, f"every lr of {tuned.name} diverged"
        elif variant.control_of:
            note = f"waits for the lr of {tuned.name}"
        else:
            note = f"lr not selected yet, {tried} of {len(lrs)} tried"
    elif diverged:
        blocked, note = diverged, "the source of the damping diverged"
    elif is_over and missing:
        blocked, note = len(missing), "the source of the damping was not run"
    return VariantStatus(variant.name, outcome.lr, len(outcome.records), outcome.planned, blocked, note)
