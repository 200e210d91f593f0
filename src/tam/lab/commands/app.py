"""`tam lab`: the list of its commands. A command's module is imported when the command is called."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import typer
import typer.main
from typer.core import TyperGroup

COMMANDS = {
    "list": "list:list_experiments",
    "run": "run:app",
    "status": "results:show_status",
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
    "paper": "Recompute the paper's claims from its own tables.",
}
LazyCommand = tuple[str, Callable[[], Any]]  # the line that lists it, and what returns the click command


def load(summary: str) -> object:
    """Return `tam lab` as a command.

    A package of an experiment declares commands like this module: `COMMANDS = {"score": "commands:score"}`.
    """
    from tam.lab.core.registry import import_packages  # `tam --help` needs none of the lab's modules

    targets = {path: f"{__package__}.{target}" for path, target in COMMANDS.items()}
    for package_name, package in import_packages().items():
        for path, target in getattr(package, "COMMANDS", {}).items():
            targets.setdefault(path, f"{package_name}.{target}")
    groups: dict[str, dict[str, LazyCommand]] = {"": {}}
    for path, target in targets.items():
        group, _, name = path.rpartition(" ")
        groups.setdefault(group, {})[name] = read_summary(target), partial(load_target, target)
    app = make_app(groups.pop(""), help=summary)
    for group, commands in groups.items():
        app.add_typer(make_app(commands, help=GROUPS.get(group, "")), name=group)
    return typer.main.get_group(app)


class LazyGroup(TyperGroup):
    """A group that loads the command that is called, and no other."""

    loaders: ClassVar[Mapping[str, Callable[[], Any]]] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.loaders:
            self.add_command(self.loaders[args[0]](), args[0])
        return super().resolve_command(ctx, args)


def make_app(
    commands: Mapping[str, LazyCommand], group: type[LazyGroup] = LazyGroup, **settings: Any
) -> typer.Typer:
    """Return a program with these commands."""
    kind = type("Commands", (group,), {"loaders": {name: load for name, (_, load) in commands.items()}})
    settings = {"add_completion": False, **settings}
    app = typer.Typer(cls=kind, no_args_is_help=True, rich_markup_mode="markdown", **settings)
    for name, (summary, _) in commands.items():
        app.command(name, help=summary)(lambda: None)
    return app


def make_command(function: Callable[..., None]) -> Any:
    """Return a function with typer's annotations as a command."""
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    app.command()(function)
    return typer.main.get_command(app)


def load_target(target: str) -> Any:
    """Import "module:name", a function or a program of typer's, and return it as a command."""
    module, _, name = target.partition(":")
    value = getattr(importlib.import_module(module), name)
    return typer.main.get_group(value) if isinstance(value, typer.Typer) else make_command(value)


def read_summary(target: str) -> str:
    """Return the first line of the docstring of "module:function" or of a module, without importing it."""
    module, _, name = target.partition(":")
    try:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except Exception:  # loading the command shows what is wrong
        return ""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return (ast.get_docstring(functions[0] if functions else tree) or "").partition("\n")[0]
