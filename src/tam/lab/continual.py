"""Continual learning: one network learns experience after experience, naively or without forgetting.

After each experience it is tested on all of them. Learning without Forgetting (Li and Hoiem 2017) adds to the
loss how far the network's answers to the new images go from those it gave before the experience.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, softmax

from tam import registry
from tam.lab.damping import (
    check_damping,
    check_length,
    given_alignment,
    keep_alignment,
    replace_alignment,
    watched,
)
from tam.lab.data import files, find, moments, streams
from tam.lab.graphed import Graphed
from tam.lab.images import normalise, padding, prepare
from tam.lab.making import load_optimizer, make_network, make_optimizer
from tam.lab.models import get_model, parameters
from tam.lab.store import LabError, TrialFolder
from tam.lab.trial import Progress, by_epochs, resolved, told

TEMPERATURE = 2.0  # at which answers are compared


@dataclass(frozen=True)
class Config:
    """All that determines a trial. What the lab calls an epoch is an experience here."""

    stream: str  # "clear", or a data set that drifts
    model: str
    optimizer: str
    lr: float
    seed: int
    epochs: int  # experiences
    method: str = "naive"  # or "lwf"
    strength: float = 1.0  # of LwF's term
    passes: int = 5  # through an experience
    batch: int = 64
    size: int = 224  # of CLEAR's images
    checkpoint: str | None = None  # to begin from: FILE#DIGEST with a state dict, or timm:NAME
    options: dict[str, Any] = field(default_factory=dict)
    damping: str | None = None
    damping_of: str | None = None
    test: bool = False  # whether test images are read; else those held out of training

    def __post_init__(self) -> None:
        registry.get(self.optimizer)
        get_model(self.model)
        if self.method not in ("naive", "lwf"):
            raise ValueError(f"method={self.method!r}: must be 'naive' or 'lwf'")
        if min(self.epochs, self.passes, self.batch) < 1 or self.strength < 0:
            raise ValueError("epochs, passes and batch must be at least 1, strength not negative")
        check_damping(self)


def config_of(**options: Any) -> dict[str, Any]:
    """A trial's config, checked, without defaults."""
    return told(Config(**options))


def check(trial: dict[str, Any], data_folder: Path) -> None:
    """Raises where the images are not there."""
    config = Config(**trial)
    if config.stream == "clear":
        streams.check_clear(data_folder)
    else:
        files.check(config.stream, find(config.stream, data_folder), data_folder)


@cache
def _stream(
    config: tuple[str, int, int, int], folder: Path, device: torch.device
) -> tuple[streams.Stream, Tensor, Tensor]:
    """Shared by all trials of a process and seed."""
    name, size, seed, experiences = config
    found = streams.clear(folder, size, seed) if name == "clear" else None
    found = found or streams.drifting(name, folder, seed, experiences)
    if experiences > len(found):
        raise LabError(f"CLEAR has {len(found)} experiences, not {experiences}")
    return found, found.images.to(device), found.labels.to(device)


def far_from_before(answers: Tensor, before: Tensor) -> Tensor:
    """LwF's term: the divergence of the softened answers from those before, in nats, the batch's mean."""
    old, new = before / TEMPERATURE, answers / TEMPERATURE
    return (softmax(old, 1) * (log_softmax(old, 1) - log_softmax(new, 1))).sum(1).mean()


