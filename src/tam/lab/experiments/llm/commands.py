"""`tam lab score` and `tam lab paper mteb`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
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
from tam.lab.experiments.llm.mteb.tasks import check_tasks
from tam.lab.experiments.llm.paper_tables import comparison, page
from tam.lab.experiments.llm.studies import resolve_tasks
from tam.lab.experiments.llm.trial import Config


def score(
    folder: Annotated[Path, typer.Argument(help="The output folder of a run of llm.")],
    data: DataFolder = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Other tasks than those of the run.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where missing embeddings are computed: cpu or cuda.")] = "cpu",
) -> None:
    """Score the fine-tuned networks in a folder on their tasks of MTEB. Stored scores are reused.

    Embeddings in the folder are used, too: they can be made on a machine without mteb.
    """
    if data is not None and not data.is_dir():
        raise LabError(f"No such folder: {data}")
    check_device(device, torch.cuda.device_count())
    data_folder = data or default_folder()
    names = resolve_tasks(tasks or "", folder, data_folder)["tasks"]
    score_networks(folder, data_folder, names, torch.device(device))


def score_networks(folder: Path, data_folder: Path, tasks: Sequence[str], device: torch.device) -> None:
    """Score every finished network, and print one line per network."""
    check_tasks(tasks, data_folder)
    records = _finished_records(folder)
    incomplete = 0
    for label, record in records:
        required = tasks or Config(**record.config).tasks
        try:
            scoring.score_trial(folder / "trials" / record.key, required, data_folder, device)
        except LabError as error:  # the others go on
            print(f"tam: {error}", file=sys.stderr)
        scores = {task: stored["score"] for task, stored in record.scores.items() if task in required}
        values = ", ".join(f"{task} {value:.2f}" for task, value in scores.items())
        print(f"{label} ({record.key}): {values}")
        incomplete += len(scores) < len(required)
    if not records:
        raise LabError(f"{folder} has no finished trials of llm")
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
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="A page with figures: mteb.html.")
    ] = None,
) -> None:
    """Compare AdaTAMW with AdamW on MTEB from the paper's six tables, and check what it says of them."""
    rows = comparison.read_rows(comparison.MTEB)
    if out is not None:
        if out.suffix.lower() != ".html":
            raise LabError(f"{out}: must end in .html")
        check_writable(out)
        title = "MTEB: the paper's comparison, recomputed from its tables"
        write_whole(out, page.html(rows, title).encode())
    if as_json:
        print(json.dumps(comparison.summarize(rows)))
    else:
        print(page.text(rows) if out is None else out)
