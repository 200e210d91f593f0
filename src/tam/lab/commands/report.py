"""`tam lab report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tam.lab.commands.options import AsJson, ResultsPath, check_writable
from tam.lab.core.errors import LabError
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
