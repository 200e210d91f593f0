"""Online learning under label flips: trials of one kind (depth, width, tasks) as one population.

A trial is one network: an MLP that learns one task after the other. The labels of a task are those of the
task before, with some of them changed. Each batch is predicted before it is learned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import linear_regression, mean
from typing import Any

import torch
from torch import Tensor

from tam.lab.core.alignment import keep_levels
from tam.lab.core.store import TrialFolder
from tam.lab.experiments.online.population import Config, Population
from tam.lab.training.damping_control import check_source_length, load_source_alignment
from tam.lab.training.loop import Progress


def kind_of(config: Config) -> str:
    """Return the kind of a trial. Trials of one kind can be one population."""
    names = ("depth", "width", "epochs", "passes", "batch", "data", "held_out")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def slope_per_task(values: Sequence[float]) -> float:
    return linear_regression(range(len(values)), values).slope if len(values) > 1 else 0.0


class Member:
    """A trial of the population."""

    def __init__(self, config: Config, folder: TrialFolder, device: torch.device) -> None:
        self.config, self.folder = config, folder
        self.state: dict[str, Any] | None  # before the next task; None once the population has it
        self.task, self.state = folder.load(device) or (0, None)
        self.source = load_source_alignment(config, folder)
        self.levels: list[Tensor] = []  # s of every step, task by task
        if self.state is not None and len(self.state["levels"]):
            self.levels.append(self.state["levels"].cpu())

    def finish(self, population: Population, seconds: float, device: torch.device) -> None:
        """Write the alignment and the result."""
        if self.levels:
            keep_levels(self.folder, torch.cat(self.levels))
        rows = self.folder.rows
        online = [row["online"] for row in rows]
        result = {
            "online": mean(online), "first": mean(row["first"] for row in rows),
            "slope": slope_per_task(online), "loss": rows[-1]["loss"],
            "diverged": not math.isfinite(rows[-1]["loss"]), "epochs": len(rows),
            "parameters": population.parameters(), "settings": asdict(self.config),
        }  # fmt: skip
        self.folder.finish(result, seconds, device)


def run_together(
    configs: Sequence[Config], folders: Sequence[TrialFolder], data_folder: Path, device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:  # fmt: skip
    """Train all members from their last checkpoints. Those behind catch up first.

    Yields:
        None after every step, Progress with the members' mean after every task.
    """
    members = [Member(config, folder, device) for config, folder in zip(configs, folders, strict=True)]
    last = members[0].config.epochs
    while any(member.task < last for member in members):
        task = min(member.task for member in members)
        until = min((member.task for member in members if member.task > task), default=last)
        behind = [member for member in members if member.task == task]
        yield from _run_tasks(behind, until, data_folder, device, save_every)


def _run_tasks(
    members: Sequence[Member], until: int, data_folder: Path, device: torch.device, save_every: float
) -> Iterator[Progress | None]:
    """Train members that are equally far up to a task."""
    config = members[0].config
    population = Population(
        [one.config for one in members], data_folder, device, [one.source for one in members]
    )
    seconds_before = 0.0 if members[0].state is None else float(members[0].state["seconds"])
    for i, member in enumerate(members):
        check_source_length(member.source, population.steps * config.passes * config.epochs)
        member.folder.trials_together = len(members)
        if member.state is not None:
            population.load_member_state(i, member.state)
        member.state = None  # it is in the population now
    start = last_save = time.monotonic()
    for task in range(members[0].task, until):
        population.begin_task(task)
        for number in range(config.passes):
            population.begin_pass(task, number)
            for _ in range(population.steps):
                population.step()
                yield None
        rows = population.task_metrics(task)
        for member, row, s in zip(members, rows, population.task_levels(), strict=True):
            member.folder.log(row)
            member.levels += [] if s is None else [s]
        average = {"epoch": task + 1, "online": mean(row["online"] for row in rows)}
        yield Progress(task + 1, config.epochs, average)
        seconds = seconds_before + time.monotonic() - start
        if time.monotonic() - last_save > save_every and task + 1 < config.epochs:
            for i, member in enumerate(members):
                levels = torch.cat(member.levels) if member.levels else torch.zeros(0)
                state = {**population.member_state(i), "levels": levels, "seconds": seconds}
                member.folder.save(task + 1, state)
            last_save = time.monotonic()
    seconds = seconds_before + time.monotonic() - start
    for i, member in enumerate(members):
        member.task = until
        if until < config.epochs:
            member.state = {**population.member_state(i), "seconds": seconds}
        else:
            member.finish(population, seconds, device)
