"""Runs an experiment: asks its plans for trials and has an engine run them until none is left."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from tam.lab import variants
from tam.lab.engines import torchrun
from tam.lab.engines.local import Local
from tam.lab.engines.work import Event, Job, Place
from tam.lab.experiment import Experiment, Plan, Study, Together, experiments
from tam.lab.store import LabError, key_of, locked, write_whole

POLL = 2.0  # seconds between looks at trials another run works on


@dataclass(frozen=True)
class Selection:
    """What of an experiment is run."""

    experiment: str
    preset: str
    studies: tuple[str, ...] = ()  # all, where none is named
    arms: tuple[str, ...] = ()
    seeds: int | None = None  # so many of the reported seeds
    controls: bool = False  # TAM's controls also where a study has none
    given: dict[str, Any] = field(default_factory=dict)  # of a workload: a checkpoint, a model, tasks …


def get_experiment(name: str) -> Experiment:
    found = experiments()
    if name not in found:
        raise LabError(f"no experiment {name!r}; there are {', '.join(found)}")
    return found[name]


def plans(selection: Selection, root: Path) -> list[Plan]:
    """The plans of the studies that are selected."""
    experiment = get_experiment(selection.experiment)
    if selection.preset not in experiment.presets:
        names = ", ".join(experiment.presets)
        raise LabError(f"{experiment.name} has no preset {selection.preset!r}; it has {names}")
    studies = experiment.presets[selection.preset]
    unknown = [name for name in selection.studies if name not in {study.name for study in studies}]
    if unknown:
        names = ", ".join(study.name for study in studies)
        raise LabError(f"the preset {selection.preset} has no study {unknown[0]!r}; it has {names}")
    chosen = [study for study in studies if not selection.studies or study.name in selection.studies]
    if selection.controls:
        if not any(study.controls for study in chosen):
            raise LabError(f"{experiment.name} has no controls of TAM")
        chosen = [variants.with_controls(study) for study in chosen]
    for key in selection.given:
        if not all(key in study.workload for study in chosen):
            raise LabError(f"studies of {experiment.name}, preset {selection.preset}, take no {key}")
    model = selection.given.get("model")
    if model is not None and any(study.workload["model"] is not None for study in chosen):
        raise LabError(
            f"studies of the preset {selection.preset} have models of their own: --model is for others"
        )
    chosen = [replace(study, workload={**study.workload, **selection.given}) for study in chosen]
    if model is not None:
        chosen = [replace(study, title=f"{model.partition('#')[0]}, {study.title}") for study in chosen]
    return [
        Plan(experiment, _part(study, selection), root, selection.preset, study)
        for study in _with_arms(chosen, selection.arms)
    ]


def _part(study: Study, selection: Selection) -> Study:
    return study.only(selection.arms, selection.seeds, selection.controls)


def _with_arms(studies: Sequence[Study], arms: Sequence[str]) -> Sequence[Study]:
    """Those that have the arms; where none has, all, so that the mistake is told."""
    having = [study for study in studies if set(arms) <= {arm.name for arm in study.arms}]
    return having or studies


ENGINES = ("local", "ray")


def make_engine(
    name: str, place: Place, workers: int, tell: Callable[[Event], None], address: str | None = None
) -> Any:
    if torchrun.started():
        return torchrun.Torchrun(place, tell)
    if name == "ray":
        from tam.lab.engines.ray import Ray

        return Ray(place, workers, tell, address)
    return Local(place, workers, tell)


def run(
    selection: Selection,
    place: Place,
    workers: int,
    tell: Callable[[Event | int | str], None],
    engine: str = "local",
    address: str | None = None,
) -> None:
    """Runs all trials that have no result.

    `tell` hears of events, of how many trials a round has, and of what is to be said besides.
    """
    wanted = plans(selection, place.root)
    _check(selection, wanted, place, engine, address)
    if get_experiment(selection.experiment).alone:
        place, workers = place.alone(), 1
    if place.device == "cpu" and get_experiment(selection.experiment).gpu and selection.preset != "smoke":
        tell(f"the preset {selection.preset} is meant for a GPU: on a CPU it takes very long; smoke does not")
    with make_engine(engine, place, workers, tell, address) as running:
        remember(selection, place.root)
        before: list[Job] = []
        waits = False
        while jobs := _jobs(selection.experiment, wanted):
            free = jobs if torchrun.started() else [job for job in jobs if not _busy(job, place)]
            if not free:
                if not waits:
                    tell(f"another run works on the {len(jobs)} trials that are left: waiting for them")
                waits, before = True, []
                time.sleep(POLL)
                continue
            if free == before:
                raise LabError(
                    f"{len(free)} trials left no result in {place.root}: is it another folder where they ran?"
                )
            tell(sum(1 + len(job.others) for job in free))
            running.run(free)
            before, waits = free, False


def _busy(job: Job, place: Place) -> bool:
    return any(folder.busy() for folder in job.folders(place.root))


def _check(
    selection: Selection, wanted: Sequence[Plan], place: Place, engine: str, address: str | None
) -> None:
    """Raises before anything is run or written where it could not be."""
    experiment = get_experiment(selection.experiment)
    if engine not in ENGINES:
        raise LabError(f"engine {engine!r}: must be one of {', '.join(ENGINES)}")
    if place.root.exists() and not place.root.is_dir():
        raise LabError(f"--out {place.root} is a file, not a folder")
    if torchrun.started() and (engine != "local" or not experiment.ranks):
        what = "--engine ray" if engine != "local" else f"each trial of {experiment.name} has one process"
        raise LabError(f"{what}: start it without torchrun")
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        raise LabError("--engine ray needs the package ray: pip install 'torque-aware-momentum[ray]'")
    # A cluster's machines may have GPUs where there are none here.
    check_device(place.device, torch.cuda.device_count() if address is None else sys.maxsize)
    for plan in wanted:
        for _, trial in plan.to_run()[:1]:
            experiment.check(trial, place.data)


def check_device(name: str, there: int) -> None:
    """Raises unless it is one that is there."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and (device.index or 0) >= there):
        raise LabError(f"--device {name}: must be cpu or cuda; there are {there} GPUs here")


