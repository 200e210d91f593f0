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
from types import ModuleType
from typing import Any

from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError, explain_missing
from tam.lab.core.study import Curve, Metric, Population, Study, Table

EXPERIMENTS_PACKAGE = "tam.lab.experiments"


@dataclass(frozen=True, kw_only=True)
class RunOption:
    """An option of `tam lab run NAME` that only this experiment has.

    `resolve` takes the value, the output folder and the data folder. It returns what the option adds to the
    workload of every study.
    """

    name: str  # with _ where the command line has -
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
    data_fields: tuple[str, ...] = ()  # of the config: they name the data sets that a trial needs
    modules: tuple[str, ...] = ()  # of other extras than `demo`, that every trial imports
    check: Callable[[Any, Path], None] = lambda config, data_folder: None  # raises if more is missing
    # Why this machine cannot run a trial, whose package is missing. The others are run. "": it can.
    missing: Callable[[Any], str] = lambda config: ""
    claims: tuple[int, ...] = ()  # of the paper, by number (registered.md)
    # What decides a claim without runs, by name: returns whether it holds, a figure and a reason.
    computed: Mapping[str, Callable[[], tuple[bool, str, str]]] = field(default_factory=dict)
    # Of registered.md: takes all plans by experiment, preset and study, returns them with verdicts.
    hypotheses: Callable[[Mapping[tuple[str, str, str], Any]], Sequence[Any]] = lambda plans: ()
    extras: ReportExtras = field(default_factory=ReportExtras)
    runs_on_ranks: bool = False  # a trial can use all ranks of a torchrun job
    runs_alone: bool = False  # trials measure time, so only one runs at a time
    one_per_process: bool = False  # a trial does not yield between steps, or fills a GPU's memory
    cpu_presets: tuple[str, ...] | None = ("smoke",)  # those that do not need a GPU; None: all
    population: Population | None = None  # instead of `run`
    override: Callable[[Study, Mapping[str, Any]], Study] = lambda study, overrides: replace(
        study, workload={**study.workload, **overrides}
    )  # returns a study with what the options add to its workload

    def data_sets(self, config: TrialConfig) -> list[str]:
        """Return the data sets that a trial needs. Generated data is none, and a field can be empty."""
        names = [str(getattr(config, name)) for name in self.data_fields]
        return [name for name in names if name not in ("generated", "")]


@cache
def import_packages() -> dict[str, ModuleType | None]:
    """Import the packages of all experiments: their `__init__` alone. None: it cannot be imported."""
    parent = importlib.import_module(EXPERIMENTS_PACKAGE)
    packages: dict[str, ModuleType | None] = {}
    modules = pkgutil.iter_modules(parent.__path__, f"{EXPERIMENTS_PACKAGE}.")
    for name in (module.name for module in modules if module.ispkg):
        try:
            packages[name] = importlib.import_module(name)
        except Exception:  # loading the experiment shows why
            packages[name] = None
    return packages


@cache
def experiment_modules() -> dict[str, str]:
    """Return the module that declares each experiment. Imports none of them."""
    modules: dict[str, str] = {}
    for path, package in import_packages().items():
        names = getattr(package, "EXPERIMENTS", {path.rpartition(".")[2]: "studies"})
        modules |= {name: f"{path}.{module}" for name, module in names.items()}
    return dict(sorted(modules.items()))


def experiment_names() -> list[str]:
    return list(experiment_modules())


@cache
def get_experiment(name: str) -> Experiment:
    """Import an experiment and return its declaration."""
    if name not in experiment_modules():
        for parent in importlib.import_module(EXPERIMENTS_PACKAGE).__path__ if name else ():
            if (folder := Path(parent, name)).is_dir() and not (folder / "__init__.py").exists():
                raise LabError(f"{folder} has no __init__.py: add an empty one")
        raise LabError(f"no experiment {name!r}; there are {', '.join(experiment_names())}")
    try:
        module = importlib.import_module(experiment_modules()[name])
    except LabError:
        raise
    except Exception as error:
        if missing := explain_missing(f"the experiment {name}", error):
            raise missing from None
        raise LabError(f"the experiment {name} cannot be loaded: {error!r}") from error
    experiment = getattr(module, "EXPERIMENT", None)
    if not isinstance(experiment, Experiment):
        raise LabError(f"{module.__file__} declares no EXPERIMENT")
    if experiment.name != name:
        raise LabError(f"{module.__file__}: the name of EXPERIMENT must be {name!r}, got {experiment.name!r}")
    return experiment
