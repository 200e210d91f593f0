"""Mode connectivity: two forks of a run, trained on with other batches, and the loss barrier between them.

A trial starts from the state that a run has left after an epoch (`Config.keep_at` of images), or trains up to
it itself. It then trains two forks that differ only in the order and augmentation of their batches. The
outcome is the largest rise of the loss on the straight line between their weights.
"""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tam import landscape
from tam.lab.core.errors import LabError
from tam.lab.core.store import TrialFolder, digest_of
from tam.lab.experiments.images import trial as images
from tam.lab.experiments.images.trial import Training
from tam.lab.training.augmentation import normalize
from tam.lab.training.loop import NetworkLearner, train_network
from tam.lab.training.metrics import autocast, classifier_result

FORK_ORDERS = (1, 2)  # numbers of their batch orders
STATISTICS_BATCHES, STATISTICS_BATCH = 10, 500  # images over which batch norm is estimated again
POINTS = 11  # on the line, including its ends


@dataclass(frozen=True, kw_only=True)
class Config(images.Config):
    """A run, and the epoch after which its forks start."""

    always_stored: ClassVar[frozenset[str]] = frozenset({"at"})  # it tells forks from a run

    at: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.at < self.epochs:
            raise ValueError(f"at must be an epoch before the last, got {self.at}")
        if self.sgdm_from is not None or self.damping is not None:
            raise ValueError("a warm-up or a control cannot be forked")

    def run_config(self, **changes: Any) -> images.Config:
        """Return the config of the run, or of one of its forks."""
        values = {f.name: getattr(self, f.name) for f in fields(images.Config)}
        return images.Config(**{**values, "test": False, **changes})

    @property
    def trunk(self) -> images.Config:
        """The run up to the fork, at the fixed lr."""
        return self.run_config(schedule="constant" if self.schedule == "tail" else self.schedule)


class ForkPair(NetworkLearner):
    """Two forks of a run, and the run itself while it trains up to the fork here."""

    def __init__(self, config: Config, folder: TrialFolder, data_folder: Path, device: torch.device) -> None:
        self.config, self.folder, self.device = config, folder, device
        fork_configs = (config.run_config(order=order, keep_at=()) for order in FORK_ORDERS)
        self.forks = [Training(one, folder, data_folder, device) for one in fork_configs]
        self.optimizer = self.forks[0].optimizer
        self.make_trunk = partial(Training, config.trunk, folder, data_folder, device)
        self.trunk: Training | None = None
        self.has_forked = config.at == 0  # at 0 both start from new weights

    def epoch(self, epoch: int) -> Generator[None, None, dict[str, Any] | None]:
        if epoch < self.config.at:  # train the run, unless the forks have its state already
            if not self.has_forked and self.trunk is None and not self._fork_from_file():
                self.trunk = self.make_trunk()
            if self.trunk is not None:
                yield from _train([self.trunk], epoch)
                if epoch + 1 == self.config.at:
                    self._fork([self.trunk.state_dict()] * 2)
            return None
        yield from _train(self.forks, epoch)
        loss = mean(float(fork.measured(epoch)[:, 0].double().mean()) for fork in self.forks)
        validation = mean(float(fork.accuracy(*fork.validation_set())) for fork in self.forks)
        lr = self.config.learning_rate(epoch)
        return {"epoch": epoch + 1, "lr": lr, "loss": loss, "validation": validation}

    def result(self, metrics: list[dict[str, Any]]) -> dict[str, Any]:
        line = {**barriers(*self.forks), "apart": relative_distance(*self.forks)}
        return {**line, **classifier_result(metrics[-1], self.forks[0].model), "epochs": len(metrics)}

    def _fork_from_file(self) -> bool:
        """Start the forks from the state that a run has left. Return False if there is none."""
        for test in (True, False):  # of a run in a comparison, or one that only selects an lr
            run_folder = TrialFolder(self.folder.path.parent.parent, replace(self.config.trunk, test=test))
            path = run_folder.path / images.state_file(self.config.at)
            if path.exists():
                files = (run_folder.read_result() or {}).get("files", {})  # the run may not be finished
                try:
                    content = path.read_bytes()
                    if path.name in files and files[path.name] != digest_of(content):
                        raise ValueError("its digest is not the one in the run's result")
                    state = dict(torch.load(io.BytesIO(content), map_location=self.device, weights_only=True))
                except Exception as error:  # torch raises errors of many kinds
                    remedy = "remove it, and the forks train up to this epoch themselves"
                    raise LabError(f"{path} is damaged: {remedy}") from error
                self._fork([state] * 2)
                return True
        return False

    def _fork(self, states: Sequence[dict[str, Any]]) -> None:
        for fork, state in zip(self.forks, states, strict=True):
            fork.load_state_dict(state)
        self.has_forked, self.trunk = True, None

    def state_dict(self) -> dict[str, Any]:
        if self.trunk is not None:
            return {"trunk": self.trunk.state_dict()}
        return {"forks": [fork.state_dict() for fork in self.forks]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "forks" in state:
            self._fork(state["forks"])
        elif not self._fork_from_file():  # the run may have written it since
            self.trunk = self.make_trunk()
            self.trunk.load_state_dict(state["trunk"])


run = partial(train_network, ForkPair)


def _train(trainings: Sequence[Training], epoch: int) -> Iterator[None]:
    """Train one or more runs for an epoch, step by step."""
    for training in trainings:
        training.begin(epoch)
    for _ in range(trainings[0].steps):
        for training in trainings:
            training.step()
        yield None


@torch.no_grad()
def barriers(a: Training, b: Training) -> dict[str, Any]:
    """Return the barriers on training and validation loss, with the losses on each line.

    Batch norm's statistics are estimated again at each point, or interpolated ("_as_they_are").
    """
    train = a.train.to(a.images.device)
    data = {"train": (a.images[train], a.labels[train]), "validation": a.validation_set()}
    first_images = data["train"][0][: STATISTICS_BATCHES * STATISTICS_BATCH]
    batches = [normalize(x, a.mean, a.std) for x in torch.split(first_images, STATISTICS_BATCH)]
    measured: dict[str, Any] = {}
    for training in (a, b):
        training.model.eval()
    for name, (inputs, labels) in data.items():
        loss = partial(_mean_loss, a, inputs, labels)
        for suffix, statistics in (("", batches), ("_as_they_are", None)):
            line = landscape.barrier(a.model, b.model, loss, points=POINTS, batches=statistics)
            measured |= {f"barrier_{name}{suffix}": line.height, f"line_{name}{suffix}": list(line.losses)}
    return {"barrier": measured["barrier_train"], **measured}


@torch.no_grad()
def relative_distance(a: Training, b: Training) -> float:
    """Return the distance of the weights over their mean norm. At 0 a barrier of 0 says nothing."""
    # Not torch's parameters_to_vector: it cannot read weights that are channels last.
    first, second = (torch.cat([p.double().flatten() for p in x.model.parameters()]) for x in (a, b))
    return float(2 * (first - second).norm() / (first.norm() + second.norm()))


def _mean_loss(training: Training, inputs: Tensor, labels: Tensor, model: nn.Module) -> float:
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for x, y in training.batches(inputs, labels):
        with autocast(training.device):
            outputs = model(x)
        total += cross_entropy(outputs.float(), y, reduction="sum").double()
    return float(total) / len(labels)
