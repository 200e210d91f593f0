"""Training of an image classifier: a trial of the paper's section on image classification.

Data lies on the device, and so do the draws of an epoch: the order of the images, their shifts and flips.
They depend on the seed and the epoch alone, so that a trial goes on after a kill as if nothing had been, and
all arms of a seed see the same. On a GPU the whole step (augment, forward, backward, optimizer) is one CUDA
graph; on a CPU the same function runs as it is.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, pad

import tam
from tam import registry
from tam.lab.damping import (
    check_damping,
    check_length,
    given_alignment,
    keep_alignment,
    replace_alignment,
    watched,
)
from tam.lab.data import ImageData, files, find, load, split
from tam.lab.graphed import Graphed
from tam.lab.making import load_optimizer, make_network, make_optimizer
from tam.lab.models import get_model, parameters
from tam.lab.store import LabError, TrialFolder
from tam.lab.trial import Progress, by_epochs, resolved, told
from tam.step.rule import damping_of

ALIGNMENT = 2  # the columns of what is seen of a step: loss, |g|, s
BEFORE = 10  # steps before a switch whose mean length the first one after it is compared with


@dataclass(frozen=True)
class Config:
    """All that determines a trial. `options` are the optimizer's besides lr."""

    data: str
    model: str
    optimizer: str  # of the registry
    lr: float
    seed: int
    epochs: int
    batch: int = 128
    options: dict[str, Any] = field(default_factory=dict)
    schedule: str = "cosine"  # or "constant"; or "tail": constant, and a cosine to 0 in the last fifth
    halve_at: int | None = None  # the epoch from which lr is half of what the schedule says
    sgdm_from: int | None = None  # the epoch from which SGDM is at work, at the effective lr TAM had
    buffers: Literal["keep", "rescale"] = "keep"  # what becomes of the momentum at the switch
    keep_at: tuple[int, ...] = ()  # epochs after which the state is kept, for copies to begin from
    order: int = 0  # of the batches: copies have others
    held_out: int = 10000  # images to validate on
    augment: bool = True  # random crops after padding by an eighth of the height, and flips
    grouped: bool = False  # a parameter group for each part of the network
    decay_in_cosine: bool = False  # weight decay as part of the gradient the cosine is taken of
    damping: str | None = None  # TAM's d replaced: "mean" or "shuffled" of another trial's
    damping_of: str | None = None  # that trial's key
    test: bool = False  # whether the test images are read, once, at the end
    limit: int | None = None  # train on so many images only
    resize: int | None = None  # to so many pixels a side, after the crop
    checkpoint: str | None = None  # to begin from: FILE#DIGEST with a state dict, or timm:NAME

    def __post_init__(self) -> None:
        registry.get(self.optimizer)
        get_model(self.model)
        if min(self.epochs, self.batch, self.held_out) < 1:
            raise ValueError("epochs, batch and held_out must be at least 1")
        if self.schedule not in ("cosine", "constant", "tail"):
            raise ValueError(f"schedule={self.schedule!r}: must be 'cosine', 'constant' or 'tail'")
        if self.sgdm_from is not None and (not 0 < self.sgdm_from < self.epochs or self.optimizer != "tam"):
            raise ValueError("sgdm_from must be an epoch of TAM's run")
        if self.buffers not in ("keep", "rescale") or (self.buffers != "keep" and self.sgdm_from is None):
            raise ValueError(f"buffers={self.buffers!r}: must be 'keep' or, with sgdm_from, 'rescale'")
        if self.sgdm_from is not None and self.decay_in_cosine:
            raise ValueError("sgdm_from and decay_in_cosine do not go together")
        if any(not 0 < epoch < self.epochs for epoch in self.keep_at):
            raise ValueError(f"keep_at={self.keep_at}: must be epochs before the last")
        check_damping(self)

    def learning_rate(self, epoch: int) -> float:
        """Of an epoch, the first being 0."""
        lr = self.lr / 2 if self.halve_at is not None and epoch >= self.halve_at else self.lr
        begin = {"cosine": 0, "constant": self.epochs, "tail": self.epochs - self.epochs // 5}[self.schedule]
        if epoch < begin:
            return lr
        return lr * (1 + math.cos(math.pi * (epoch - begin) / (self.epochs - begin))) / 2


@cache
def _data(name: str, folder: Path, device: torch.device) -> tuple[ImageData, Tensor, Tensor]:
    """Shared by all trials of a process."""
    data = load(name, folder)
    return data, data.train[0].to(device), data.train[1].to(device)


class Draws:
    """The batches of an epoch, in tensors that stay where they are."""

    def __init__(self, config: Config, indices: Tensor, height: int, device: torch.device) -> None:
        self.config, self.indices, self.pad = config, indices, padding(height)
        n = len(indices)
        self.order = torch.empty(n, dtype=torch.int64, device=device)
        self.shift = torch.full((n, 2), self.pad, dtype=torch.int64, device=device)
        self.flip = torch.zeros(n, dtype=torch.bool, device=device)

    def epoch(self, epoch: int) -> None:
        n = len(self.indices)
        seed = self.config.seed * 100003 + epoch + self.config.order * 50_000_017
        generator = torch.Generator().manual_seed(seed)
        self.order.copy_(self.indices[torch.randperm(n, generator=generator)])
        if self.config.augment:
            self.shift.copy_(torch.randint(0, 2 * self.pad + 1, (n, 2), generator=generator))
            self.flip.copy_(torch.rand(n, generator=generator) < 0.5)


def padding(height: int) -> int:
    """4 pixels for images of 32 x 32."""
    return height // 8


def prepare(images: Tensor, shift: Tensor, flip: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Crops of the padded images, some of them mirrored, normalised."""
    n, channels, height, width = images.shape
    x = pad(normalise(images, mean, std), (padding(height),) * 4)
    rows = shift[:, :1] + torch.arange(height, device=x.device)
    columns = shift[:, 1:] + torch.arange(width, device=x.device)
    columns = torch.where(flip[:, None], columns.flip(1), columns)
    batch = torch.arange(n, device=x.device)[:, None, None, None]
    channel = torch.arange(channels, device=x.device)[None, :, None, None]
    return x[batch, channel, rows[:, None, :, None], columns[:, None, None, :]]


def normalise(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    return (images.to(mean.dtype) / 255 - mean) / std


class Training:
    """A network, its optimizer and one step of it."""

    def __init__(self, config: Config, data_folder: Path, device: torch.device, given: Tensor | None) -> None:
        self.config, self.device = config, device
        self.data, self.images, self.labels = _data(config.data, data_folder, device)
        train, self.validation = split(len(self.labels), config.held_out, config.seed)
        self.draws = Draws(config, train[: config.limit], self.images.shape[2], device)
        self.steps = len(self.draws.indices) // config.batch
        if self.steps == 0:
            raise LabError(f"{len(self.draws.indices)} images make no batch of {config.batch}")
        self.model, self.dtype = make_network(config, self.data.classes, device)
        self.mean, self.std = (
            torch.tensor(x, device=device)[:, None, None] for x in (self.data.mean, self.data.std)
        )
        self.lr = torch.tensor(config.lr, device=device)
        self.optimizer = self._make_optimizer()
        self.decay = 0.0
        if config.decay_in_cosine:
            for group in self.optimizer.param_groups:
                self.decay, group["weight_decay"] = group["weight_decay"], 0.0
        self.given = None if given is None else given.to(device)
        self.position = torch.zeros((), dtype=torch.int64, device=device)  # the first row of the batch
        self.taken = torch.zeros((), dtype=torch.int64, device=device)  # steps of the whole run
        self.lanes = torch.arange(config.batch, device=device)
        self.seen = torch.zeros(self.steps, 3, device=device)
        self.loss_of = self._loss_of
        if device.type == "cuda":
            self.loss_of = torch.compile(self._loss_of, dynamic=False)
        self.step = Graphed(self._step, device)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        params: Any = list(self.model.parameters())
        if self.config.grouped:
            parts: dict[str, list[Tensor]] = {}  # "stem.0", "blocks.3", "head.weight", …
            for name, p in self.model.named_parameters():
                parts.setdefault(".".join(name.split(".")[:2]), []).append(p)
            params = [{"params": part} for part in parts.values()]
        first = make_optimizer(self.config, params, self.lr, graphed=self.device.type == "cuda")
        if self.config.sgdm_from is None:
            return first
        # `begin` switches between two steps; Warmup itself would do it in one, which may be the captured one.
        steps = self.config.sgdm_from * self.steps + 1
        return tam.Warmup(first, self._sgdm, steps, buffers=self.config.buffers)

    def _sgdm(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """What follows TAM: SGDM at half its lr."""
        decay = self.config.options.get("weight_decay", 0.0)
        fused = True if self.device.type == "cuda" else None
        return torch.optim.SGD(groups, lr=self.lr / 2, momentum=0.9, weight_decay=decay, fused=fused)

    def begin(self, epoch: int) -> None:
        """Its lr, its batches and, in a warm-up, its optimizer."""
        self.lr.fill_(self.config.learning_rate(epoch))
        self.draws.epoch(epoch)
        self.position.zero_()
        torch.manual_seed(self.config.seed * 100003 + epoch)  # a network's own draws
        if epoch == self.config.sgdm_from:
            assert isinstance(self.optimizer, tam.Warmup)
            self.optimizer.switch()  # a graph does not count its steps
            self.step.forget()

    def _loss_of(self, images: Tensor, labels: Tensor, shift: Tensor, flip: Tensor) -> Tensor:
        x = self._resized(prepare(images, shift, flip, self.mean, self.std))
        if self.device.type == "cuda":
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is torch.bfloat16):
            return cross_entropy(self.model(x), labels)

    def _resized(self, x: Tensor) -> Tensor:
        size = self.config.resize
        return x if size is None else interpolate(x, (size, size), mode="bilinear", antialias=True)

    def _step(self) -> None:
        rows = self.position + self.lanes
        chosen = self.draws.order[rows]
        for p in self.model.parameters():
            p.grad = None
        loss = self.loss_of(
            self.images[chosen], self.labels[chosen], self.draws.shift[rows], self.draws.flip[rows]
        )
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            params: list[Tensor] = list(self.model.parameters())
            grads = [p.grad for p in params if p.grad is not None]
            norm = torch.stack(torch._foreach_norm(grads)).norm()
            if self.decay:
                torch._foreach_add_(grads, params, alpha=self.decay)
            s = watched(self.optimizer)
            if self.given is not None and s:
                replace_alignment(s, self.given, self.taken)
        self.optimizer.step()
        with torch.no_grad():
            now = torch.div(self.position, self.config.batch, rounding_mode="floor").reshape(1)
            mean = torch.stack(s).mean() if s else torch.full((), math.nan, device=self.device)
            row = [loss.detach().float(), norm, mean]
            self.seen.index_copy_(0, now, torch.stack(row).reshape(1, 3))
            self.position += self.config.batch
            self.taken += 1

    @torch.no_grad()
    def accuracy(self, images: Tensor, labels: Tensor) -> Tensor:
        """In percent, in double precision: thirds of a point are not to differ in their last digits."""
        self.model.eval()
        right = torch.zeros((), dtype=torch.float64, device=self.device)
        for x, y in zip(torch.split(images, 2000), torch.split(labels, 2000), strict=True):
            x = self._resized(normalise(x.to(self.device), self.mean, self.std))
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is torch.bfloat16):
                right += (self.model(x).argmax(1) == y.to(self.device)).sum()
        self.model.train()
        return right * 100 / len(labels)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "taken": self.taken,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.taken.copy_(state["taken"])


class Run:
    """A training, what was seen of its steps, and the states it leaves for copies."""

    def __init__(self, training: Training, folder: TrialFolder) -> None:
        self.training, self.folder = training, folder
        self.steps: list[Tensor] = []  # what was seen of every step, by epoch

    def epoch(self, epoch: int) -> Generator[None, None, dict[str, Any]]:
        training, config = self.training, self.training.config
        training.begin(epoch)
        recorded, lengths = self._at_the_switch(epoch), []
        for k in range(training.steps):
            if k in recorded:
                lengths.append(self._recorded_step())
            else:
                training.step()
            yield None
        accuracy = training.accuracy(
            training.images[training.validation], training.labels[training.validation]
        )
        figures = torch.cat([training.seen.double().reshape(-1), accuracy.reshape(1)])
        host = figures.to("cpu", non_blocking=True)
        yield from _wait(training.device)
        seen = host[:-1].reshape(-1, 3).float()
        self.steps.append(seen)
        if epoch + 1 in config.keep_at:
            self.folder.write(state_file(epoch + 1), training.state_dict())
        loss, norm, s = seen.double().mean(0).tolist()
        lr = config.learning_rate(epoch)
        if config.sgdm_from is not None and epoch >= config.sgdm_from:
            lr /= 2  # SGDM's
        row = row_of(epoch, lr, loss, norm, s, float(host[-1]))
        return {**row, "update_norm": fmean(lengths)} if lengths else row

    def _at_the_switch(self, epoch: int) -> range:
        """The last steps before a warm-up's switch, or the first one after it; else none."""
        steps, switch = self.training.steps, self.training.config.sgdm_from
        if switch == epoch + 1:
            return range(max(0, steps - BEFORE), steps)
        return range(1 if switch == epoch else 0)

    def _recorded_step(self) -> float:
        """A step outside of the graph, which runs no hooks; its length."""
        with tam.Recorder(self.training.optimizer, quantities="update_norm") as recorder:
            self.training.step.plainly()
        return float(recorder["update_norm"])

    def state_dict(self) -> dict[str, Any]:
        return {"training": self.training.state_dict(), "steps": torch.cat(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.training.load_state_dict(state["training"])
        self.steps = [state["steps"].cpu()]


def run(
    config: dict[str, Any],
    folder: TrialFolder,
    data_folder: Path,
    device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:
    """Trains, from the last checkpoint where there is one; `save_every` is in seconds.

    Yields after every step, and Progress after an epoch.
    """
    settings = Config(**config)
    training = Training(settings, data_folder, device, given_alignment(settings, folder))
    measured = training.steps * (settings.sgdm_from or settings.epochs)
    check_length(training.given, measured)
    one = Run(training, folder)
    seconds = yield from by_epochs(one, folder, device, settings.epochs, save_every)
    keep_alignment(folder, torch.cat(one.steps)[:measured, ALIGNMENT])
    result = result_of(folder.rows[-1], training.model)
    result["settings"] = resolved(settings, training.optimizer)
    if settings.test:
        result["test"] = float(training.accuracy(*training.data.test))
    folder.finish(result, seconds, device)


def state_file(epoch: int) -> str:
    """Where the state after an epoch is kept."""
    return f"state-{epoch:03d}.pt"


def row_of(epoch: int, lr: float, loss: float, norm: float, s: float, validation: float) -> dict[str, Any]:
    """The metrics of an epoch, the first being 0; s is nan where there is none."""
    row = {"epoch": epoch + 1, "lr": lr, "loss": loss, "grad_norm": norm, "validation": validation}
    return row if math.isnan(s) else {**row, "alignment": s, "damping": damping_of(s)}


def result_of(metrics: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A trial's result from its last epoch's metrics."""
    return {
        "validation": metrics["validation"], "loss": metrics["loss"], "epochs": metrics["epoch"],
        "diverged": not math.isfinite(metrics["loss"]), "parameters": parameters(model),
    }  # fmt: skip


def _wait(device: torch.device) -> Iterator[None]:
    """Lets others go on until what was queued is done."""
    if device.type == "cuda":
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        while not event.query():
            yield None


def check(trial: dict[str, Any], data_folder: Path) -> None:
    """Raises where what a trial needs is not there."""
    config = Config(**trial)
    files.check(config.data, find(config.data, data_folder), data_folder)
    if config.model == "vit" and importlib.util.find_spec("timm") is None:
        raise LabError("the network vit needs the package timm")


def config_of(**options: Any) -> dict[str, Any]:
    """A trial's config, checked. Defaults are left out, so that a new one does not rename old trials."""
    return told(Config(**options))
