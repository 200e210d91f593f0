"""Steps and epochs: what a step records, metrics, checkpoints, progress and the result."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tam.lab.core.config import TrialConfig, effective_settings
from tam.lab.core.errors import LabError
from tam.lab.core.store import ALIGNMENT_FILE, TrialFolder
from tam.lab.training.damping_control import alignment_tensors, check_source_length
from tam.lab.training.factory import load_optimizer


@dataclass(frozen=True)
class Progress:
    """How far a trial is."""

    epoch: int
    epochs: int
    metrics: dict[str, Any]


class StepRecorder:
    """Takes the steps of an optimizer. Records s and further measurements of every step of a run.

    It never waits for the device, so a CUDA graph can capture its steps. `source` holds a control's s for
    every step, and every segment if there are several; `source_name` is the trial that it comes from.
    `aligned_steps` is the number of steps before a warm-up replaces its first optimizer.
    """

    def __init__(
        self, steps: int, device: torch.device, source: Tensor | None = None, *,
        source_name: str | None = None, aligned_steps: int | None = None, measurements: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.aligned_steps = steps if aligned_steps is None else aligned_steps
        check_source_length(source, self.aligned_steps, source_name)
        self.source = None if source is None else source.reshape(len(source), -1).to(device)
        # One row per step: the measurements, then the mean s over the segments. NaN where there is none.
        self.values = torch.full((steps, measurements + 1), math.nan, dtype=dtype, device=device)
        self.segments: Tensor | None = None  # s of each, one row per step, if there are several
        self.steps_taken = torch.zeros((), dtype=torch.int64, device=device)
        self._written_by_step: list[Tensor] = []  # the optimizer's tensors that the step writes s to

    def step(self, optimizer: Optimizer, *measurements: Tensor) -> None:
        """Take a step and record it."""
        self.before_step(optimizer)
        optimizer.step()
        self.after_step(*measurements)

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer) -> None:
        """Find the tensors that hold s and, in a control, fill in the source's values."""
        self._written_by_step = alignment_tensors(optimizer)  # now: a Warmup may drop them in the step
        if self.source is not None and self._written_by_step:
            # Not source[steps_taken]: that waits for the device, and a graph would keep the first value.
            row = self.source.index_select(0, self.steps_taken.reshape(1))[0]
            torch._foreach_copy_(self._written_by_step, list(row.unbind()))

    @torch.no_grad()
    def after_step(self, *measurements: Tensor) -> None:
        """Record the step: its measurements, the mean s over the optimizer's segments, and s of each."""
        segments, now = self._written_by_step, self.steps_taken.reshape(1)
        alignment = torch.stack(segments).mean() if segments else self.values.new_full((), math.nan)
        row = torch.stack([value.detach().to(self.values.dtype) for value in (*measurements, alignment)])
        self.values.index_copy_(0, now, row[None])
        if len(segments) > 1:
            if self.segments is None:  # in the first step, which no graph captures
                self.segments = self._allocate_segments(len(segments))
            self.segments.index_copy_(0, now, torch.stack(segments).to(self.segments.dtype)[None])
        self.steps_taken += 1

    def _allocate_segments(self, count: int) -> Tensor:
        """Return one NaN per step and segment, in 16 bits: there can be hundreds of segments."""
        shape = len(self.values), count
        return torch.full(shape, math.nan, dtype=torch.float16, device=self.values.device)

    @property
    def alignment(self) -> Tensor:
        """s of every step of the run, on the device: the mean over the segments. NaN where there is none."""
        return self.values[:, -1]

    def continue_at(self, step: int) -> None:
        """Set the number of steps so far."""
        self.steps_taken.fill_(step)

    def write_alignment(self, folder: TrialFolder) -> None:
        """Write s of the steps taken, for controls and reports. An optimizer without s writes nothing.

        Several segments have a column each, unless the first steps are of a version that kept the mean only.
        """
        count = min(int(self.steps_taken), self.aligned_steps)
        alignment = self.alignment[:count]
        if not count or alignment.isnan().any():
            return
        if self.segments is not None and not self.segments[:count].isnan().any():
            alignment = self.segments[:count]
        folder.write(ALIGNMENT_FILE, alignment.to("cpu", copy=True).contiguous())

    def state_dict(self) -> dict[str, Any]:
        count = int(self.steps_taken)
        state = {"values": self.values[:count].clone()}
        return state if self.segments is None else {**state, "segments": self.segments[:count].clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the steps so far. Only runs with several segments have "segments"."""
        steps, segments = len(state["values"]), state.get("segments")
        self.values[:steps] = state["values"].to(self.values.device)
        if segments is not None:
            if self.segments is None:
                self.segments = self._allocate_segments(segments.shape[1])
            self.segments[:steps] = segments.to(self.values.device)
        self.continue_at(steps)


class NetworkLearner(ABC):
    """What is trained, with everything a checkpoint must hold of it."""

    model: nn.Module
    optimizer: Optimizer
    recorder: StepRecorder

    @abstractmethod
    def epoch(self, epoch: int) -> Generator[None, None, dict[str, Any] | None]:
        """Train one epoch, counted from 0. Yield after every step and return the metrics.

        They include "epoch", counted from 1, and "loss". None: this epoch only leads to the trial's start.
        """

    @abstractmethod
    def result(self, metrics: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a trial from the metrics of its epochs."""

    def agree(self, is_due: bool) -> bool:
        """Return whether a checkpoint is due, the same on all ranks."""
        return is_due

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "recorder")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        if "recorder" in state:  # not in the states that runs of older versions have left for forks
            self.recorder.load_state_dict(state["recorder"])


