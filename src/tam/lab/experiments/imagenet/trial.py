"""Training on ImageNet, on one process or, started by torchrun, on many.

The batch size is that of all ranks together. Each rank takes its share of the epoch's order. Rank 0 writes.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError
from tam.lab.core.store import TrialFolder
from tam.lab.data.imagenet import Folders, generate
from tam.lab.engines.torchrun import Ranks
from tam.lab.models import get_model
from tam.lab.training.augmentation import normalize, per_channel
from tam.lab.training.damping_control import load_source_alignment
from tam.lab.training.factory import make_optimizer
from tam.lab.training.loop import NetworkLearner, StepRecorder, train_network
from tam.lab.training.metrics import autocast, classifier_metrics, classifier_result, count_correct, grad_norm

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    """Everything that determines a trial except the number of ranks: batch norm sees each rank's share."""

    data: str  # "imagenet", or "generated": small images of noise
    model: str = "resnet50"
    batch: int = 256
    size: int = 224

    def __post_init__(self) -> None:
        super().__post_init__()
        get_model(self.model)
        if self.data not in ("imagenet", "generated"):
            raise ValueError(f"data must be 'imagenet' or 'generated', got {self.data!r}")

    def learning_rate(self, epoch: int) -> float:
        return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2


def check(config: Config, data_folder: Path) -> None:
    """Raise LabError if the images are missing."""
    if config.data == "imagenet":
        for split in ("train", "val"):
            Folders(data_folder, split, size=1)


class Training(NetworkLearner):
    """A network, its data and its optimizer, on this rank."""

    def __init__(self, config: Config, folder: TrialFolder, data_folder: Path, device: torch.device) -> None:
        self.config, self.device, self.ranks = config, device, Ranks(device)
        if config.batch % self.ranks.count:
            raise LabError(f"batches of {config.batch} cannot be shared by {self.ranks.count} ranks")
        if config.data == "generated":
            data_folder = generate(folder.path.parent.parent / "generated")
        self.train = Folders(data_folder, "train", config.size, draws=config.seed)
        self.validation = Folders(data_folder, "val", config.size)
        if self.validation.classes != self.train.classes:
            raise LabError("imagenet: the folders of train and val hold different classes")
        self.steps = len(self.train) // config.batch  # per epoch
        if self.steps == 0:
            raise LabError(f"{len(self.train)} images make no batch of {config.batch}")
        torch.manual_seed(config.seed)
        self.model = get_model(config.model).make(len(self.train.classes)).to(device)
        self.parallel = DistributedDataParallel(self.model) if self.ranks.count > 1 else self.model
        self.optimizer = make_optimizer(config, self.model.parameters(), config.lr)
        steps, source = self.steps * config.epochs, load_source_alignment(config, folder, self.optimizer)
        self.recorder = StepRecorder(steps, device, source, source_name=config.damping_of)

    def epoch(self, epoch: int) -> Generator[None, None, dict[str, Any]]:
        lr = self.config.learning_rate(epoch)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)  # of loss, |g| and steps
        self.train.epoch = epoch
        generator = torch.Generator().manual_seed(self.config.seed * 100003 + epoch)
        order = torch.randperm(len(self.train), generator=generator)[: self.steps * self.config.batch]
        own_share = order.reshape(self.steps, self.ranks.count, -1)[:, self.ranks.rank]
        for images, labels in self._load(self.train, own_share.reshape(-1), own_share.shape[1]):
            self.optimizer.zero_grad()
            with autocast(self.device):
                loss = cross_entropy(self.parallel(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            norm = grad_norm(self.model)
            self.recorder.step(self.optimizer)
            sums += torch.stack([x.detach().double() for x in (loss, norm, torch.ones_like(norm))])
            yield None
        loss_sum, norm_sum, count = self.ranks.add(*sums)
        # The same on all ranks.
        alignment = self.recorder.alignment[epoch * self.steps : (epoch + 1) * self.steps].double().mean()
        means = (loss_sum / count, norm_sum / count, float(alignment))
        return classifier_metrics(epoch, lr, *means, self.accuracy())

    def _load(self, data: Folders, indices: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        mean, std = per_channel(MEAN, self.device), per_channel(STD, self.device)
        workers = 8 if self.device.type == "cuda" else 0
        for images, labels in DataLoader(Subset(data, indices.tolist()), batch, num_workers=workers):
            yield normalize(images.to(self.device), mean, std), labels.to(self.device)

    def accuracy(self) -> float:
        """Return the validation accuracy in percent. Each rank evaluates its part of the images."""
        for buffer in self.model.buffers():  # batch norm's differ by rank; the checkpoint has rank 0's
            self.ranks.share(buffer)
        own_indices = torch.arange(self.ranks.rank, len(self.validation), self.ranks.count)
        batches = self._load(self.validation, own_indices, self.config.batch)
        correct = count_correct(self.model, batches, self.device)
        return self.ranks.add(correct)[0] * 100 / len(self.validation)

    def agree(self, is_due: bool) -> bool:
        return self.ranks.add(float(is_due))[0] > 0

    def result(self, metrics: list[dict[str, Any]]) -> dict[str, Any]:
        return {**classifier_result(metrics[-1], self.model), "ranks": self.ranks.count}


run = partial(train_network, Training)  # on all ranks
