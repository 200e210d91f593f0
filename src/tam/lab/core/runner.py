"""Runs an experiment: asks its plans for trials and has an engine run them until none is left."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError, require
from tam.lab.core.plan import Plan
from tam.lab.core.registry import Experiment, get_experiment
from tam.lab.core.results import TrialRecord, load_results
from tam.lab.core.selection import Selection, remember_selection, select_plans
from tam.lab.core.study import Population
from tam.lab.data import files
from tam.lab.engines import torchrun
from tam.lab.engines.events import Event, EventHandler, Job, Notice, RoundStarted, RunLocation, TrialBusy
from tam.lab.engines.local import LocalEngine

POLL_SECONDS = 2.0  # between looks at trials another run works on
ENGINES = ("local", "ray")


def make_engine(
    name: str, location: RunLocation, workers: int, on_event: EventHandler, address: str | None = None
) -> Any:
    """Return the engine of this name. Under torchrun there is only one."""
    if torchrun.started():
        return torchrun.TorchrunEngine(location, on_event)
    if name == "ray":
        from tam.lab.engines.ray import RayEngine

        return RayEngine(location, workers, on_event, address)
    return LocalEngine(location, workers, on_event)


def run(
    selection: Selection, location: RunLocation, workers: int, on_event: EventHandler,
    engine: str = "local", address: str | None = None,
) -> None:  # fmt: skip
    """Run all selected trials that have no result."""
    plans = make_plans(selection, location, engine, address)
    experiment, results = plans[0].experiment, plans[0].results
    for plan in plans:
        for _, trial in plan.to_run()[:1]:
            check_trial(experiment, trial, location.data)
    if experiment.runs_alone or experiment.one_per_process:
        location = replace(location, trials_per_process=1)
        workers = 1 if experiment.runs_alone else workers
    for why, count in _count_left_out(experiment, plans).items():
        on_event(Notice(f"{count} trials are left out: {why}"))
    on_cpu = experiment.cpu_presets
    if location.device == "cpu" and on_cpu is not None and selection.preset not in on_cpu:
        on_event(Notice(f"the preset {selection.preset} is meant for a GPU and is very slow on a CPU"))
    last_jobs: list[Job] = []

    def forward(event: Event) -> None:
        if isinstance(event, TrialBusy):
            last_jobs.clear()  # it may be free again, with no result
        on_event(event)

    with make_engine(engine, location, workers, forward, address) as running_engine:
        remember_selection(selection, location.root)
        is_waiting = False
        if not _jobs(experiment, plans):
            on_event(Notice(_describe_finished(plans)))
        while jobs := _jobs(experiment, plans):
            free = jobs if torchrun.started() else [job for job in jobs if not job.is_busy(location.root)]
            if free and free == last_jobs:
                message = f"{_count(free)} trials left no result in {location.root}"
                raise LabError(f"{message}. Did they run in another folder?")
            if free:
                on_event(replace(count_trials(plans), trials=_count(free)))
                last_jobs[:] = free
                running_engine.run(free)
            else:
                if not is_waiting:
                    on_event(Notice(f"waiting: another run works on the {_count(jobs)} trials that are left"))
                last_jobs.clear()
                time.sleep(POLL_SECONDS)
            is_waiting = not free
            results.refresh()


def make_plans(selection: Selection, location: RunLocation, engine: str, address: str | None) -> list[Plan]:
    """Return the plans of what is selected. Raise if an option is wrong, before anything is written."""
    if os.path.isfile(location.root):
        raise LabError(f"--out {location.root} is a file, not a folder")
    results = load_results(location.root)
    if results.root is None:
        raise LabError(f"--out {location.root} holds packed results. Unpack them first: tam lab unpack")
    plans = select_plans(selection, results)
    if engine not in ENGINES:
        raise LabError(f"--engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    experiment = get_experiment(selection.experiment)
    if torchrun.started() and (engine != "local" or not experiment.runs_on_ranks):
        reason = "--engine ray" if engine != "local" else f"each trial of {experiment.name} has one process"
        raise LabError(f"{reason}: start it without torchrun")
    if engine == "ray":
        require("--engine ray", "ray")
    # A cluster's machines may have GPUs where there are none here.
    check_device(location.device, torch.cuda.device_count() if address is None else sys.maxsize)
    return plans


def finished_trials(plan: Plan) -> dict[str, TrialRecord]:
    """Return the finished trials of a study, tuning included, by key."""
    trials = [trial for variant in plan.study.variants for trial in plan.comparison_trials(variant) or ()]
    for variant in plan.study.variants:
        trials += plan.tuning_trials(variant, plan.grid(variant) if variant.lrs else ())
    return {record.key: record for record in map(plan.record, trials) if record is not None}


def _describe_finished(plans: Sequence[Plan]) -> str:
    """Return what to say if nothing can run."""
    count = len({key for plan in plans for key in finished_trials(plan)})
    if not all(plan.is_finished() for plan in plans):
        return f"{count} trials are finished, and no other trial can run. `tam lab status` says why"
    return f"all {count} trials are finished: nothing to run"


def count_trials(plans: Sequence[Plan]) -> RoundStarted:
    """Count the trials that plans have left. Those of later rounds are an estimate."""
    now: set[str] = set()
    later: set[str] = set()
    unknown = later_rounds = 0
    for plan in plans:
        trials = [trial for _, trial in plan.to_run()]
        keys = {trial.key for trial in trials}
        is_tuning = bool(plan.study.tuning_seeds) and any(not trial.test for trial in trials)
        for variant in plan.study.variants:
            configs = plan.comparison_trials(variant)
            waiting = {
                config.key for config in configs or () if plan.record(config) is None
                and config.key not in keys and (is_tuning or config.damping_of in keys)
            }  # fmt: skip
            count_unknown = len(plan.study.seeds) if configs is None and is_tuning else 0
            if waiting or count_unknown:  # a control whose d is replaced waits for its source
                later_rounds = max(later_rounds, 2 if is_tuning and variant.damping else 1)
            later |= waiting
            unknown += count_unknown
        now |= keys
    return RoundStarted(len(now), len(later - now) + unknown, later_rounds)


def check_trial(experiment: Experiment, trial: TrialConfig, data_folder: Path) -> None:
    """Raise if data, a package or anything else that a trial needs is missing."""
    require(f"the experiment {experiment.name}", *experiment.modules)
    experiment.check(trial, data_folder)
    for name in experiment.data_sets(trial):
        require(f"the data set {name}", *files.get_set(name).modules)
        files.check(name, files.find(name, data_folder), data_folder)


def check_device(name: str, gpus: int) -> None:
    """Raise unless the device is the CPU or one of so many GPUs."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise LabError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise LabError(f"--device {name}: no such GPU, this machine has {gpus or 'none'}")


