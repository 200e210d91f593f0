"""Trials as Ray tasks, on this machine or a cluster. All machines must share the results folder.

A task is one trial in its own process. If its process or machine is lost, Ray runs it again from
its checkpoint.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from tam.lab.core.errors import LabError
from tam.lab.core.store import parse_rows
from tam.lab.engines import events
from tam.lab.engines.events import EventHandler, Job, RunLocation
from tam.lab.engines.worker import ATTEMPTS, configure_torch, run_trial

POLL_SECONDS = 0.5


class RayEngine:
    """The connection to Ray. A context: at its end it is closed."""

    def __init__(
        self, location: RunLocation, workers: int, on_event: EventHandler, address: str | None = None
    ) -> None:
        self.location, self.workers, self.on_event, self.address = location, workers, on_event, address

    def __enter__(self) -> RayEngine:
        import ray

        self.ray = ray
        slots = self.workers * self.location.trials_per_process
        own: dict[str, Any] = {} if self.address else {"num_cpus": slots, "include_dashboard": False}
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            # If True, servers listen on all interfaces; `_node_ip_address="127.0.0.1"` does not help.
            ray._private.ray_constants.ENABLE_RAY_CLUSTER = self.address is not None
            ray.init(address=self.address or "local", log_to_driver=False, logging_level="warning", **own)
        except Exception as error:  # of many kinds, by what is wrong
            raise LabError(f"Ray cannot be reached or started: {error}") from error
        with suppress(ValueError, TypeError):  # not the main thread's, or not a handler of Python's
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own ends the process with a dump of its stack
        gpus = 1 / self.location.trials_per_process if self.location.device.startswith("cuda") else 0
        self.task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=ATTEMPTS - 1)(_run_task)
        return self

    def __exit__(self, *_: object) -> None:
        self.ray.shutdown()  # ends our tasks, too; to cancel one that is just ending can abort this process

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs. Raises LabError if some failed."""
        monitors = {job.key: JobMonitor(job, self.location.root) for job in jobs}
        pending = {self.task.remote(self.location, job): job for job in jobs}
        failures: list[events.TrialFailed] = []
        while pending:
            done, _ = self.ray.wait(list(pending), timeout=POLL_SECONDS)
            for job in pending.values():
                if (event := monitors[job.key].new_event()) is not None:
                    self.on_event(event)
            for reference in done:
                job = pending.pop(reference)
                try:
                    ending = self.ray.get(reference)
                except self.ray.exceptions.RayError as error:
                    message = f"trial {job.key}: {type(error).__name__} after {ATTEMPTS} attempts: {error}"
                    ending = events.TrialFailed(job, message)
                self.on_event(ending)
                if isinstance(ending, events.TrialFailed):
                    failures.append(ending)
                    if ending.stops_run:
                        raise LabError(ending.message)
        if failures:
            raise events.TrialFailed.summarize(failures)


class JobMonitor:
    """Follows a task by the rows it appends to its metrics files. Only new rows are read."""

    def __init__(self, job: Job, root: Path) -> None:
        self.job, self.epoch = job, 0
        paths = [folder.path / "metrics.jsonl" for folder in job.folders(root)]
        self.offsets = dict.fromkeys(paths, 0)
        self.rows: dict[Path, dict[int, dict[str, Any]]] = {path: {} for path in paths}  # by epoch

    def new_event(self) -> events.EpochEnded | None:
        """Return the last epoch that all trials of the job have ended, if it was not returned before."""
        first, *others = self.rows
        epoch = self._read_last_epoch(first)
        if epoch > self.epoch:  # a population has many files: they are not read for nothing
            epoch = min([epoch, *map(self._read_last_epoch, others)])
        if epoch <= self.epoch:
            return None
        self.epoch = epoch
        rows = [by_epoch.get(epoch, {}) for by_epoch in self.rows.values()]
        # SGD has no alignment.
        names = [name for name in rows[0] if all(isinstance(row.get(name), int | float) for row in rows)]
        means = {name: mean(row[name] for row in rows) for name in names}
        return events.EpochEnded(self.job, epoch, self.job.config.epochs, means)

    def _read_last_epoch(self, path: Path) -> int:
        # A damaged file is not reported: the task writes it again from its checkpoint, or fails.
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError), path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self.offsets[path]:
                self.offsets[path], self.rows[path] = 0, {}  # the task has begun again, from a checkpoint
            file.seek(self.offsets[path])
            content = file.read()
            end = content.rfind(b"\n") + 1
            self.offsets[path] += end
            self.rows[path] |= {int(row["epoch"]): row for row in parse_rows(content[:end])}
        return max(self.rows[path], default=0)


def _run_task(location: RunLocation, job: Job) -> events.TrialEvent:
    """Run a trial in a process of Ray's, which sees the GPU it may use. Return the last event."""
    device = "cuda" if location.device.startswith("cuda") else location.device
    location = replace(location, device=device, trials_per_process=1)
    configure_torch(torch.device(device))
    reported: list[Any] = []
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(2.0)  # the process that was lost may still hold it
        for _ in run_trial(job, location, reported.append):
            pass
        if not isinstance(reported[-1], events.TrialBusy):
            break
    ending: events.TrialEvent = reported[-1]
    return ending
