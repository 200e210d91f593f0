"""Training on ImageNet: a trial of the paper's table, on one process or, started by torchrun, on many.

The batch is the batch of all ranks together; each takes its share of the epoch's order. Rank 0 writes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

from tam import registry
from tam.lab.data.imagenet import Folders, generate
from tam.lab.images import Progress, normalise, told
from tam.lab.machine import machine
from tam.lab.models import get_model, parameters
from tam.lab.store import LabError, TrialFolder
from tam.optimizers.torque import TorqueOptimizer

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's channels


@dataclass(frozen=True)
class Config:
    """All that determines a trial, but for the number of ranks: batch norm sees each rank's share."""

    optimizer: str
    lr: float
    seed: int
    data: str = "imagenet"  # or "generated": small images of noise
    model: str = "resnet50"
    epochs: int = 90
    batch: int = 256
    size: int = 224
    options: dict[str, Any] = field(default_factory=dict)
    test: bool = False  # there is none: the paper's figures are of the 50,000 validation images

    def __post_init__(self) -> None:
        registry.get(self.optimizer)
        get_model(self.model)
        if self.data not in ("imagenet", "generated"):
            raise ValueError(f"data={self.data!r}: must be 'imagenet' or 'generated'")

    def learning_rate(self, epoch: int) -> float:
        return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2


def config_of(**options: Any) -> dict[str, Any]:
    """A trial's config, checked, without defaults."""
    return told(Config(**options))


class Ranks:
    """This process among those of a trial."""

    def __init__(self) -> None:
        self.many = dist.is_available() and dist.is_initialized()
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if self.many else (0, 1)

    def share(self, x: Tensor) -> None:
        if self.many:
            dist.broadcast(x, 0)

    def add(self, x: Tensor) -> Tensor:
        if self.many:
            dist.all_reduce(x)
        return x


def run(
    config: dict[str, Any],
    folder: TrialFolder,
    data_folder: Path,
    device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:
    """Trains, from the last checkpoint where there is one; `save_every` is in seconds."""
    settings, ranks = Config(**config), Ranks()
    if settings.batch % ranks.count:
        raise LabError(f"batches of {settings.batch} cannot be shared by {ranks.count} ranks")
    if settings.data == "generated":
        data_folder = generate(folder.path.parent.parent / "generated")
    train = Folders(data_folder, "train", settings.size, draws=settings.seed)
    validation = Folders(data_folder, "val", settings.size)
    if validation.classes != train.classes:
        raise LabError("imagenet: the folders of train and val are of different classes")
    torch.manual_seed(settings.seed)
    model = get_model(settings.model).make(len(train.classes)).to(device)
    wrapped: nn.Module = DistributedDataParallel(model) if ranks.many else model
    optimizer = registry.get(settings.optimizer).create(
        model.parameters(), lr=settings.lr, **settings.options
    )
    found, spent, first = folder.load(device), 0.0, 0
    if found is not None:
        first, state = found
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        spent = float(state["seconds"])
    begin = saved = time.monotonic()
    metrics: dict[str, Any] = folder.last_metrics() if first else {}
    for epoch in range(first, settings.epochs):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(epoch)
        sums = torch.zeros(4, dtype=torch.float64, device=device)  # loss, |g|, s, steps
        for images, labels in _batches(train, settings, epoch, ranks, device):
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = cross_entropy(wrapped(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.stack(torch._foreach_norm(grads)).norm()
            optimizer.step()
            s = optimizer.alignment.mean() if isinstance(optimizer, TorqueOptimizer) else norm * math.nan
            sums += torch.stack(
                [loss.detach().double(), norm.double(), s.double(), torch.ones_like(norm).double()]
            )
            yield None
        loss_, norm_, s_, steps = (ranks.add(sums) / ranks.count).tolist()
        metrics = {
            "epoch": epoch + 1, "lr": settings.learning_rate(epoch), "loss": loss_ / steps,
            "grad_norm": norm_ / steps,
            "validation": _accuracy(model, validation, settings, ranks, device),
        }  # fmt: skip
        if not math.isnan(s_):
            metrics |= {"alignment": s_ / steps, "damping": (1 + s_ / steps) / 2}
        folder.log(metrics)
        yield Progress(epoch + 1, settings.epochs, metrics)
        if not math.isfinite(metrics["loss"]):
            break
        now = time.monotonic()
        due = ranks.add(torch.tensor(float(now - saved > save_every), device=device))
        if float(due) and epoch + 1 < settings.epochs:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "seconds": spent + now - begin,
            }
            folder.save(epoch + 1, state)
            saved = now
    result = {
        "validation": metrics["validation"], "loss": metrics["loss"], "epochs": metrics["epoch"],
        "diverged": not math.isfinite(metrics["loss"]), "parameters": parameters(model),
    }  # fmt: skip
    timing = {"seconds": spent + time.monotonic() - begin, "ranks": ranks.count}
    folder.finish({**result, "timing": timing, "machine": machine(device)})


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
    return float(ranks.add(right)) * 100 / len(data)
