"""Commands that are imported when they are called, not when they are listed."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import typer
import typer.main
from typer.core import TyperGroup

LazyCommand = tuple[str, Callable[[], Any]]  # the line that lists it, and what returns the click command


class LazyGroup(TyperGroup):
    """A group of lazy commands."""

    loaders: ClassVar[Mapping[str, Callable[[], Any]]] = {}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Load the command that is called."""
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
