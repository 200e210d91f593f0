"""Online learning under label flips: trials of one kind (depth, width, tasks) as one population.

A trial is one network: an MLP that learns one task after the other. The labels of a task are those of the
task before, with some of them changed. Each batch is predicted before it is learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from tam.lab.core.store import TrialFolder
from tam.lab.experiments.online.population import Config, Population
from tam.lab.training import population
from tam.lab.training.damping_control import check_source_length, load_source_alignment
from tam.lab.training.loop import Progress


def kind_of(config: Config) -> str:
    """Return the kind of a trial. Trials of one kind can be one population."""
    names = ("depth", "width", "epochs", "passes", "batch", "data", "held_out")
    return ", ".join(f"{name} {getattr(config, name)}" for name in names)


def make_population(
    configs: Sequence[Config], folders: Sequence[TrialFolder], data_folder: Path, device: torch.device
) -> Population:
    """Return the networks of these trials, with the s that controls take over."""
    sources = [load_source_alignment(*trial) for trial in zip(configs, folders, strict=True)]
    networks = Population(configs, data_folder, device, sources)
    for config, source in zip(configs, sources, strict=True):
        check_source_length(source, networks.steps * config.passes * config.epochs, config.damping_of)
    return networks


def run_together(
    configs: Sequence[Config], folders: Sequence[TrialFolder], data_folder: Path, device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:  # fmt: skip
    """Train all networks as one population, from their last checkpoints."""
    return population.run_together(make_population, configs, folders, data_folder, device, save_every)