def train_epochs(
    learner: NetworkLearner, folder: TrialFolder, device: torch.device, epochs: int, save_every: float
) -> Generator[Progress | None, None, float]:
    """Train from the last checkpoint to the last epoch, or until the loss is not finite.

    Checkpoints are at least `save_every` seconds apart.
    Yield None after every step and Progress after every epoch. Return the seconds of training in all.
    """
    first_epoch, seconds_before = 0, 0.0
    checkpoint = folder.load(device)
    if checkpoint is not None:
        first_epoch, state = checkpoint
        try:
            learner.load_state_dict(state["learner"])
        except KeyError as error:
            message = f"the checkpoint in {folder.path} is of an older version"
            raise LabError(f"{message}: remove the folder, and the trial is run again") from error
        seconds_before = float(state["seconds"])
    start = last_save = time.monotonic()
    for epoch in range(first_epoch, epochs):
        metrics = yield from learner.epoch(epoch)
        if metrics is not None:
            folder.log(metrics)
            yield Progress(epoch + 1, epochs, metrics)
            if not math.isfinite(metrics["loss"]):
                break
        if learner.agree(time.monotonic() - last_save > save_every) and epoch + 1 < epochs:
            seconds = seconds_before + time.monotonic() - start
            folder.save(epoch + 1, {"learner": learner.state_dict(), "seconds": seconds})
            last_save = time.monotonic()
    return seconds_before + time.monotonic() - start


def train_network(
    make_learner: Callable[[Any, TrialFolder, Path, torch.device], NetworkLearner], config: TrialConfig,
    folder: TrialFolder, data_folder: Path, device: torch.device, save_every: float = 60.0,
) -> Iterator[Progress | None]:  # fmt: skip
    """Run a trial: train from the last checkpoint, if there is one, and write alignment and result."""
    learner = make_learner(config, folder, data_folder, device)
    settings = effective_settings(config, learner.optimizer)  # before a warm-up replaces the optimizer
    seconds = yield from train_epochs(learner, folder, device, config.epochs, save_every)
    if hasattr(learner, "recorder"):  # a learner with several networks has none
        learner.recorder.write_alignment(folder)
    folder.finish({**learner.result(folder.rows), "settings": settings}, seconds, device)
