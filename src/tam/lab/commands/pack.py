"""`tam lab pack` and `tam lab unpack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tam.lab.commands.options import check_writable
from tam.lab.core.results import pack, unpack


def pack_results(
    folder: Annotated[Path, typer.Argument(help="The --out of a run.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="trials.jsonl.xz, for example.")],
) -> None:
    """Write the finished trials of a run folder into one packed file."""
    check_writable(out)
    print(f"{out}: {pack(folder, out)} trials")


def unpack_results(
    file: Annotated[Path, typer.Argument(help="A packed file.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="The run folder to write.")],
) -> None:
    """Write the trials of a packed file into a run folder."""
    print(f"{out}: {unpack(file, out)} trials")
