"""Options that several commands have, and their checks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from tam.lab.core.errors import LabError
from tam.lab.data import default_folder

_DATA = f"Data folder. Default: {default_folder()}."
DataFolder = Annotated[Path | None, typer.Option("--data", metavar="FOLDER", help=_DATA, envvar="TAM_DATA")]
ResultsPath = Annotated[
    Path, typer.Argument(metavar="RESULTS", help="The --out folder of a run, or a file of `tam lab pack`.")
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
