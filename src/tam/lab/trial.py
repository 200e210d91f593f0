"""What trials of all kinds share: their way from epoch to epoch, how far one is, what it was run with."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam import registry
from tam.lab.canonical_defaults import canonical_options
from tam.lab.store import TrialFolder


@dataclass(frozen=True)
class Progress:
    """Where a trial stands."""

    epoch: int
    epochs: int
    metrics: dict[str, Any]


class Learner(Protocol):
    """What learns, and all that a checkpoint must hold of it."""

    def epoch(self, epoch: int) -> Generator[None, None, dict[str, Any] | None]:
        """Yields after every step; returns the metrics, "epoch", which is 1 more, and "loss" among them.

        None where the epoch only leads to where the trial begins.
        """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def by_epochs(
    learner: Learner,
    folder: TrialFolder,
    device: torch.device,
    epochs: int,
    save_every: float,
    agreed: Callable[[bool], bool] = bool,
) -> Generator[Progress | None, None, float]:
    """Learns until the last epoch, or until the loss is no number, from the last checkpoint if there is one.

    Yields after every step, and Progress after an epoch; returns how many seconds it has taken. Checkpoints
    are `save_every` seconds apart at least; ranks have `agreed` on whether one is due.
    """
    first, spent = 0, 0.0
    found = folder.load(device)
    if found is not None:
        first, state = found
        learner.load_state_dict(state["learner"])
        spent = float(state["seconds"])
    begin = saved = time.monotonic()
    for epoch in range(first, epochs):
        row = yield from learner.epoch(epoch)
        if row is not None:
            folder.log(row)
            yield Progress(epoch + 1, epochs, row)
            if not math.isfinite(row["loss"]):
                break
        if agreed(time.monotonic() - saved > save_every) and epoch + 1 < epochs:
            kept = {"learner": learner.state_dict(), "seconds": spent + time.monotonic() - begin}
            folder.save(epoch + 1, kept)
            saved = time.monotonic()
    return spent + time.monotonic() - begin


def told(config: Any) -> dict[str, Any]:
    """A config as JSON has it: one form of what is the same, without what is the default."""
    given, defaults = asdict(config), {f.name: f.default for f in fields(config)}
    record = registry.get(given["optimizer"])
    given |= {"lr": float(given["lr"]), "optimizer": record.name}
    given["options"] = canonical_options(record.name, given["options"])
    return {k: v for k, v in given.items() if v != defaults[k] and v != {}}


def resolved(config: Any, optimizer: Optimizer) -> dict[str, Any]:
    """All that a trial was run with, defaults too."""
    group = optimizer.param_groups[0]
    options = {k: v for k, v in group.items() if k not in ("params", "lr") and not isinstance(v, Tensor)}
    return {**asdict(config), "options": options}
