"""One trial after the other on all ranks of a job that torchrun has started: `torchrun … -m tam lab run …`.

Every rank makes the same plan and runs every trial; rank 0 alone writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from tam.lab.engines.work import Event, Job, Place, failure, prepare
from tam.lab.experiment import experiments
from tam.lab.store import LabError

PATIENCE = 30.0  # seconds: loaders of a run that was killed end a little later, and hold its lock


def started() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


class Torchrun:
    """The process group. A context: at its end it is gone."""

    def __init__(self, place: Place, tell: Callable[[Event], None]) -> None:
        self.place, self.tell = place, tell

    def __enter__(self) -> Torchrun:
        self.device = torch.device("cpu")
        if self.place.device.startswith("cuda"):
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        prepare(self.device)
        dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()

    def run(self, jobs: Sequence[Job]) -> None:
        """Runs all of them. Raises LabError where one could not be done."""
        writes = dist.get_rank() == 0
        for job in jobs:
            folder = job.folder(self.place.root)
            folder.writes = writes
            dist.barrier()  # the results of the trial before this one are there
            with folder.at_work(PATIENCE) if writes else nullcontext():
                dist.barrier()
                self._tell(Event("start", job))
                trial = experiments()[job.experiment].run
                arguments = (job.config, folder, self.place.data, self.device, self.place.save_every)
                try:
                    # Another job may have finished it while this one waited.
                    for progress in trial(*arguments) if folder.result is None else ():
                        if progress is not None:
                            detail = {"epoch": progress.epoch, "epochs": progress.epochs, **progress.metrics}
                            self._tell(Event("epoch", job, detail))
                except Exception as error:
                    raise LabError(failure(job, error).detail["message"]) from error
            self._tell(Event("done", job))
        dist.barrier()

    def _tell(self, event: Event) -> None:
        if dist.get_rank() == 0:
            self.tell(event)
