"""Options that several commands have, their checks, and what a shell completes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tam.lab.core.errors import LabError
from tam.lab.core.registry import get_experiment
from tam.lab.core.study import Study
from tam.lab.data import default_folder


def complete_preset(ctx: typer.Context) -> list[str]:
    """Return the presets of the experiment whose command it is."""
    return list(get_experiment(str(ctx.info_name)).presets)


def complete_study(ctx: typer.Context) -> list[str]:
    return [study.name for study in _studies(ctx)]


def complete_variant(ctx: typer.Context) -> list[str]:
    return list({variant.name: None for study in _studies(ctx) for variant in study.variants})


def _studies(ctx: typer.Context) -> tuple[Study, ...]:
    """Return the studies of the preset on the command line."""
    return get_experiment(str(ctx.info_name)).presets.get(ctx.params.get("preset") or "quick", ())


DataFolder = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="FOLDER", help=f"Data folder. Default: {default_folder()}.", envvar="TAM_DATA"
    ),
]
ResultsPath = Annotated[
    Path, typer.Argument(metavar="RESULTS", help="The --out of a run, or a file written by `tam lab pack`.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def check_writable(path: Path) -> None:
    """Raise an error if the file cannot be written."""
    file = Path(os.path.realpath(path))  # a link itself must not be removed below
    existed = file.exists()
    try:
        file.open("a").close()  # permissions alone do not tell: the folder may be missing or read-only
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror}") from error
    if not existed:
        file.unlink()