def _jobs(experiment: str, wanted: Sequence[Plan]) -> list[Job]:
    """The trials that can be run now; several studies may want the same one."""
    jobs: dict[str, Job] = {}
    for plan in wanted:
        for arm, trial in plan.to_run():
            label = f"{plan.study.name}, {arm.name}, lr {trial['lr']:.3g}, seed {trial['seed']}"
            jobs.setdefault(key_of(trial), Job(experiment, trial, label))
    together = get_experiment(experiment).together
    return list(jobs.values()) if together is None else _joined(list(jobs.values()), together)


def _joined(jobs: Sequence[Job], together: Together) -> list[Job]:
    """One job for all trials of a kind."""
    kinds: dict[str, list[Job]] = {}
    for job in jobs:
        kinds.setdefault(together.kind(job.config), []).append(job)
    return [
        replace(
            first, label=f"{1 + len(rest)} networks at once, {kind}", others=tuple(job.config for job in rest)
        )
        for kind, (first, *rest) in kinds.items()
    ]


# ---------------------------------------------------------------------- what a folder knows of itself


def remember(selection: Selection, root: Path) -> None:
    """Notes what was run, so that status and report need only the folder."""
    with locked(root):  # another run may note itself, too
        known = remembered(root)
        if selection not in known:
            known.append(selection)
        write_whole(root / "runs.json", json.dumps([vars(one) for one in known], indent=1).encode() + b"\n")


def remembered(root: Path) -> list[Selection]:
    path = root / "runs.json"
    try:
        known = {one.name for one in fields(Selection)}
        noted = json.loads(path.read_text(encoding="utf-8"))
        found = [Selection(**{k: v for k, v in one.items() if k in known}) for one in noted]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (ValueError, TypeError, AttributeError) as error:
        raise LabError(
            f"{path} is damaged: remove it, and start the runs again; what is finished stays"
        ) from error
    return [replace(one, studies=tuple(one.studies), arms=tuple(one.arms)) for one in found]


@dataclass(frozen=True)
class Group:
    """A preset of which something was run: those studies, as it has them, and its others."""

    plans: list[Plan]
    not_run: tuple[Study, ...]

    @property
    def planned(self) -> list[Study]:
        return [*(plan.study for plan in self.plans), *self.not_run]


def shown(root: Path) -> list[Group]:
    """Everything that was run in a folder, by experiment and preset; of a study that was run in part, all."""
    selections = remembered(root)
    if not selections:
        raise LabError(f"{root} has no runs.json: nothing was run there")
    groups: dict[tuple[str, str], dict[str, Plan]] = {}
    for selection in sorted(selections, key=lambda one: one.controls):  # those with more arms last
        found = groups.setdefault((selection.experiment, selection.preset), {})
        for plan in plans(replace(selection, arms=(), seeds=None), root):
            found[plan.study.identity] = plan
    return [_group(get_experiment(name).presets[preset], found) for (name, preset), found in groups.items()]


def _group(studies: Sequence[Study], found: Mapping[str, Plan]) -> Group:
    order = [study.name for study in studies]
    plans = sorted(found.values(), key=lambda plan: order.index(plan.study.name))
    names = {plan.study.name for plan in plans}
    return Group(plans, tuple(study for study in studies if study.name not in names))
