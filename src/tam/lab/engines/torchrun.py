"""One trial after the other on all ranks of a job that torchrun has started: `torchrun … -m tam lab run …`.

Every rank makes the same plan and runs every trial; rank 0 alone writes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from tam.lab.core.errors import LabError
from tam.lab.core.registry import get_experiment
from tam.lab.engines import events
from tam.lab.engines.events import EventHandler, Job, RunLocation
from tam.lab.engines.worker import configure_torch

PATIENCE = 30.0  # seconds: loaders of a run that was killed end a little later, and hold its lock


def started() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first_rank() -> bool:
    """Return whether this process is rank 0 of a torchrun job, or of none. Only such a process prints."""
    return not started() or os.environ.get("RANK", "0") == "0"


def end_process() -> None:
    """End this process with success, at once: gloo's threads can abort one that ends slowly."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class TorchrunEngine:
    """The process group. A context: at its end it is gone."""

    def __init__(self, location: RunLocation, on_event: EventHandler) -> None:
        self.location, self.on_event = location, on_event

    def __enter__(self) -> TorchrunEngine:
        self.device = torch.device("cpu")
        if self.location.device.startswith("cuda"):
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        configure_torch(self.device)
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs. Raises LabError if one fails."""
        for job in jobs:
            self._run_job(job)
        dist.barrier()

    def _run_job(self, job: Job) -> None:
        (folder,) = job.folders(self.location.root)
        folder.writes = dist.get_rank() == 0
        on_event = self.on_event if folder.writes else lambda event: None
        folder.report_progress = lambda progress: on_event(events.EpochEnded(job, **vars(progress)))
        dist.barrier()  # the results of the trial before this one are there
        with folder.at_work(PATIENCE) if folder.writes else nullcontext():
            dist.barrier()
            on_event(events.TrialStarted(job, folder.checkpoint_epoch()))
            trial = get_experiment(job.experiment).run
            arguments = (job.config, folder, self.location.data, self.device, self.location.save_every)
            try:
                # Another job may have finished it while this one waited.
                for progress in trial(*arguments) if folder.read_result() is None else ():
                    if progress is not None:
                        folder.report_progress(progress)
            except Exception as error:
                raise LabError(events.TrialFailed.from_error(job, error).message) from error
        on_event(events.TrialFinished(job))


class Ranks:
    """This process among those that a trial runs on: one, or those of a torchrun job."""

    def __init__(self, device: torch.device) -> None:
        self.device, many = device, dist.is_available() and dist.is_initialized()
        self.rank, self.count = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)

    def add(self, *values: float | Tensor) -> list[float]:
        """Return the sum of each value over all ranks."""
        sums = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values])
        if self.count > 1:
            dist.all_reduce(sums)
        return list(map(float, sums))

    def gather(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked in the order of ranks."""
        tensors = [x]
        if self.count > 1:
            tensors = [torch.empty_like(x) for _ in range(self.count)]
            dist.all_gather(tensors, x)
        return torch.stack(tensors)

    def share(self, x: Tensor) -> None:
        """Overwrite a tensor with that of rank 0."""
        if self.count > 1:
            dist.broadcast(x, 0)

    def wait(self) -> None:
        """Wait for all ranks."""
        if self.count > 1:
            dist.barrier()
