"""`tam lab verdicts`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tam.lab.core.errors import LabError
from tam.lab.core.store import write_whole

RESULTS = "Run folders, packed files, or folders that hold packed files."
CLAIMS = "File with the claims and their rules. Default: the paper's claims."


def write_verdicts(
    results: Annotated[list[Path], typer.Argument(metavar="RESULTS...", help=RESULTS)],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FOLDER", help="The folder for the pages.")],
    claims: Annotated[Path | None, typer.Option(metavar="FILE", help=CLAIMS)] = None,
) -> None:
    """Judge the paper's claims. Write a table, a forest plot and a chart of the learning rates."""
    from tam.lab.report.claim_pages import build_pages, headline
    from tam.lab.report.claims import paper_claims, read_claims
    from tam.lab.report.evidence import load_evidence
    from tam.lab.report.verdicts import judge_claims

    declared, picture = read_claims(claims or paper_claims())
    evidence = load_evidence(results)
    rows = judge_claims(declared, evidence)
    pages = build_pages(rows, evidence, picture, out)
    for name in pages:
        if (out / name).is_dir():
            raise LabError(f"{out / name} is a folder: remove it")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"{out} cannot be written: {error.strerror}") from error
    for name, content in pages.items():
        write_whole(out / name, content.encode())
    for text in evidence.damaged:
        print(f"tam: left out: {text}", file=sys.stderr)
    print(f"{headline(rows)}\n{out / 'claims.html'}")
