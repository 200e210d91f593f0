"""`tam lab report`, `tam lab pack` and `tam lab unpack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tam.lab.commands.options import AsJson, ResultsPath, check_writable
from tam.lab.core.errors import LabError
from tam.lab.core.results import pack, unpack
from tam.lab.core.selection import load_groups
from tam.lab.core.store import write_whole


def write_report(
    results: ResultsPath,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="report.html, or report.md for Markdown.")
    ] = Path("report.html"),
    as_json: AsJson = False,
) -> None:
    """Write a report: tables next to the paper's, curves, settings and machines."""
    from tam.lab.report import WRITERS, build_report, render_json

    if as_json:
        print(render_json(build_report(load_groups(results))), end="")
        return
    check_writable(out)
    if out.suffix.lower() not in WRITERS:
        raise LabError(f"{out}: must end in {' or '.join(WRITERS)}")
    page = WRITERS[out.suffix.lower()](build_report(load_groups(results)))
    write_whole(out, page.encode())
    print(out)


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
