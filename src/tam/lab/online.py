"""Online learning under label flips: trials of one kind (depth, width, tasks) as one population.

A trial is one network: an MLP that learns one task after the other, whose labels are those of the task before
with some of them changed. Each batch is predicted before it is learned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from tam.lab.damping import check_length, given_alignment, keep_levels
from tam.lab.data import files, find
from tam.lab.population import Config, Population
from tam.lab.store import TrialFolder
from tam.lab.trial import Progress, told


def config_of(**options: Any) -> dict[str, Any]:
    """A trial's config, checked, without defaults."""
    return told(Config(**options))


def kind_of(trial: dict[str, Any]) -> str:
    """Trials of one kind can be one population."""
    config = Config(**trial)
    named = ("depth", "width", "epochs", "passes", "batch", "data", "held_out")
    return ", ".join(f"{name} {getattr(config, name)}" for name in named)


def check(trial: dict[str, Any], data_folder: Path) -> None:
    """Raises where the data is not there."""
    config = Config(**trial)
    files.check(config.data, find(config.data, data_folder), data_folder)


def run_together(
    configs: Sequence[dict[str, Any]],
    folders: Sequence[TrialFolder],
    data_folder: Path,
    device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:
    """Trains all of them, from their last checkpoints where there are some; those behind catch up first.

    Yields after every step, and Progress with the members' mean after a task.
    """
    found = [folder.load(device) for folder in folders]
    members = [
        Member(Config(**config), folder, checkpoint)
        for config, folder, checkpoint in zip(configs, folders, found, strict=True)
    ]
    last = members[0].config.epochs
    while any(member.start < last for member in members):
        start = min(member.start for member in members)
        until = min((member.start for member in members if member.start > start), default=last)
        behind = [member for member in members if member.start == start]
        yield from _run(behind, until, data_folder, device, save_every)


def slope_of(values: Sequence[float]) -> float:
    """Of the straight line through them, a task: what is lost where it is negative is plasticity."""
    middle = (len(values) - 1) / 2
    spread = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * value for i, value in enumerate(values)) / spread if spread else 0.0


class Member:
    """A trial of the population."""

    def __init__(self, config: Config, folder: TrialFolder, found: tuple[int, dict[str, Any]] | None) -> None:
        self.config, self.folder = config, folder
        self.start = 0 if found is None else found[0]
        self.state = None if found is None else found[1]
        self.given = given_alignment(config, folder)
        self.levels: list[Tensor] = []  # s of every step, task by task
        if self.state is not None and len(self.state["levels"]):
            self.levels.append(self.state["levels"].cpu())

    def result(self, parameters: int) -> dict[str, Any]:
        rows = self.folder.rows
        online = [row["online"] for row in rows]
        return {
            "online": mean(online), "first": mean(row["first"] for row in rows), "slope": slope_of(online),
            "loss": rows[-1]["loss"], "diverged": not math.isfinite(rows[-1]["loss"]), "epochs": len(rows),
            "parameters": parameters, "settings": asdict(self.config),
        }  # fmt: skip


def _run(
    members: Sequence[Member], until: int, data_folder: Path, device: torch.device, save_every: float
) -> Iterator[Progress | None]:
    """Members that stand alike, up to a task."""
    config = members[0].config
    population = Population(
        [one.config for one in members], data_folder, device, [one.given for one in members]
    )
    for i, member in enumerate(members):
        check_length(member.given, population.steps * config.passes * config.epochs)
        member.folder.together = len(members)
        if member.state is not None:
            population.set_state_of(i, member.state)
    spent = 0.0 if members[0].state is None else float(members[0].state["seconds"])
    for member in members:
        member.state = None  # it is in the population now
    begin = saved = time.monotonic()
    for task in range(members[0].start, until):
        population.begin(task)
        for number in range(config.passes):
            population.draw(task, number)
            for _ in range(population.steps):
                population.step()
                yield None
        rows = population.rows(task)
        for member, row, s in zip(members, rows, population.levels(), strict=True):
            member.folder.log(row)
            member.levels += [] if s is None else [s]
        shown = {"epoch": task + 1, "online": mean(row["online"] for row in rows)}
        yield Progress(task + 1, config.epochs, shown)
        now = time.monotonic()
        if now - saved > save_every and task + 1 < config.epochs:
            for i, member in enumerate(members):
                kept = torch.cat(member.levels) if member.levels else torch.zeros(0)
                more = {"levels": kept, "seconds": spent + now - begin}
                member.folder.save(task + 1, {**population.state_of(i), **more})
            saved = now
    if until < config.epochs:
        for i, member in enumerate(members):
            member.start = until
            member.state = {**population.state_of(i), "seconds": spent + time.monotonic() - begin}
        return
    for member in members:
        member.start = until
        if member.levels:
            keep_levels(member.folder, torch.cat(member.levels))
        member.folder.finish(member.result(population.parameters()), spent + time.monotonic() - begin, device)
