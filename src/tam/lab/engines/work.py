"""Runs trials in one process: one after the other on a CPU, several side by side on a GPU."""

from __future__ import annotations

import os
import queue
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tam.lab.data import DataError
from tam.lab.experiment import experiments
from tam.lab.store import BusyError, LabError, TrialFolder

ATTEMPTS = 3  # of a trial whose process dies


@dataclass(frozen=True)
class Place:
    """Where trials run and where their files lie."""

    root: Path
    data: Path
    device: str = "cpu"
    together: int = 1  # trials side by side in a process
    save_every: float = 60.0  # seconds between checkpoints

    def alone(self) -> Place:
        """The same with one trial at a time."""
        return replace(self, together=1)


@dataclass(frozen=True)
class Job:
    """A trial to run."""

    experiment: str
    config: dict[str, Any]
    label: str = ""  # in words
    others: tuple[dict[str, Any], ...] = ()  # trials that run in the same program

    def folder(self, root: Path) -> TrialFolder:
        return TrialFolder(root, self.config)

    def folders(self, root: Path) -> list[TrialFolder]:
        """Its own and those of the others."""
        return [TrialFolder(root, config) for config in (self.config, *self.others)]


@dataclass(frozen=True)
class Event:
    """What a worker has to tell: "start", "epoch", "done", "busy" or "failed"."""

    kind: str
    job: Job
    detail: dict[str, Any] = field(default_factory=dict)


class Lane:
    """A trial at work, with a stream of its own on a GPU."""

    def __init__(self, job: Job, place: Place, device: torch.device) -> None:
        self.job, self.held = job, ExitStack()
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        folders = job.folders(place.root)
        try:
            for folder in folders:
                folder.together = place.together
                self.held.enter_context(folder.at_work())
            # Another process may have finished some.
            left = [folder for folder in folders if folder.result is None]
        except BaseException:
            self.held.close()
            raise
        self.idle = not left
        self.steps: Iterator[Any] = iter(())
        experiment, more = experiments()[job.experiment], (place.data, device, place.save_every)
        if left and experiment.together is not None:
            self.steps = experiment.together.run([folder.config for folder in left], left, *more)
        elif left:
            self.steps = experiment.run(left[0].config, left[0], *more)

    def advance(self) -> Any:
        here: AbstractContextManager[Any] = nullcontext()
        if self.stream is not None:
            here = torch.cuda.stream(self.stream)
        with here:
            return next(self.steps)


def prepare(device: torch.device) -> None:
    """Sets what a process needs before its first trial.

    A trial's bits are not to depend on the process that runs it, nor on how many run side by side: two arms
    of a seed that begin alike stay alike until they differ. So no kernel that adds is chosen by its time, and
    convolutions add in one order. Attention's gradients, and sums by index such as a graph's, do not.
    """
    if device.type != "cuda":
        torch.set_num_threads(1)
        return
    from torch._inductor import config as inductor  # a second to import, for GPUs alone

    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    if hasattr(inductor, "deterministic"):  # before torch 2.10 it times its reductions in any case
        inductor.deterministic = True
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it, with several streams
    torch.set_float32_matmul_precision("high")
    # Every trial compiles its own step; after eight torch would leave them uncompiled.
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 100_000


def work(place: Place, take: Callable[[bool], Job | None], tell: Callable[[Event], None]) -> None:
    """Runs what `take` gives until it gives None, `place.together` trials at a time, in turns.

    `take(True)` waits for a job; `take(False)` raises queue.Empty where there is none now.
    """
    device = torch.device(place.device)
    prepare(device)
    lanes: list[Lane] = []
    more = True
    while more or lanes:
        while more and len(lanes) < place.together:
            try:
                job = take(not lanes)
            except queue.Empty:
                break
            more = job is not None
            if job is not None:
                _begin(job, place, device, lanes, tell)
        for lane in list(lanes):
            try:
                progress = lane.advance()
            except StopIteration:
                event = Event("done", lane.job)
            except Exception as error:
                if "CUDA error" in str(error):
                    raise  # the process can do no more on that device: another one takes over
                event = failure(lane.job, error)
            else:
                if progress is not None:
                    detail = {"epoch": progress.epoch, "epochs": progress.epochs, **progress.metrics}
                    tell(Event("epoch", lane.job, detail))
                continue
            lanes.remove(lane)
            lane.held.close()
            tell(event)


def _begin(
    job: Job, place: Place, device: torch.device, lanes: list[Lane], tell: Callable[[Event], None]
) -> None:
    try:
        lane = Lane(job, place, device)
        lanes.append(lane)
        if not lane.idle:
            tell(Event("start", job))
    except BusyError as error:
        tell(Event("busy", job, {"message": str(error)}))
    except Exception as error:
        tell(failure(job, error))


def failure(job: Job, error: Exception) -> Event:
    """A LabError is for the one who started the run, and stops it: it would befall the other trials, too."""
    stops = isinstance(error, (LabError, DataError))
    message = str(error) if stops else "".join(traceback.format_exception(error))
    return Event("failed", job, {"message": message, "stops": stops})
