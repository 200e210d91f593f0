"""`tam lab data`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from tam.lab import data as sets
from tam.lab.commands.list import load_experiments
from tam.lab.commands.options import DataFolder
from tam.lab.core.errors import DataError
from tam.lab.core.ladder_plan import make_plan
from tam.lab.core.plan import Plan
from tam.lab.core.results import Results
from tam.lab.data import default_folder, files

NAMES = list(sets.SETS)
Name = Annotated[
    str, typer.Argument(metavar="NAME", help=f"One of {', '.join(NAMES)}.", autocompletion=lambda: NAMES)
]


def sets_needed(plan: Plan) -> list[str]:
    """Return the data sets that a study's trials need."""
    variant = plan.study.variant(plan.study.baseline)
    config = plan.trial(variant, (*variant.lrs, 1.0)[0], plan.study.seeds[0], test=False)
    return plan.experiment.data_sets(config)


def list_data(data: DataFolder = None) -> None:
    """List the data sets: present or missing, download size, and the experiments that need them."""
    folder = data or default_folder()
    experiments, errors = load_experiments()
    users: dict[str, dict[str, None]] = {name: {} for name in sets.SETS}
    for experiment in experiments:
        for study in (study for studies in experiment.presets.values() for study in studies):
            for name in sets_needed(make_plan(experiment, study, Results())):
                users[name][experiment.name] = None
    for name, data_set in sets.SETS.items():
        size = f"{data_set.megabytes():.0f} MB" if data_set.megabytes() else "-"
        print(f"{name:<14}{data_set.presence(folder):<12}{size:>8}  {', '.join(users[name]) or '-'}")
    for name, error in errors.items():
        print(f"tam: {name} cannot be loaded, so its data is not listed: {error}", file=sys.stderr)


def get_data(name: Name, data: DataFolder = None) -> None:
    """Download a data set, check it and unpack it."""
    from tam.lab.data import download

    folder = data or default_folder()
    layouts = sets.get_set(name).layouts
    try:
        files.check(name, sets.find(name, folder), folder)
    except DataError:
        try:
            download.get(name, layouts[0], folder)
        except OSError as error:
            raise DataError(f"{name}: {folder} cannot be written: {error.strerror}") from error
    print(f"{name}: present")


def check_data(name: Name, data: DataFolder = None) -> None:
    """Check the files of a data set against their official sizes and md5 sums, where these are known."""
    folder = data or default_folder()
    layout = sets.find(name, folder)
    files.check(name, layout, folder)
    unchecked = ", ".join(file.path for file in layout.files if file.md5 is None)
    if not unchecked:
        print(f"{name}: complete, and all files are the official ones")
    elif all(file.size is not None for file in layout.files):
        print(f"{name}: complete, and all sizes are right; no official md5 is known for {unchecked}")
    else:
        print(f"{name}: complete; neither size nor md5 is known for {unchecked}")
