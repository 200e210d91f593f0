"""Runs an experiment: asks its plans for trials and has an engine run them until none is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tam.lab.engines import torchrun
from tam.lab.engines.local import Local
from tam.lab.engines.work import Event, Job, Place
from tam.lab.experiment import Experiment, Plan, experiments
from tam.lab.store import LabError, key_of, write_whole


@dataclass(frozen=True)
class Selection:
    """What of an experiment is run."""

    experiment: str
    preset: str
    studies: tuple[str, ...] = ()  # all, where none is named
    arms: tuple[str, ...] = ()
    seeds: int | None = None  # so many of the reported seeds


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
    return [Plan(experiment, study.only(selection.arms, selection.seeds), root) for study in chosen]


ENGINES = ("local", "ray")


def make_engine(
    name: str, place: Place, workers: int, tell: Callable[[Event], None], address: str | None = None
) -> Any:
    if torchrun.started():
        return torchrun.Torchrun(place, tell)
    if name == "ray":
        from tam.lab.engines.ray import Ray

        return Ray(place, workers, tell, address)
    if name != "local":
        raise LabError(f"engine {name!r}: must be one of {', '.join(ENGINES)}")
    return Local(place, workers, tell)


def run(
    selection: Selection,
    place: Place,
    workers: int,
    tell: Callable[[Event | int], None],
    engine: str = "local",
    address: str | None = None,
) -> None:
    """Runs all trials that have no result. `tell` hears of events, and how many trials a round has."""
    wanted = plans(selection, place.root)
    remember(selection, place.root)
    with make_engine(engine, place, workers, tell, address) as running:
        before: list[Job] = []
        while jobs := _jobs(selection.experiment, wanted):
            if jobs == before:
                raise LabError(
                    f"{len(jobs)} trials left no result: another run is at work on them in {place.root}, or "
                    "that folder is another one where they ran"
                )
            tell(len(jobs))
            running.run(jobs)
            before = jobs


def _jobs(experiment: str, wanted: list[Plan]) -> list[Job]:
    """The trials that can be run now; several studies may want the same one."""
    trials = {key_of(trial): trial for plan in wanted for trial in plan.to_run()}
    return [Job(experiment, trial) for trial in trials.values()]


# ---------------------------------------------------------------------- what a folder knows of itself


def remember(selection: Selection, root: Path) -> None:
    """Notes what was run, so that status and report need only the folder."""
    known = remembered(root)
    if selection not in known:
        known.append(selection)
    root.mkdir(parents=True, exist_ok=True)
    write_whole(root / "runs.json", json.dumps([vars(one) for one in known], indent=1).encode() + b"\n")


def remembered(root: Path) -> list[Selection]:
    try:
        found = json.loads((root / "runs.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    return [
        Selection(one["experiment"], one["preset"], tuple(one["studies"]), tuple(one["arms"]), one["seeds"])
        for one in found
    ]
