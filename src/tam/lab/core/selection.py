"""What a user asks to run, and how a results folder remembers it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tam.lab.core import controls
from tam.lab.core.errors import LabError
from tam.lab.core.ladder_plan import make_plan
from tam.lab.core.plan import Plan
from tam.lab.core.registry import get_experiment
from tam.lab.core.results import RUN_AGAIN, RUNS_FILE, Results, load_existing_results
from tam.lab.core.store import lock_folder, read_json, write_json
from tam.lab.core.study import Study

STORED_FIELDS: dict[str, tuple[str, Any]] = {  # the stored name and type of each field. They never change
    "experiment": ("experiment", str), "preset": ("preset", str), "studies": ("studies", list),
    "variants": ("arms", list), "seeds": ("seeds", int | None), "controls": ("controls", bool),
    "overrides": ("given", dict), "tuning_seeds": ("tuning_seeds", int),
}  # fmt: skip
FORMER = 0  # tuning seeds: as many as there were before their number was stored


@dataclass(frozen=True)
class Selection:
    """The part of an experiment that is run."""

    experiment: str
    preset: str
    studies: tuple[str, ...] = ()  # all, if none is named
    variants: tuple[str, ...] = ()
    seeds: int | None = None  # the number of comparison seeds
    controls: bool = False  # TAM's controls also in studies that have none
    overrides: dict[str, Any] = field(default_factory=dict)  # of a workload: a checkpoint, a model, tasks ...
    tuning_seeds: int | None = None  # their number; None: all that the studies have, or FORMER

    def __post_init__(self) -> None:
        object.__setattr__(self, "studies", tuple(map(str, self.studies)))
        object.__setattr__(self, "variants", tuple(map(controls.current_name, self.variants)))
        if self.seeds is not None and self.seeds < 1:
            raise ValueError("'seeds' must be at least 1")
        if self.tuning_seeds is not None and self.tuning_seeds < 0:
            raise ValueError("'tuning_seeds' must be at least 0")

    def to_json(self) -> dict[str, Any]:
        stored = {key: getattr(self, name) for name, (key, _) in STORED_FIELDS.items()}
        return stored if self.tuning_seeds else {k: v for k, v in stored.items() if k != "tuning_seeds"}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Selection:
        """Return the selection with this stored form. Fields that did not exist yet have their defaults."""
        values: dict[str, Any] = {"tuning_seeds": FORMER}
        values |= {name: stored[key] for name, (key, _) in STORED_FIELDS.items() if key in stored}
        for name, value in values.items():
            key, kind = STORED_FIELDS[name]
            is_text = not isinstance(value, list) or all(isinstance(one, str) for one in value)
            if not isinstance(value, kind) or not is_text:
                raise TypeError(f"{key!r} is of a wrong type")
        for name in ("experiment", "preset"):
            if name not in values:
                raise ValueError(f"{name!r} is missing")
        return cls(**values)


def select_plans(selection: Selection, results: Results) -> list[Plan]:
    experiment = get_experiment(selection.experiment)
    if selection.preset not in experiment.presets:
        names = ", ".join(experiment.presets)
        raise LabError(f"{experiment.name} has no preset {selection.preset!r}; it has {names}")
    studies = experiment.presets[selection.preset]
    unknown = [name for name in selection.studies if name not in {study.name for study in studies}]
    if unknown:
        names = ", ".join(study.name for study in studies)
        raise LabError(f"the preset {selection.preset} has no study {unknown[0]!r}; it has {names}")
    selected = [study for study in studies if not selection.studies or study.name in selection.studies]
    if selection.controls:
        if not any(study.controls for study in selected):
            raise LabError(f"{experiment.name} has no controls of TAM")
        selected = [controls.with_controls(study) for study in selected]
    for key in selection.overrides:
        if not all(key in study.workload for study in selected):
            raise LabError(f"studies of {experiment.name}, preset {selection.preset}, take no {key!r}")
    selected = [experiment.override(study, selection.overrides) for study in selected]
    selected = [_with_tuning_seeds(study, selection.tuning_seeds) for study in selected]
    variant_names = set(selection.variants)
    having = [study for study in selected if variant_names <= {variant.name for variant in study.variants}]
    plans = []
    for study in having or selected:  # if no study has these variants, the error names one
        part = study.only(selection.variants, selection.seeds, selection.controls)
        plans.append(make_plan(experiment, part, results, selection.preset, study))
    return plans


def _with_tuning_seeds(study: Study, number: int | None) -> Study:
    """Return the study with its first tuning seeds only: those that a run had."""
    number = study.former_tuning_seeds if number == FORMER else number
    return replace(study, tuning_seeds=study.tuning_seeds[:number])


def remember_selection(selection: Selection, root: Path) -> None:
    """Note in the folder what was run: status and report then need only the folder."""
    if selection.tuning_seeds is None:
        plans = select_plans(selection, Results())
        number = max((len(plan.study.tuning_seeds) for plan in plans), default=0)
        selection = replace(selection, tuning_seeds=number)
    with lock_folder(root):  # another run may do the same
        path = root / RUNS_FILE
        stored = read_json(path, list, RUN_AGAIN) if path.exists() else []
        selections = selections_of(Results(root, stored_selections=stored))
        if selection not in selections:
            selections.append(selection)
        write_json(path, [one.to_json() for one in selections])


def selections_of(results: Results) -> list[Selection]:
    """Return what was asked for when the results were made."""
    try:
        return [Selection.from_json(stored) for stored in results.stored_selections]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        source = "the first line of the packed file" if results.root is None else results.root / RUNS_FILE
        raise LabError(f"{source} is damaged: {error}. {RUN_AGAIN}") from error


@dataclass(frozen=True)
class PresetGroup:
    """A preset of which something was run: those studies, as it has them, and its others."""

    plans: list[Plan]
    not_run: tuple[Study, ...]


def load_groups(path: Path) -> list[PresetGroup]:
    """Return everything that was run in a folder or packed, by experiment and preset.

    A study that was run in part is whole. One that was run several times has the most tuning seeds and the
    most variants of these runs.
    """
    results = load_existing_results(path)
    plans_by_preset: dict[tuple[str, str], dict[str, Plan]] = {}
    for selection in selections_of(results):
        plans = plans_by_preset.setdefault((selection.experiment, selection.preset), {})
        for plan in select_plans(replace(selection, variants=(), seeds=None), results):
            plans[plan.study.identity] = _merge(plan, plans.get(plan.study.identity, plan))
    groups = []
    for (name, preset), plans in plans_by_preset.items():
        studies = get_experiment(name).presets[preset]
        order, names = [study.name for study in studies], {plan.study.name for plan in plans.values()}
        in_order = sorted(plans.values(), key=lambda plan: order.index(plan.study.name))
        groups.append(PresetGroup(in_order, tuple(study for study in studies if study.name not in names)))
    return groups


def _merge(plan: Plan, other: Plan) -> Plan:
    """Return the plan of a study with the tuning seeds and variants of both: one has those of the other."""
    study, other_study = plan.study, other.study
    tuning_seeds = max(study.tuning_seeds, other_study.tuning_seeds, key=len)
    variants = max(study.variants, other_study.variants, key=len)
    merged = replace(study, tuning_seeds=tuning_seeds, variants=variants)
    return make_plan(plan.experiment, merged, plan.results, plan.preset)