class Learner:
    """A network, the one it was before the experience, its optimizer and one step."""

    def __init__(self, config: Config, data_folder: Path, device: torch.device, given: Tensor | None) -> None:
        self.config, self.device = config, device
        key = (config.stream, config.size, config.seed, config.epochs)
        self.stream, self.images, self.labels = _stream(key, data_folder, device)
        size = len(self.stream.train[0])
        self.steps = size // config.batch  # of a pass
        if self.steps == 0:
            raise LabError(f"{size} images make no batch of {config.batch}")
        self.model, self.dtype = make_network(config, self.stream.classes, device)
        self.before: nn.Module | None = None  # the network as it was, once there is something to forget
        mean_std = moments(self.stream.images[self.stream.train[0]])  # of what is known at the start
        self.mean, self.std = (torch.tensor(x, device=device)[:, None, None] for x in mean_std)
        self.lr = torch.tensor(config.lr, device=device)
        self.optimizer = make_optimizer(
            config, self.model.parameters(), self.lr, graphed=device.type == "cuda"
        )
        self.given = None if given is None else given.to(device)
        self.order = torch.zeros(size, dtype=torch.int64, device=device)
        self.shift = torch.zeros(size, 2, dtype=torch.int64, device=device)
        self.flip = torch.zeros(size, dtype=torch.bool, device=device)
        self.position, self.taken = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        self.lanes = torch.arange(config.batch, device=device)
        self.seen = torch.zeros(self.steps * config.passes, 2, device=device)  # loss and s of an experience
        self.row = torch.zeros(1, dtype=torch.int64, device=device)
        self.step = Graphed(self._step, device)
        self.alignments: list[Tensor] = []  # by experience
        self.parts = self.stream.test if config.test else self.stream.validation

    def begin(self, experience: int) -> None:
        """What the network knows now is what it is not to forget."""
        if self.config.method == "lwf" and experience:
            if self.before is None:
                self.before = copy.deepcopy(self.model).eval().requires_grad_(False)
                self.step.forget()
            self.before.load_state_dict(self.model.state_dict())
        self.row.zero_()

    def draw(self, experience: int, number: int) -> None:
        """The order of a pass, and how images are shifted and flipped."""
        rows = self.stream.train[experience]
        seed = (self.config.seed * 1009 + experience) * 1009 + number
        generator = torch.Generator().manual_seed(seed)
        self.order.copy_(rows[torch.randperm(len(rows), generator=generator)])
        most = 2 * padding(self.images.shape[2])
        self.shift.copy_(torch.randint(0, most + 1, (len(rows), 2), generator=generator))
        self.flip.copy_(torch.rand(len(rows), generator=generator) < 0.5)
        self.position.zero_()
        torch.manual_seed(seed)  # a network's own draws

    def _step(self) -> None:
        rows = self.position + self.lanes
        chosen = self.order[rows]
        for p in self.model.parameters():
            p.grad = None
        x = prepare(self.images[chosen], self.shift[rows], self.flip[rows], self.mean, self.std)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is torch.bfloat16):
            answers = self.model(x)
            loss = cross_entropy(answers, self.labels[chosen])
            if self.before is not None:
                far = far_from_before(answers.float(), self.before(x).float())
                loss = loss + self.config.strength * far
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            s = watched(self.optimizer)
            if self.given is not None and s:
                replace_alignment(s, self.given, self.taken)
        self.optimizer.step()
        with torch.no_grad():
            now = torch.stack(s).mean() if s else torch.full((), math.nan, device=self.device)
            self.seen.index_copy_(0, self.row, torch.stack([loss.detach().float(), now])[None])
            self.row += 1
            self.position += self.config.batch
            self.taken += 1

    def epoch(self, experience: int) -> Generator[None, None, dict[str, Any]]:
        """Learns an experience, and is tested on all."""
        self.begin(experience)
        for number in range(self.config.passes):
            self.draw(experience, number)
            for _ in range(self.steps):
                self.step()
                yield None
        seen = self.seen.to("cpu", copy=True)
        self.alignments.append(seen[:, 1])
        accuracies = [self.accuracy(part) for part in self.parts[: self.config.epochs]]
        loss, s = seen.double().mean(0).tolist()
        row: dict[str, Any] = {"epoch": experience + 1, "loss": loss, "accuracies": accuracies}
        row["average"] = mean(accuracies[: experience + 1])  # of the experiences so far
        return row if math.isnan(s) else {**row, "alignment": s}

    @torch.no_grad()
    def accuracy(self, indices: Tensor) -> float:
        """In percent."""
        self.model.eval()
        right = 0
        for rows in torch.split(indices.to(self.device), 1000):
            x = normalise(self.images[rows], self.mean, self.std)
            with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is torch.bfloat16):
                right += int((self.model(x).argmax(1) == self.labels[rows]).sum())
        self.model.train()
        return 100 * right / len(indices)

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "taken": self.taken,
            "alignments": torch.cat(self.alignments),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.taken.copy_(state["taken"])
        self.alignments = [state["alignments"].cpu()]


def average_accuracy(matrix: Sequence[Sequence[float]]) -> float:
    """Over all experiences, after the last; a row is what the network knows after an experience."""
    return mean(matrix[-1])


def forgetting(matrix: Sequence[Sequence[float]]) -> float:
    """What was known better since it was learned, the mean of all experiences but the last.

    Chaudhry et al. (2018) count what was known before that, too.
    """
    last = len(matrix) - 1
    if last == 0:
        return 0.0
    return mean(max(matrix[i][j] for i in range(j, last)) - matrix[last][j] for j in range(last))


def run(
    config: dict[str, Any],
    folder: TrialFolder,
    data_folder: Path,
    device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:
    """Learns the stream, from the last checkpoint where there is one."""
    settings = Config(**config)
    learner = Learner(settings, data_folder, device, given_alignment(settings, folder))
    check_length(learner.given, learner.steps * settings.passes * settings.epochs)
    seconds = yield from by_epochs(learner, folder, device, settings.epochs, save_every)
    keep_alignment(folder, torch.cat(learner.alignments))
    folder.finish(_result(settings, folder, learner), seconds, device)


def _result(settings: Config, folder: TrialFolder, learner: Learner) -> dict[str, Any]:
    rows = folder.rows
    matrix = [row["accuracies"] for row in rows]
    return {
        "average": average_accuracy(matrix), "forgetting": forgetting(matrix), "matrix": matrix,
        "diverged": not math.isfinite(rows[-1]["loss"]), "loss": rows[-1]["loss"], "epochs": len(rows),
        "parameters": parameters(learner.model), "settings": resolved(settings, learner.optimizer),
    }  # fmt: skip
