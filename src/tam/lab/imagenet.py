"""Training on ImageNet: a trial of the paper's table, on one process or, started by torchrun, on many.

The batch is the batch of all ranks together; each takes its share of the epoch's order. Rank 0 writes.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from tam import registry
from tam.lab.damping import (
    check_damping,
    check_length,
    given_alignment,
    keep_alignment,
    replace_alignment,
    watched,
)
from tam.lab.data.imagenet import Folders, generate
from tam.lab.images import normalise, result_of, row_of
from tam.lab.making import make_optimizer
from tam.lab.models import get_model
from tam.lab.ranks import Ranks
from tam.lab.store import LabError, TrialFolder
from tam.lab.trial import Progress, by_epochs, resolved, told

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels


@dataclass(frozen=True)
class Config:
    """All that determines a trial, but for the number of ranks: batch norm sees each rank's share."""

    optimizer: str
    lr: float
    seed: int
    epochs: int
    data: str  # "imagenet", or "generated": small images of noise
    model: str = "resnet50"
    batch: int = 256
    size: int = 224
    options: dict[str, Any] = field(default_factory=dict)
    damping: str | None = None  # d replaced: "mean" or "shuffled" of another trial's
    damping_of: str | None = None  # that trial's key
    test: bool = False  # there is none: the paper's figures are of the 50,000 validation images

    def __post_init__(self) -> None:
        registry.get(self.optimizer)
        get_model(self.model)
        if self.data not in ("imagenet", "generated"):
            raise ValueError(f"data={self.data!r}: must be 'imagenet' or 'generated'")
        check_damping(self)

    def learning_rate(self, epoch: int) -> float:
        return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2


def config_of(**options: Any) -> dict[str, Any]:
    """A trial's config, checked, without defaults."""
    return told(Config(**options))


def check(trial: dict[str, Any], data_folder: Path) -> None:
    """Raises where the images are not there."""
    if trial["data"] == "imagenet":
        for split in ("train", "val"):
            Folders(data_folder, split, size=1)


class Training:
    """A network, its optimizer and the data, on this rank."""

    def __init__(
        self, config: Config, ranks: Ranks, data_folder: Path, device: torch.device, given: Tensor | None
    ) -> None:
        if config.batch % ranks.count:
            raise LabError(f"batches of {config.batch} cannot be shared by {ranks.count} ranks")
        self.config, self.ranks, self.device = config, ranks, device
        self.train = Folders(data_folder, "train", config.size, draws=config.seed)
        self.validation = Folders(data_folder, "val", config.size)
        if self.validation.classes != self.train.classes:
            raise LabError("imagenet: the folders of train and val are of different classes")
        torch.manual_seed(config.seed)
        self.model = get_model(config.model).make(len(self.train.classes)).to(device)
        self.wrapped: nn.Module = DistributedDataParallel(self.model) if ranks.count > 1 else self.model
        self.optimizer = make_optimizer(config, self.model.parameters(), config.lr)
        self.given = None if given is None else given.to(device)
        self.taken = torch.zeros((), dtype=torch.int64, device=device)  # steps of the whole run
        self.sums = torch.zeros(3, dtype=torch.float64, device=device)  # of an epoch: loss, |g|, steps
        self.alignments: list[Tensor] = []  # s of every step
        self.row: dict[str, Any] = {}  # the last epoch's metrics

    def epoch(self, epoch: int) -> Generator[None, None, dict[str, Any]]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate(epoch)
        self.sums.zero_()
        for images, labels in _batches(self.train, self.config, epoch, self.ranks, self.device):
            self.optimizer.zero_grad()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                loss = cross_entropy(self.wrapped(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = torch.stack(torch._foreach_norm(grads)).norm()
            s = watched(self.optimizer)
            if self.given is not None:
                replace_alignment(s, self.given, self.taken)
            self.optimizer.step()
            self.alignments.append(torch.stack(s).mean() if s else norm * math.nan)
            self.sums += torch.stack([x.detach().double() for x in (loss, norm, torch.ones_like(norm))])
            self.taken += 1
            yield None
        self.row = self.metrics(epoch)
        return self.row

    def metrics(self, epoch: int) -> dict[str, Any]:
        """Of the epoch just trained, over all ranks."""
        steps = int(self.sums[-1])
        loss, norm, total = self.ranks.add(*self.sums)
        s = float(torch.stack(self.alignments[-steps:]).double().mean())  # the same on all ranks
        accuracy = _accuracy(self.model, self.validation, self.config, self.ranks, self.device)
        return row_of(epoch, self.config.learning_rate(epoch), loss / total, norm / total, s, accuracy)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "alignments": torch.stack(self.alignments),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.alignments = list(state["alignments"])
        self.taken.fill_(len(self.alignments))


def run(
    config: dict[str, Any], folder: TrialFolder, data_folder: Path, device: torch.device, save_every: float
) -> Iterator[Progress | None]:
    """Trains, from the last checkpoint where there is one; `save_every` is in seconds."""
    settings, ranks = Config(**config), Ranks(device)
    if settings.data == "generated":
        data_folder = generate(folder.path.parent.parent / "generated")
    training = Training(settings, ranks, data_folder, device, given_alignment(settings, folder))
    check_length(training.given, len(training.train) // settings.batch * settings.epochs)
    seconds = yield from by_epochs(
        training, folder, device, settings.epochs, save_every, lambda due: ranks.add(float(due))[0] > 0
    )
    keep_alignment(folder, torch.stack(training.alignments).cpu())
    result = {
        **result_of(training.row, training.model),
        "ranks": ranks.count,
        "settings": resolved(settings, training.optimizer),
    }
    folder.finish(result, seconds, device)


def _batches(
    train: Folders, settings: Config, epoch: int, ranks: Ranks, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of each batch, in the epoch's order; a last one that is not full is left out."""
    train.epoch = epoch
    generator = torch.Generator().manual_seed(settings.seed * 100003 + epoch)
    order = torch.randperm(len(train), generator=generator)
    steps = len(train) // settings.batch
    if steps == 0:
        raise LabError(f"{len(train)} images make no batch of {settings.batch}")
    shares = order[: steps * settings.batch].reshape(steps, ranks.count, -1)[:, ranks.rank]
    yield from _load(train, shares.reshape(-1), shares.shape[1], device)


def _load(
    data: Folders, indices: Tensor, batch: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    mean, std = (torch.tensor(x, device=device)[:, None, None] for x in (MEAN, STD))
    workers = 8 if device.type == "cuda" else 0
    for images, labels in DataLoader(Subset(data, indices.tolist()), batch, num_workers=workers):
        yield normalise(images.to(device), mean, std), labels.to(device)


@torch.no_grad()
def _accuracy(model: nn.Module, data: Folders, settings: Config, ranks: Ranks, device: torch.device) -> float:
    """In percent, each rank on its part of the images."""
    for buffer in model.buffers():  # each rank has its own of batch norm's; the checkpoint has rank 0's
        ranks.share(buffer)
    model.eval()
    right = torch.zeros((), dtype=torch.float64, device=device)
    mine = torch.arange(ranks.rank, len(data), ranks.count)
    for images, labels in _load(data, mine, settings.batch, device):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            right += (model(images).argmax(1) == labels).sum()
    model.train()
    return ranks.add(right)[0] * 100 / len(data)
