"""Trials that train together as one program, with their checkpoints."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch

from tam.lab.core.config import TrialConfig
from tam.lab.core.store import TrialFolder
from tam.lab.training.loop import Progress


class Population(Protocol):
    """Networks that take their steps at once. Members have the order of the configs it was made from."""

    def epoch(self, epoch: int) -> Generator[None, None, list[dict[str, Any]]]:
        """Train one epoch, counted from 0. Yield after every step and return each member's metrics."""

    def member_state(self, index: int) -> dict[str, Any]:
        """Return a copy of what a checkpoint of this member must hold."""

    def load_member_state(self, index: int, state: dict[str, Any]) -> None:
        """Continue a member from its checkpoint."""

    def finish(self, index: int, folder: TrialFolder) -> dict[str, Any]:
        """Write what a finished member leaves besides its result. Return the result."""


class Member:
    """A trial of the population."""

    def __init__(self, config: TrialConfig, folder: TrialFolder, device: torch.device) -> None:
        self.config, self.folder = config, folder
        self.state: dict[str, Any] | None  # at the last checkpoint; None once the population has taken it
        self.epoch, self.state = folder.load(device) or (0, None)


def run_together(
    make_population: Callable[[Sequence[Any], Sequence[TrialFolder], Path, torch.device], Population],
    configs: Sequence[TrialConfig], folders: Sequence[TrialFolder], data_folder: Path, device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:  # fmt: skip
    """Train all members from their last checkpoints. Those behind catch up first.

    Yields:
        None after every step, Progress with the members' mean after every epoch.
    """
    members = [Member(config, folder, device) for config, folder in zip(configs, folders, strict=True)]
    last = configs[0].epochs
    while any(member.epoch < last for member in members):
        epoch = min(member.epoch for member in members)
        until = min((member.epoch for member in members if member.epoch > epoch), default=last)
        behind = [member for member in members if member.epoch == epoch]
        group = [one.config for one in behind], [one.folder for one in behind]
        _free_memory(device)  # of the population before, here or of the trials before: it is in a cycle
        population = make_population(*group, data_folder, device)
        yield from _train(population, behind, until, device, save_every)
        del population


def _free_memory(device: torch.device) -> None:
    """Free what nothing uses. A captured step and its population refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # memory of another stream is not used again by itself


def _train(
    population: Population, members: Sequence[Member], until: int, device: torch.device, save_every: float
) -> Iterator[Progress | None]:
    """Train members that are equally far up to an epoch."""
    epochs = members[0].config.epochs
    seconds_before = 0.0 if members[0].state is None else float(members[0].state["seconds"])
    for i, member in enumerate(members):
        member.folder.trials_together = len(members)
        if member.state is not None:
            population.load_member_state(i, member.state)
        member.state = None  # it is in the population now
    start = last_save = time.monotonic()
    for epoch in range(members[0].epoch, until):
        rows = yield from population.epoch(epoch)
        for member, row in zip(members, rows, strict=True):
            member.folder.log(row)
        shared = set.intersection(*(set(row) for row in rows)) - {"epoch"}
        average = {name: fmean(row[name] for row in rows) for name in rows[0] if name in shared}
        yield Progress(epoch + 1, epochs, {"epoch": epoch + 1, **average})
        seconds = seconds_before + time.monotonic() - start
        if time.monotonic() - last_save > save_every and epoch + 1 < epochs:
            for i, member in enumerate(members):
                member.folder.save(epoch + 1, {**population.member_state(i), "seconds": seconds})
            last_save = time.monotonic()
    seconds = seconds_before + time.monotonic() - start
    for i, member in enumerate(members):
        member.epoch = until
        if until < epochs:
            member.state = {**population.member_state(i), "seconds": seconds}
        else:
            member.folder.finish(population.finish(i, member.folder), seconds, device)
