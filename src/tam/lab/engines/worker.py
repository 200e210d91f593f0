"""Runs trials in one process: one after the other on a CPU, several side by side on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from tam.lab.core.errors import BusyError
from tam.lab.core.registry import get_experiment
from tam.lab.engines import events
from tam.lab.engines.events import EventHandler, Job, RunLocation

ATTEMPTS = 3  # of a trial whose process dies
END = object()  # of a trial's steps


def run_trial(job: Job, location: RunLocation, on_event: EventHandler) -> Iterator[bool]:
    """Run a job and report how it goes. Yield True after every step.

    Its folders are locked until it ends. On a GPU it has its own stream.
    """
    device, has_begun = torch.device(location.device), False
    ending: events.TrialEnded = events.TrialFinished(job)

    def report_epoch(progress: Any) -> None:
        on_event(events.EpochEnded(job, **vars(progress)))

    try:
        with ExitStack() as locks:
            stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
            unfinished = []
            for config, folder in zip((job.config, *job.others), job.folders(location.root), strict=True):
                folder.trials_together, folder.report_progress = location.trials_per_process, report_epoch
                locks.enter_context(folder.at_work())
                if folder.read_result() is None:  # another process may have finished it
                    unfinished.append((config, folder))
            steps: Iterator[Any] = iter(())
            experiment, more = get_experiment(job.experiment), (location.data, device, location.save_every)
            if unfinished and experiment.population is not None:
                steps = experiment.population.run(*zip(*unfinished, strict=True), *more)
            elif unfinished:
                steps = experiment.run(*unfinished[0], *more)
            if unfinished:
                on_event(events.TrialStarted(job, min(folder.checkpoint_epoch() for _, folder in unfinished)))
            has_begun = True
            while True:
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    progress = next(steps, END)
                if progress is END:
                    break
                if progress is not None:
                    report_epoch(progress)
                yield True
    except Exception as error:
        if has_begun and "CUDA error" in str(error):
            raise  # the process can do no more on that device: another one takes over
        ending = events.TrialFailed.from_error(job, error)
        if isinstance(error, BusyError) and not has_begun:
            ending = events.TrialBusy(job, str(error))
    on_event(ending)


def configure_torch(device: torch.device) -> None:
    """Set what a process needs before its first trial.

    The bits of a trial must depend neither on the process that runs it nor on how many run side by side. Two
    variants of a seed that begin equal stay equal until they differ. So no kernel that adds is chosen by its
    time, and convolutions add in one order. Attention's gradients and sums by index (a graph's) do not.
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


def run_jobs(location: RunLocation, next_job: Callable[[bool], Job | None], on_event: EventHandler) -> None:
    """Run jobs until there are no more, `location.trials_per_process` at a time, in turns.

    `next_job(True)` waits for a job and returns None if no more will come. `next_job(False)` returns None if
    there is none now.
    """
    configure_torch(torch.device(location.device))
    running: list[Iterator[bool]] = []
    while True:
        while len(running) < location.trials_per_process and (job := next_job(not running)) is not None:
            running.append(run_trial(job, location, on_event))
        if not running:
            return
        running = [trial for trial in running if next(trial, False)]
