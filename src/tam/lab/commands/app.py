"""`tam lab`: the list of its commands. A command's module is imported when the command is called."""

from __future__ import annotations

import importlib
import pkgutil
from functools import partial

import typer.main

from tam.lab.commands.lazy import LazyCommand, load_target, make_app, read_summary
from tam.lab.core.registry import EXPERIMENTS_PACKAGE

COMMANDS = {
    "list": "list:list_experiments",
    "run": "run:app",
    "status": "status:show_status",
    "report": "results:write_report",
    "verdicts": "verdicts:write_verdicts",
    "pack": "results:pack_results",
    "unpack": "results:unpack_results",
    "data list": "data:list_data",
    "data get": "data:get_data",
    "data check": "data:check_data",
}
GROUPS = {
    "data": "List, download and check the data sets.",
    "paper": "Recompute the paper's own figures from its tables.",
}


def find_commands() -> dict[str, str]:
    """Return "module:name" of every command by its path below `tam lab`, with those of experiments.

    A package of an experiment declares them like this module: `COMMANDS = {"score": "commands:score"}`.
    """
    targets = {path: f"{__package__}.{target}" for path, target in COMMANDS.items()}
    experiments = importlib.import_module(EXPERIMENTS_PACKAGE)
    for package in pkgutil.iter_modules(experiments.__path__, f"{EXPERIMENTS_PACKAGE}."):
        try:
            declared = getattr(importlib.import_module(package.name), "COMMANDS", {})
        except Exception:  # `tam lab list` shows what is wrong
            continue
        for path, target in declared.items():
            targets.setdefault(path, f"{package.name}.{target}")
    return targets


def load(summary: str) -> object:
    """Return `tam lab` as a command."""
    groups: dict[str, dict[str, LazyCommand]] = {"": {}}
    for path, target in find_commands().items():
        group, _, name = path.rpartition(" ")
        groups.setdefault(group, {})[name] = read_summary(target), partial(load_target, target)
    app = make_app(groups.pop(""), help=summary)
    for group, commands in groups.items():
        app.add_typer(make_app(commands, help=GROUPS.get(group, "")), name=group)
    return typer.main.get_group(app)