def _count(jobs: Sequence[Job]) -> int:
    """Return the number of trials."""
    return sum(job.size for job in jobs)


def _count_left_out(experiment: Experiment, plans: Sequence[Plan]) -> Counter[str]:
    """Return how many trials this machine cannot run, by reason."""
    trials = {trial.key: trial for plan in plans for _, trial in plan.to_run()}
    return Counter(why for trial in trials.values() if (why := experiment.missing(trial)))


def _jobs(experiment: Experiment, plans: Sequence[Plan]) -> list[Job]:
    """Return the trials that can run now and here. Several studies may have the same one."""
    jobs: dict[str, Job] = {}
    for plan in plans:
        for variant, trial in plan.to_run():
            if experiment.missing(trial):
                continue
            label = f"{plan.study.name}, {variant.name}, lr {trial.lr:.3g}, seed {trial.seed}"
            jobs.setdefault(trial.key, Job(experiment.name, trial, label))
    if experiment.population is None:
        return list(jobs.values())
    groups: dict[str, list[Job]] = {}  # of trials that can train in one program
    for job in jobs.values():
        groups.setdefault(experiment.population.kind(job.config), []).append(job)
    return [
        replace(part[0], label=f"{len(part)} networks at once, {kind}",
                others=tuple(job.config for job in part[1:]))
        for kind, group in groups.items()
        for part in _split(group, experiment.population)
    ]  # fmt: skip


def _split(group: Sequence[Job], population: Population) -> list[Sequence[Job]]:
    """Split trials of one kind evenly, in their order, into parts that do not exceed the limit."""
    limit = len(group)
    if population.limit is not None:
        limit = min(population.limit(job.config) for job in group)
        if limit < 1:
            kind = population.kind(group[0].config)
            raise LabError(f"the limit of a population must be at least 1, got {limit} for {kind}")
    parts = -(-len(group) // limit)
    bounds = [len(group) * i // parts for i in range(parts + 1)]
    return [group[start:end] for start, end in pairwise(bounds)]
