"""What an experiment declares, and how one is found by its name.

Each folder of `tam.lab.experiments` is a package. Its module `studies` holds one `EXPERIMENT`. A package that
has several experiments names their modules in its `__init__`: `EXPERIMENTS = {"images": "studies", ...}`.
Only the module of the experiment that is asked for is imported, so a missing package disables no other one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError
from tam.lab.core.study import Curve, Metric, Population, Study, Table

EXPERIMENTS_PACKAGE = "tam.lab.experiments"


@dataclass(frozen=True, kw_only=True)
class RunOption:
    """An option of `tam lab run NAME` that only this experiment has.

    `resolve` takes the value, the output folder and the data folder. It returns what the option adds to the
    workload of every study.
    """

    name: str
    help: str
    metavar: str
    resolve: Callable[[str, Path, Path], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class ReportExtras:
    """What a report shows of an experiment besides tables and curves. Each takes a `Plan`.

    `figures` also takes the style number of each variant, so a variant looks the same in all charts. It
    returns charts; what is not Markup is escaped.
    """

    figures: Callable[[Any, Mapping[str, int]], Sequence[str]] = lambda plan, styles: ()
    lines: Callable[[Any], Sequence[str]] = lambda plan: []
    tables: Callable[[Any], list[Table]] = lambda plan: []


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A section of the paper: how a trial runs, and which studies there are."""

    name: str
    title: str
    config: Callable[..., TrialConfig]
    run: Callable[..., Iterator[Any]]  # takes config, folder, data folder, device and save_every
    presets: Mapping[str, tuple[Study, ...]]
    choices: Mapping[str, str]  # what the paper does not say, what was chosen, and why
    curves: tuple[Curve, ...]
    metrics: tuple[Metric, ...] = ()  # those that progress lines show, in this order
    options: tuple[RunOption, ...] = ()
    check: Callable[[Any, Path], None] = lambda config, data_folder: None  # raises if data is missing
    claims: tuple[int, ...] = ()  # of the paper, by number (docs/registered.md)
    # What decides a claim without runs, by name: returns whether it holds, a figure and a reason.
    computed: Mapping[str, Callable[[], tuple[bool, str, str]]] = field(default_factory=dict)
    extras: ReportExtras = field(default_factory=ReportExtras)
    runs_on_ranks: bool = False  # a trial can use all ranks of a torchrun job
    runs_alone: bool = False  # trials measure time, so only one runs at a time
    one_per_process: bool = False  # `run` does not yield between steps, so a process has one trial at a time
    needs_gpu: bool = True  # for all presets but smoke
    population: Population | None = None  # instead of `run`
    override: Callable[[Study, Mapping[str, Any]], Study] = lambda study, overrides: replace(
        study, workload={**study.workload, **overrides}
    )  # returns a study with what the options add to its workload


@cache
def _modules() -> dict[str, str]:
    """Return the module of every experiment, by name. Imports the packages' `__init__` alone."""
    package = importlib.import_module(EXPERIMENTS_PACKAGE)
    modules: dict[str, str] = {}
    for folder in sorted(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg):
        path = f"{EXPERIMENTS_PACKAGE}.{folder}"
        try:
            names = getattr(importlib.import_module(path), "EXPERIMENTS", {folder: "studies"})
        except Exception:  # loading the experiment shows why
            names = {folder: "studies"}
        modules |= {name: f"{path}.{module}" for name, module in names.items()}
    return modules


def experiment_names() -> list[str]:
    """Return the names of all experiments. Imports none of them."""
    return sorted(_modules())


def experiment_module(name: str) -> str:
    """Return the module that declares an experiment. Does not import it."""
    return _modules()[name]


@cache
def get_experiment(name: str) -> Experiment:
    """Import an experiment and return its declaration."""
    if name not in _modules():
        raise LabError(f"no experiment {name!r}; there are {', '.join(experiment_names())}")
    try:
        module = importlib.import_module(_modules()[name])
    except LabError:
        raise
    except Exception as error:
        raise LabError(f"the experiment {name} cannot be loaded: {error!r}") from error
    experiment = getattr(module, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment) or experiment.name != name:
        raise LabError(f"{module.__file__} declares no EXPERIMENT named {name!r}")
    return experiment
