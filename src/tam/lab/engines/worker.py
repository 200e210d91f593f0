"""Runs trials in one process: one after the other on a CPU, several side by side on a GPU."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from tam.lab.core.errors import BusyError
from tam.lab.core.registry import get_experiment
from tam.lab.engines import events
from tam.lab.engines.events import EventHandler
from tam.lab.engines.job import Job, RunLocation

ATTEMPTS = 3  # of a trial whose process dies


class RunningTrial:
    """A trial whose locks this process holds, with a stream of its own on a GPU."""

    def __init__(self, job: Job, location: RunLocation, device: torch.device, on_event: EventHandler) -> None:
        self.job, self.on_event, self.locks = job, on_event, ExitStack()
        self.stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.steps: Iterator[Any] = iter(())
        folders = job.folders(location.root)
        try:
            for folder in folders:
                folder.trials_together = location.trials_per_process
                folder.report_progress = self._report_epoch
                self.locks.enter_context(folder.at_work())
            # Another process may have finished some.
            pairs = zip((job.config, *job.others), folders, strict=True)
            unfinished = [(config, folder) for config, folder in pairs if folder.read_result() is None]
            experiment, more = get_experiment(job.experiment), (location.data, device, location.save_every)
            if unfinished and experiment.population is not None:
                self.steps = experiment.population.run(*zip(*unfinished, strict=True), *more)
            elif unfinished:
                self.steps = experiment.run(*unfinished[0], *more)
            if unfinished:
                on_event(events.TrialStarted(job))
        except BaseException:
            self.locks.close()
            raise

    def advance(self) -> bool:
        """Run the next step. Return False if the trial has ended; its locks are released then."""
        ending: events.TrialFinished | events.TrialFailed
        try:
            with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
                progress = next(self.steps)
        except StopIteration:
            ending = events.TrialFinished(self.job)
        except Exception as error:
            if "CUDA error" in str(error):
                raise  # the process can do no more on that device: another one takes over
            ending = events.TrialFailed.from_error(self.job, error)
        else:
            if progress is not None:
                self._report_epoch(progress)
            return True
        self.locks.close()
        self.on_event(ending)
        return False

    def _report_epoch(self, progress: Any) -> None:
        self.on_event(events.EpochEnded.from_progress(self.job, progress))


def configure_torch(device: torch.device) -> None:
    """Set what a process needs before its first trial.

    The bits of a trial must not depend on the process that runs it, nor on how many run side by side: two
    variants of a seed that begin alike stay alike until they differ. So no kernel that adds is chosen by its
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
    """Run jobs until `next_job` returns None, `location.trials_per_process` at a time, in turns.

    `next_job(True)` waits for a job. `next_job(False)` raises queue.Empty if there is none now.
    """
    device = torch.device(location.device)
    configure_torch(device)
    running: list[RunningTrial] = []
    expects_more = True
    while expects_more or running:
        while expects_more and len(running) < location.trials_per_process:
            try:
                job = next_job(not running)
            except queue.Empty:
                break
            if job is None:
                expects_more = False
                break
            try:
                running.append(RunningTrial(job, location, device, on_event))
            except BusyError as error:
                on_event(events.TrialBusy(job, str(error)))
            except Exception as error:
                on_event(events.TrialFailed.from_error(job, error))
        running = [trial for trial in running if trial.advance()]
