"""Continual learning: one network learns one experience after the other, naively or without forgetting.

After each experience it is tested on all of them. Learning without Forgetting (Li and Hoiem 2017) adds a term
to the loss: how far the outputs for the new images are from those of the network before the experience.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, softmax

from tam.lab.core.config import TrialConfig
from tam.lab.core.errors import LabError
from tam.lab.core.store import TrialFolder
from tam.lab.data import moments, streams
from tam.lab.models import get_model
from tam.lab.training.augmentation import BatchDraws, augment, normalize, per_channel
from tam.lab.training.cuda_graph import CapturedStep
from tam.lab.training.damping_control import load_source_alignment
from tam.lab.training.factory import make_network, make_optimizer
from tam.lab.training.loop import NetworkLearner, StepRecorder, train_network
from tam.lab.training.metrics import autocast, classifier_result, count_correct

TEMPERATURE = 2.0  # of the outputs that LwF compares


@dataclass(frozen=True, kw_only=True)
class Config(TrialConfig):
    unit: ClassVar[str] = "experience"
    stream: str  # "clear", or a data set that drifts
    model: str
    method: str = "naive"  # or "lwf"
    strength: float = 1.0  # of LwF's term
    passes: int = 5  # through an experience
    batch: int = 64
    size: int = 224  # of CLEAR's images, in pixels
    checkpoint: str | None = None  # pretrained weights: FILE#DIGEST with a state dict, or timm:NAME

    def __post_init__(self) -> None:
        super().__post_init__()
        get_model(self.model)
        if self.method not in ("naive", "lwf"):
            raise ValueError(f"method must be 'naive' or 'lwf', got {self.method!r}")
        if min(self.epochs, self.passes, self.batch) < 1 or self.strength < 0:
            raise ValueError("epochs, passes and batch must be at least 1, strength must not be negative")


@cache
def _load_stream(
    name: str, size: int, seed: int, experiences: int, folder: Path, device: torch.device
) -> tuple[streams.Stream, Tensor, Tensor]:
    """Return a stream with its images on the device. All trials of a process and seed share it."""
    if name == "clear":
        stream = streams.clear(folder, size, seed)
    else:
        stream = streams.drifting(name, folder, seed, experiences)
    if experiences > len(stream):
        raise LabError(f"CLEAR has {len(stream)} experiences, not {experiences}")
    return stream, stream.images.to(device), stream.labels.to(device)


def distillation_loss(outputs: Tensor, old_outputs: Tensor) -> Tensor:
    """Return LwF's term: the batch mean of the divergence from the old softened outputs, in nats."""
    old, new = old_outputs / TEMPERATURE, outputs / TEMPERATURE
    return (softmax(old, 1) * (log_softmax(old, 1) - log_softmax(new, 1))).sum(1).mean()


class Learner(NetworkLearner):
    """A network, its copy from before the experience, its data and its optimizer."""

    def __init__(self, config: Config, folder: TrialFolder, data_folder: Path, device: torch.device) -> None:
        self.config, self.device = config, device
        self.stream, self.images, self.labels = _load_stream(
            config.stream, config.size, config.seed, config.epochs, data_folder, device
        )
        size = len(self.stream.train[0])
        self.steps = size // config.batch  # per pass
        if self.steps == 0:
            raise LabError(f"{size} images make no batch of {config.batch}")
        self.draws = BatchDraws(size, config.batch, self.images.shape[2], device)
        self.model = make_network(config.model, self.stream.classes, config.seed, config.checkpoint, device)
        self.old_model: nn.Module | None = None  # from before the experience, for LwF
        first_images = self.stream.images[self.stream.train[0]]  # later ones are not known at the start
        self.mean, self.std = (per_channel(values, device) for values in moments(first_images))
        self.lr = torch.tensor(config.lr, device=device)
        captured = device.type == "cuda"
        self.optimizer = make_optimizer(config, self.model.parameters(), self.lr, captured=captured)
        self.experience_steps = self.steps * config.passes
        steps, source = (
            self.experience_steps * config.epochs,
            load_source_alignment(config, folder, self.optimizer),
        )
        self.recorder = StepRecorder(steps, device, source, source_name=config.damping_of, measurements=1)
        self.step = CapturedStep(self._step, device)
        self.evaluated = self.stream.test if config.test else self.stream.validation

    def _step(self) -> None:
        rows, shifts, flips = self.draws.next_batch()
        self.model.zero_grad()
        x = augment(self.images[rows], shifts, flips, self.mean, self.std)
        with autocast(self.device):
            outputs = self.model(x)
            loss = cross_entropy(outputs, self.labels[rows])
            if self.old_model is not None:
                distance = distillation_loss(outputs.float(), self.old_model(x).float())
                loss = loss + self.config.strength * distance
        loss.backward()  # type: ignore[no-untyped-call]
        self.recorder.step(self.optimizer, loss)

    def epoch(self, experience: int) -> Generator[None, None, dict[str, Any]]:
        """Learn an experience, then test on all."""
        if self.config.method == "lwf" and experience:
            if self.old_model is None:
                self.old_model = copy.deepcopy(self.model).eval().requires_grad_(False)
                self.step.reset()
            self.old_model.load_state_dict(self.model.state_dict())
        for pass_number in range(self.config.passes):
            seed = (self.config.seed * 1009 + experience) * 1009 + pass_number
            self.draws.draw(self.stream.train[experience], seed)
            torch.manual_seed(seed)  # for what the network draws
            for _ in range(self.steps):
                self.step()
                yield None
        first = experience * self.experience_steps
        values = self.recorder.values[first : first + self.experience_steps].to("cpu", copy=True)
        loss, alignment = values.double().mean(0).tolist()
        accuracies = [self.accuracy(indices) for indices in self.evaluated[: self.config.epochs]]
        row: dict[str, Any] = {"epoch": experience + 1, "loss": loss, "accuracies": accuracies}
        row["average"] = mean(accuracies[: experience + 1])  # of the experiences so far
        return row if math.isnan(alignment) else {**row, "alignment": alignment}

    def accuracy(self, indices: Tensor) -> float:
        """Return the accuracy on these images in percent."""
        batches = (
            (normalize(self.images[rows], self.mean, self.std), self.labels[rows])
            for rows in torch.split(indices.to(self.device), 1000)
        )
        return 100 * float(count_correct(self.model, batches, self.device)) / len(indices)

    def result(self, metrics: list[dict[str, Any]]) -> dict[str, Any]:
        matrix = [row["accuracies"] for row in metrics]
        figures = {"average": mean(matrix[-1]), "forgetting": forgetting(matrix), "matrix": matrix}
        return {**figures, **classifier_result(metrics[-1], self.model)}


def forgetting(matrix: Sequence[Sequence[float]]) -> float:
    """Return how far accuracy fell from its best since an experience was learned: the mean of all but one.

    Row i has the accuracies after experience i. Chaudhry et al. (2018) also count those from before an
    experience was learned.
    """
    last = len(matrix) - 1
    if last == 0:
        return 0.0
    return mean(max(matrix[i][j] for i in range(j, last)) - matrix[last][j] for j in range(last))


run = partial(train_network, Learner)
