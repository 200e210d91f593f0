"""How many trials of the lab a GPU trains per hour, by how many train side by side in one process.

    PYTHONPATH=src python3 benchmarks/lab_throughput.py --data DATA --out FILE.json \\
        images/registered/cifar10-resnet18 sgd_ladder/registered/resnet

Each argument names an experiment, a preset and a study. Its first trials train for a few epochs. Times count
from the moment at which the last of them has ended its first epoch, so all steps are compiled.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tam.lab.core.environment import describe_machine
from tam.lab.core.errors import LabError
from tam.lab.core.results import Results
from tam.lab.core.selection import Selection, select_plans
from tam.lab.engines.events import EpochEnded, Event, Job, RunLocation, TrialEnded, TrialFailed
from tam.lab.engines.worker import run_jobs


class EnoughEpochs(BaseException):
    """All trials have trained long enough. No handler of errors in a trial catches it."""


def first_trials(study: str, count: int) -> list[Job]:
    """Return the first trials of a study that can run at once: one job, if they form a population."""
    if study.count("/") != 2:
        raise SystemExit(f"{study}: give EXPERIMENT/PRESET/STUDY, as in images/registered/cifar10-resnet18")
    experiment, preset, name = study.split("/")
    try:
        (plan,) = select_plans(Selection(experiment, preset, (name,)), Results())
    except LabError as error:
        raise SystemExit(str(error)) from None
    trials = [trial for _, trial in plan.to_run()[:count]]
    if len(trials) < count:
        raise SystemExit(f"{study} has only {len(trials)} trials that can run at once")
    if plan.experiment.population is not None:
        return [Job(experiment, trials[0], others=tuple(trials[1:]))]
    return [Job(experiment, trial) for trial in trials]


def measure(study: str, count: int, data: Path, device: str, epochs: int) -> dict[str, Any]:
    """Train some trials side by side. Return their rate and the times behind it."""
    jobs = first_trials(study, count)
    if any(job.config.epochs <= epochs for job in jobs):
        raise SystemExit(
            f"{study} trains for {jobs[0].config.epochs} epochs: one must remain before those to time"
        )
    waiting, ends = list(jobs), defaultdict[str, list[float]](list)

    def next_job(_: bool) -> Job | None:
        return waiting.pop() if waiting else None

    def on_event(event: Event) -> None:
        if isinstance(event, TrialFailed):
            raise SystemExit(f"{study}: {event.message}")
        if isinstance(event, TrialEnded) and len(ends[event.job.key]) <= epochs:
            raise SystemExit(f"{study}: a trial ended early, so fewer train side by side")
        if isinstance(event, EpochEnded):
            ends[event.job.key].append(time.perf_counter())
            if all(len(ends[job.key]) > epochs for job in jobs):
                raise EnoughEpochs

    begin = time.perf_counter()
    with TemporaryDirectory() as folder, suppress(EnoughEpochs):
        run_jobs(RunLocation(Path(folder), data, device, len(jobs), save_every=1e9), next_job, on_event)
    ready = max(own[0] for own in ends.values())
    seconds = [end - start for own in ends.values() for start, end in pairwise(own) if start >= ready]
    rate = 3600 / (median(seconds) * jobs[0].config.epochs)
    return {"startup_s": ready - begin, "epoch_s": seconds, "trials_per_hour": count * rate}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="+", metavar="EXPERIMENT/PRESET/STUDY")
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--device", default="cuda", help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=2, help="epochs to time; default: %(default)s")
    parser.add_argument(
        "--together", type=int, nargs="+", default=[1, 4, 6, 8, 12],
        help="how many trials train side by side; default: %(default)s",
    )  # fmt: skip
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA device; give --device cpu")
    if min(arguments.epochs, *arguments.together) < 1:
        parser.error("--epochs and --together need at least 1")
    if arguments.out and not arguments.out.parent.is_dir():
        parser.error(f"there is no folder {arguments.out.parent}")
    timings: dict[str, dict[str, Any]] = {study: {} for study in arguments.studies}
    versions = dict(describe_machine(torch.device(arguments.device)))
    head = {"hardware": versions.pop("hardware"), "versions": versions, "rounds": arguments.epochs}
    for study, rows in timings.items():
        for count in arguments.together:
            row = measure(study, count, arguments.data, arguments.device, arguments.epochs)
            rows[str(count)] = row
            print(f"{study}, {count} side by side: {row['trials_per_hour']:.1f} trials per hour", flush=True)
            if arguments.out:  # after each: a machine can be lost
                text = json.dumps({**head, "throughput": timings}, indent=1)
                arguments.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
