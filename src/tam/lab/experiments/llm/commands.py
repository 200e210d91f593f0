"""`tam lab score` and `tam lab paper mteb`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from tam.lab.commands.options import AsJson, DataFolder, check_writable
from tam.lab.core.errors import LabError
from tam.lab.core.results import TrialRecord
from tam.lab.core.runner import check_device
from tam.lab.core.selection import load_groups
from tam.lab.core.store import write_whole
from tam.lab.data import default_folder
from tam.lab.experiments.llm.mteb import scoring
from tam.lab.experiments.llm.paper_tables import comparison, page
from tam.lab.experiments.llm.studies import split_names
from tam.lab.experiments.llm.trial import Config


def score(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The --out folder of a run of llm.")],
    data: DataFolder = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Tasks to score, instead of those of the run.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="Where missing embeddings are computed: cpu or cuda.")
    ] = "cpu",
) -> None:
    """Score the fine-tuned networks in a folder on tasks of MTEB. Stored scores are reused.

    Embeddings in the folder are also reused, so a run can make them on a machine without mteb.
    """
    if data is not None and not data.is_dir():
        raise LabError(f"No such folder: {data}")
    check_device(device, torch.cuda.device_count())
    data_folder = data or default_folder()
    names = split_names(tasks or "")
    scoring.check_tasks(names, data_folder)
    records, incomplete = _finished_records(folder), 0
    if not records:
        raise LabError(f"{folder} has no finished trials of llm")
    for label, record in records:
        required = names or Config(**record.config).tasks
        try:
            scoring.score_trial(folder / "trials" / record.key, required, data_folder, torch.device(device))
        except LabError as error:  # the others are still scored
            print(f"tam: {error}", file=sys.stderr)
        scores = {task: stored["score"] for task, stored in record.scores.items() if task in required}
        values = ", ".join(f"{task} {value:.2f}" for task, value in scores.items())
        print(f"{label} ({record.key}): {values}")
        incomplete += len(scores) < len(required)
    if incomplete:
        raise LabError(f"{incomplete} of {len(records)} networks lack some of their scores")


def _finished_records(folder: Path) -> list[tuple[str, TrialRecord]]:
    """Return the finished trials of llm, each once, with a label."""
    plans = [plan for group in load_groups(folder) for plan in group.plans if plan.experiment.name == "llm"]
    trials = {
        record.key: (f"{plan.study.name}, {outcome.variant.name}, seed {seed}", record)
        for plan in plans
        for outcome in plan.outcomes()
        for seed, record in outcome.records.items()
    }
    return list(trials.values())


def paper_mteb(
    as_json: AsJson = False,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FILE", help="Write a page with charts, for example mteb.html."),
    ] = None,
) -> None:
    """Compare AdaTAMW with AdamW in the paper's six MTEB tables, and check its statements about them."""
    rows = comparison.read_rows(comparison.MTEB)
    if out is not None:
        if out.suffix.lower() != ".html":
            raise LabError(f"--out must end in .html, got {out}")
        check_writable(out)
        title = "MTEB: the paper's comparison, recomputed from its tables"
        write_whole(out, page.html(rows, title).encode())
    if as_json:
        print(json.dumps(comparison.summarize(rows)))
    else:
        print(page.text(rows) if out is None else out)
