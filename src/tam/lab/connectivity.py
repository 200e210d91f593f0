"""Mode connectivity: two copies of a run, trained on with other batches, and the barrier between them.

A trial begins from the state a run has left after an epoch (`Config.keep_at` of images), or trains up to it
itself, and trains two copies that differ in the order and augmentation of their batches alone. Its outcome is
the largest rise of the loss on the straight line between their weights.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tam import landscape
from tam.lab import images
from tam.lab.images import Training, normalise, state_file
from tam.lab.models import parameters
from tam.lab.store import LabError, TrialFolder
from tam.lab.trial import Progress, by_epochs, resolved, told

COPIES = (1, 2)  # the orders of their batches
FOR_STATISTICS = (10, 500)  # batches of images over which batch norm is estimated anew
POINTS = 11  # on the line, its ends included


@dataclass(frozen=True)
class Config(images.Config):
    """A run, and where its copies begin."""

    at: int = 0  # after so many epochs

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.at < self.epochs:
            raise ValueError(f"at={self.at}: must be an epoch before the last")
        if self.sgdm_from is not None or self.damping is not None:
            raise ValueError("copies of a warm-up or of a control are not provided for")

    @property
    def trunk(self) -> images.Config:
        """The run up to there: at its own lr, whatever the copies' tail."""
        given = {f.name: getattr(self, f.name) for f in fields(images.Config)}
        given |= {"schedule": "constant" if self.schedule == "tail" else self.schedule, "test": False}
        return images.Config(**given)


def config_of(**options: Any) -> dict[str, Any]:
    """A trial's config, checked, without defaults; it always tells itself from a run."""
    found = Config(**options)
    return {**told(found), "at": found.at}


def check(trial: dict[str, Any], data_folder: Path) -> None:
    """Raises where the data is not there."""
    images.check({k: v for k, v in trial.items() if k != "at"}, data_folder)


def run(
    config: dict[str, Any],
    folder: TrialFolder,
    data_folder: Path,
    device: torch.device,
    save_every: float = 60.0,
) -> Iterator[Progress | None]:
    """Trains the copies, from the last checkpoint where there is one, and measures the line between them."""
    settings = Config(**config)
    pair = Pair(settings, folder, data_folder, device)
    seconds = yield from by_epochs(pair, folder, device, settings.epochs, save_every)
    one, last = pair.copies[0], folder.rows[-1]
    result = {
        **barriers(*pair.copies), "apart": apart(*pair.copies), "validation": last["validation"],
        "loss": last["loss"], "diverged": not math.isfinite(last["loss"]), "epochs": len(folder.rows),
        "parameters": parameters(one.model), "settings": resolved(settings, one.optimizer),
    }  # fmt: skip
    folder.finish(result, seconds, device)


