"""Training of an image classifier: a trial of the paper's section on image classification.

The data set is on the device, and so are the draws of an epoch: the order of the images, crops and flips.
They depend on the seed and the epoch alone. So a killed trial resumes with the same bits, and all variants of
a seed see the same batches. On a GPU the whole step (augmentation to optimizer) is one CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate

import tam
from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError, require
from tam.lab.core.store import TrialFolder
from tam.lab.data import ImageData, load, split
from tam.lab.models import get_model
from tam.lab.training.augmentation import BatchDraws, augment, normalize, per_channel
from tam.lab.training.cuda_graph import CapturedStep
from tam.lab.training.damping_control import hold_momentum_factor, load_source_alignment
from tam.lab.training.factory import make_network, make_optimizer
from tam.lab.training.loop import NetworkLearner, StepRecorder, train_network
from tam.lab.training.metrics import autocast, classifier_metrics, classifier_result, count_correct, grad_norm

STEPS_BEFORE_SWITCH = 10  # whose mean update norm the first step after a switch is compared with


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    data: str
    model: str
    batch: int = 128
    schedule: str = "cosine"  # or "constant", or "tail": constant, then a cosine to 0 over the last fifth
    halve_at: int | None = None  # epoch from which the lr is half of the schedule's
    sgdm_from: int | None = None  # epoch from which SGDM replaces TAM, at the same effective lr
    buffers: Literal["keep", "rescale"] = "keep"  # what happens to the momentum at this switch
    keep_at: tuple[int, ...] = ()  # epochs after which the state is written, for forks
    order: int = 0  # number of the batch order: each fork has its own
    held_out: int = 10000  # number of validation images
    augment: bool = True  # random crops, padded by an eighth of the height, and flips
    grouped: bool = False  # one parameter group per part of the network
    decay_in_cosine: bool = False  # weight decay is part of the gradient that the cosine uses
    limit: int | None = None  # number of training images
    resize: int | None = None  # side of the images in pixels, after the crop
    checkpoint: str | None = None  # pretrained weights: FILE#DIGEST with a state dict, or timm:NAME

    def __post_init__(self) -> None:
        super().__post_init__()
        get_model(self.model)
        if min(self.epochs, self.batch, self.held_out) < 1:
            raise ValueError("epochs, batch and held_out must be at least 1")
        if self.schedule not in ("cosine", "constant", "tail"):
            raise ValueError(f"schedule must be 'cosine', 'constant' or 'tail', got {self.schedule!r}")
        if self.sgdm_from is not None and (not 0 < self.sgdm_from < self.epochs or self.optimizer != "tam"):
            raise ValueError("sgdm_from must be an epoch of a run with TAM, after the first")
        if self.buffers not in ("keep", "rescale") or (self.buffers != "keep" and self.sgdm_from is None):
            raise ValueError(f"buffers must be 'keep' or, with sgdm_from, 'rescale', got {self.buffers!r}")
        if self.sgdm_from is not None and self.decay_in_cosine:
            raise ValueError("sgdm_from and decay_in_cosine cannot be combined")
        if any(not 0 < epoch < self.epochs for epoch in self.keep_at):
            raise ValueError(f"keep_at must hold epochs before the last, got {self.keep_at}")

    def learning_rate(self, epoch: int) -> float:
        """Return the lr of the schedule in an epoch, counted from 0."""
        lr = self.lr / 2 if self.halve_at is not None and epoch >= self.halve_at else self.lr
        begin = {"cosine": 0, "constant": self.epochs, "tail": self.epochs - self.epochs // 5}[self.schedule]
        if epoch < begin:
            return lr
        return lr * (1 + math.cos(math.pi * (epoch - begin) / (self.epochs - begin))) / 2


def check(config: Config, data_folder: Path) -> None:
    """Raise LabError if a package that a trial needs is missing."""
    if config.model == "vit":
        require("the model vit", "timm")


@cache
def _load_data(name: str, folder: Path, device: torch.device) -> tuple[ImageData, Tensor, Tensor]:
    """Return a data set with its training images on the device. All trials of a process share it."""
    data = load(name, folder)
    return data, data.train[0].to(device), data.train[1].to(device)


class Training(NetworkLearner):
    """A network, its data and its optimizer."""

    is_compiled: ClassVar[bool] = True  # on a GPU

    def __init__(self, config: Config, folder: TrialFolder, data_folder: Path, device: torch.device) -> None:
        self.config, self.folder, self.device = config, folder, device
        self.data, self.images, self.labels = _load_data(config.data, data_folder, device)
        train, self.validation = split(len(self.labels), config.held_out, config.seed)
        self.train = train[: config.limit]
        self.steps = len(self.train) // config.batch  # per epoch
        if self.steps == 0:
            raise LabError(f"{len(self.train)} images make no batch of {config.batch}")
        self.draws = BatchDraws(len(self.train), config.batch, self.images.shape[2], device, config.augment)
        self.model = make_network(config.model, self.data.classes, config.seed, config.checkpoint, device)
        self.mean, self.std = per_channel(self.data.mean, device), per_channel(self.data.std, device)
        self.lr = torch.tensor(config.lr, device=device)  # on the device: a CUDA graph reads it
        self.optimizer = self._make_optimizer()
        self.decay = 0.0  # that is added to the gradient before the step
        if config.decay_in_cosine:
            for group in self.optimizer.param_groups:
                self.decay, group["weight_decay"] = group["weight_decay"], 0.0
        steps, source = self.steps * config.epochs, load_source_alignment(config, folder, self.optimizer)
        hold_momentum_factor(config, folder, self.optimizer)
        aligned_steps = steps if config.sgdm_from is None else self.steps * config.sgdm_from
        self.recorder = StepRecorder(
            steps, device, source, source_name=config.damping_of, aligned_steps=aligned_steps, measurements=2
        )
        self.loss = self._loss
        if device.type == "cuda" and self.is_compiled:
            self.loss = torch.compile(self._loss, dynamic=False)
        self.step = CapturedStep(self._step, device)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        params: Any = list(self.model.parameters())
        if self.config.grouped:  # by "stem.0", "blocks.3", "head.weight" ...
            parts = groupby(self.model.named_parameters(), key=lambda named: named[0].split(".")[:2])
            params = [{"params": [p for _, p in part]} for _, part in parts]
        captured = self.device.type == "cuda"
        first = make_optimizer(self.config, params, self.lr, captured=captured)
        if self.config.sgdm_from is None:
            return first
        decay, fused = self.config.options.get("weight_decay", 0.0), captured or None

        def make_sgdm(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
            return torch.optim.SGD(groups, lr=self.lr / 2, momentum=0.9, weight_decay=decay, fused=fused)

        # `begin` switches before this step: Warmup itself would switch in a step, which may be captured.
        steps = self.config.sgdm_from * self.steps + 1
        return tam.Warmup(first, make_sgdm, steps, buffers=self.config.buffers)

    def begin(self, epoch: int) -> None:
        """Set the lr and draw the batches of an epoch. In a warm-up, switch the optimizer."""
        config = self.config
        self.lr.fill_(config.learning_rate(epoch))
        self.draws.draw(self.train, config.seed * 100003 + epoch + config.order * 50_000_017)
        self.recorder.continue_at(epoch * self.steps)
        torch.manual_seed(config.seed * 100003 + epoch)  # for what the network draws
        if epoch == config.sgdm_from:
            assert isinstance(self.optimizer, tam.Warmup)
            self.optimizer.switch()  # a CUDA graph does not count its steps
            self.step.reset()

    def _loss(self, images: Tensor, labels: Tensor, shifts: Tensor, flips: Tensor) -> Tensor:
        x = self._resize(augment(images, shifts, flips, self.mean, self.std))
        if self.device.type == "cuda":
            x = x.contiguous(memory_format=torch.channels_last)
        with autocast(self.device):
            return cross_entropy(self.model(x), labels)

    def _resize(self, x: Tensor) -> Tensor:
        size = self.config.resize
        return x if size is None else interpolate(x, (size, size), mode="bilinear", antialias=True)

    def _step(self) -> None:
        rows, shifts, flips = self.draws.next_batch()
        self.model.zero_grad()
        loss = self.loss(self.images[rows], self.labels[rows], shifts, flips)
        loss.backward()  # type: ignore[no-untyped-call]
        self.recorder.step(self.optimizer, loss, self.prepare_gradients())

    def prepare_gradients(self) -> Tensor:
        """Return the norm of the gradients. Then change them as the config says."""
        norm = grad_norm(self.model)
        if self.decay:
            params: list[Tensor] = list(self.model.parameters())
            grads = [p.grad for p in params if p.grad is not None]
            with torch.no_grad():
                torch._foreach_add_(grads, params, alpha=self.decay)
        return norm

    def measured(self, epoch: int) -> Tensor:
        """Return loss, gradient norm and s of an epoch's steps, one row per step, on the device."""
        return self.recorder.values[epoch * self.steps : (epoch + 1) * self.steps]

    def epoch(self, epoch: int) -> Generator[None, None, dict[str, Any]]:
        config = self.config
        self.begin(epoch)
        update_norms, measured_steps = [], range(0)  # the last ones before a switch, the first one after it
        if config.sgdm_from == epoch + 1:
            measured_steps = range(self.steps - STEPS_BEFORE_SWITCH, self.steps)
        elif config.sgdm_from == epoch:
            measured_steps = range(1)
        for step in range(self.steps):
            if step in measured_steps:
                with tam.Recorder(self.optimizer, quantities="update_norm") as recorder:
                    self.step.run_eagerly()  # hooks do not run in a CUDA graph
                update_norms.append(float(recorder["update_norm"]))
            else:
                self.step()
            yield None
        figures = self.validate()
        measured = torch.cat([self.measured(epoch).double().reshape(-1), torch.stack([*figures.values()])])
        on_host = measured.to("cpu", non_blocking=True)
        if self.device.type == "cuda":  # let other trials run until the device has done what was queued
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            while not event.query():
                yield None
        if epoch + 1 in config.keep_at:
            self.folder.write(state_file(epoch + 1), self.state_dict())
        count = 3 * self.steps
        loss, norm, alignment = on_host[:count].reshape(-1, 3).mean(0).tolist()
        figure_by_name = dict(zip(figures, on_host[count:].tolist(), strict=True))
        lr = config.learning_rate(epoch)
        if config.sgdm_from is not None and epoch >= config.sgdm_from:
            lr /= 2  # SGDM's
        row = classifier_metrics(epoch, lr, loss, norm, alignment, figure_by_name["validation"])
        row |= figure_by_name
        return {**row, "update_norm": fmean(update_norms)} if update_norms else row

    def validate(self) -> dict[str, Tensor]:
        """Return figures of the validation images by name, on the device, in float64."""
        return {"validation": self.accuracy(*self.validation_set())}

    def validation_set(self) -> tuple[Tensor, Tensor]:
        """Return the images held out of training, and their labels."""
        return self.images[self.validation], self.labels[self.validation]

    def accuracy(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the accuracy in percent, on the device."""
        return count_correct(self.model, self.batches(images, labels), self.device) * 100 / len(labels)

    def batches(self, images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches to evaluate the network on, on the device."""
        for x, y in zip(torch.split(images, 2000), torch.split(labels, 2000), strict=True):
            yield self._resize(normalize(x.to(self.device), self.mean, self.std)), y.to(self.device)

    def result(self, metrics: list[dict[str, Any]]) -> dict[str, Any]:
        result = classifier_result(metrics[-1], self.model)
        return {**result, "test": float(self.accuracy(*self.data.test))} if self.config.test else result


run = partial(train_network, Training)


def state_file(epoch: int) -> str:
    """Return the name of the file with the state after an epoch."""
    return f"state-{epoch:03d}.pt"