class Pair:
    """Two copies of a run, which learns here up to where they begin unless it has left its state there."""

    def __init__(self, config: Config, folder: TrialFolder, data_folder: Path, device: torch.device) -> None:
        self.config = config
        self.copies = [Training(_copy(config, order), data_folder, device, None) for order in COPIES]
        self.left = partial(_left, config, folder.path.parent.parent, device)
        self.make_trunk = partial(Training, config.trunk, data_folder, device, None)
        self.trunk: Training | None = None  # the run, while it learns here
        self.begun = config.at == 0  # there both are as they were made

    def epoch(self, epoch: int) -> Generator[None, None, dict[str, Any] | None]:
        if epoch < self.config.at:
            yield from self._lead(epoch)
            return None
        for copy in self.copies:
            copy.begin(epoch)
        for _ in range(self.copies[0].steps):
            for copy in self.copies:
                copy.step()
            yield None
        return {
            "epoch": epoch + 1,
            "lr": self.config.learning_rate(epoch),
            "loss": mean(float(copy.seen[:, 0].double().mean()) for copy in self.copies),
            "validation": mean(float(copy.accuracy(*validation(copy))) for copy in self.copies),
        }

    def _lead(self, epoch: int) -> Iterator[None]:
        """An epoch of the run, unless its state was found."""
        if not self.begun and self.trunk is None and not self._found():
            self.trunk = self.make_trunk()
        if self.trunk is None:
            return
        self.trunk.begin(epoch)
        for _ in range(self.trunk.steps):
            self.trunk.step()
            yield None
        if epoch + 1 == self.config.at:
            self._begin([self.trunk.state_dict()] * 2)

    def _found(self) -> bool:
        state = self.left()
        if state is not None:
            self._begin([state] * 2)
        return state is not None

    def _begin(self, states: Sequence[dict[str, Any]]) -> None:
        for copy, own in zip(self.copies, states, strict=True):
            copy.load_state_dict(own)
        self.begun, self.trunk = True, None

    def state_dict(self) -> dict[str, Any]:
        if self.trunk is not None:
            return {"trunk": self.trunk.state_dict()}
        return {"copies": [copy.state_dict() for copy in self.copies]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "copies" in state:
            self._begin(state["copies"])
        elif not self._found():  # the run may have left it meanwhile
            self.trunk = self.make_trunk()
            self.trunk.load_state_dict(state["trunk"])


def _copy(settings: Config, order: int) -> images.Config:
    given = {f.name: getattr(settings, f.name) for f in fields(images.Config)}
    return images.Config(**{**given, "order": order, "test": False, "keep_at": ()})


def _left(settings: Config, root: Path, device: torch.device) -> dict[str, Any] | None:
    """The state a run has left where the copies begin, if there is one."""
    for test in (True, False):  # a run that was compared, or one that was not
        trunk = TrialFolder(root, told(replace(settings.trunk, test=test)))
        path = trunk.path / state_file(settings.at)
        if path.exists():
            try:
                return dict(torch.load(path, map_location=device, weights_only=True))
            except Exception as error:  # torch raises whatever its reader meets
                raise LabError(
                    f"{path} is damaged: remove it, and copies train up to there themselves"
                ) from error
    return None


def validation(training: Training) -> tuple[Tensor, Tensor]:
    """The images held out."""
    return training.images[training.validation], training.labels[training.validation]


@torch.no_grad()
def barriers(a: Training, b: Training) -> dict[str, Any]:
    """On training and validation loss, with batch norm's statistics as interpolated and estimated anew.

    With the losses on each line: where the largest is an end's own, no point lies above the higher end.
    """
    kept = a.draws.indices.to(a.images.device)
    parts = {"train": (a.images[kept], a.labels[kept]), "validation": validation(a)}
    count, size = FOR_STATISTICS
    batches = [normalise(x, a.mean, a.std) for x in torch.split(parts["train"][0][: count * size], size)]
    found: dict[str, Any] = {}
    for training in (a, b):
        training.model.eval()
    for name, part in parts.items():
        loss = partial(_loss, a, *part)
        for suffix, anew in (("", batches), ("_as_they_are", None)):
            line = landscape.barrier(a.model, b.model, loss, points=POINTS, batches=anew)
            found |= {f"barrier_{name}{suffix}": line.height, f"line_{name}{suffix}": list(line.losses)}
    return {"barrier": found["barrier_train"], **found}


@torch.no_grad()
def apart(a: Training, b: Training) -> float:
    """Their distance, as a share of their mean norm: between equals a barrier of 0 says nothing."""
    # Flat by hand: torch's parameters_to_vector cannot read weights that lie channels last.
    ours, theirs = (torch.cat([p.double().flatten() for p in one.model.parameters()]) for one in (a, b))
    return float(2 * (ours - theirs).norm() / (ours.norm() + theirs.norm()))


def _loss(training: Training, x: Tensor, y: Tensor, model: nn.Module) -> float:
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=training.device)
    for images_of, labels in zip(torch.split(x, 2000), torch.split(y, 2000), strict=True):
        shown = normalise(images_of.to(training.device), training.mean, training.std)
        with torch.autocast(training.device.type, training.dtype, enabled=training.dtype is torch.bfloat16):
            out = model(shown)
        total += cross_entropy(out.float(), labels.to(training.device), reduction="sum").double()
    return float(total) / len(y)


# ---------------------------------------------------------------------- jumps of the gradient norm


@dataclass(frozen=True)
class Jump:
    """An abrupt rise: the epoch, and by what factor."""

    epoch: int
    size: float


def first_jump(norms: Sequence[float], window: int = 10, factor: float = 1.5) -> Jump | None:
    """The first epoch, counted from 1, whose |g| is this many times the median of the epochs before it.

    A slow rise is none: the median follows it. `window` epochs come before one that is judged.
    """
    for i in range(window, len(norms)):
        before = median(norms[i - window : i])
        if norms[i] > factor * before > 0:
            return Jump(i + 1, norms[i] / before)
    return None
