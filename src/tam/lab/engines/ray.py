"""Trials as Ray tasks, on this machine or a cluster. The results' folder must be one all machines share.

A task is one trial in a process of its own. Where its process or machine is lost, Ray runs it again, and it
goes on from its checkpoint.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import mean
from typing import Any

from tam.lab.engines.work import ATTEMPTS, Event, Job, Place, work
from tam.lab.store import LabError, key_of

POLL = 0.5  # seconds


class Ray:
    """The connection to Ray. A context: at its end it is closed."""

    def __init__(
        self, place: Place, workers: int, tell: Callable[[Event], None], address: str | None = None
    ) -> None:
        self.place, self.workers, self.tell, self.address = place, workers, tell, address

    def __enter__(self) -> Ray:
        import ray

        self.ray = ray
        slots = self.workers * self.place.together
        local: dict[str, Any] = {} if self.address else {"num_cpus": slots, "include_dashboard": False}
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address=self.address or "local", log_to_driver=False, logging_level="warning", **local)
        except Exception as error:  # of many kinds, by what is wrong
            raise LabError(f"Ray cannot be reached or started: {error}") from error
        with suppress(ValueError, TypeError):  # not the main thread's, or not a handler of Python's
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray's own ends the process with a dump of its stack
        gpus = 1 / self.place.together if self.place.device.startswith("cuda") else 0
        self.task = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=ATTEMPTS - 1)(_run_one)
        return self

    def __exit__(self, *_: object) -> None:
        self.ray.shutdown()  # ends our tasks, too; to cancel one that is just ending can abort this process

    def run(self, jobs: Sequence[Job]) -> None:
        """Runs all of them. Raises LabError where some could not be done."""
        pending = {self.task.remote(self.place, job): job for job in jobs}
        epochs = dict.fromkeys((key_of(job.config) for job in jobs), 0)
        failures: list[str] = []
        while pending:
            done, _ = self.ray.wait(list(pending), timeout=POLL)
            for job in pending.values():
                self._tell_epochs(job, epochs)
            for reference in done:
                job = pending.pop(reference)
                event = self._outcome(reference, job)
                self.tell(event)
                if event.kind == "failed":
                    failures.append(event.detail["message"])
                    if event.detail["stops"]:
                        raise LabError(event.detail["message"])
        if failures:
            raise LabError("\n".join(failures))

    def _tell_epochs(self, job: Job, epochs: dict[str, int]) -> None:
        """What is new in the metrics, which lie where we can read them; of several networks their mean."""
        key, (first, *others) = key_of(job.config), job.folders(self.place.root)
        try:
            found = [first.metrics()]
            if not found[0] or found[0][-1]["epoch"] <= epochs[key]:
                return  # a population has many files: they are not read for nothing
            found += [folder.metrics() for folder in others]
            epoch = min(rows[-1]["epoch"] if rows else 0 for rows in found)
            alike = [row for rows in found for row in rows if row["epoch"] == epoch]
        except (LabError, OSError, KeyError, TypeError):
            return  # damaged: the task writes them anew from its checkpoint, or tells
        if epoch > epochs[key]:
            epochs[key] = epoch
            names = set.intersection(*map(set, alike))  # SGD has no alignment
            shown = {name: mean(row[name] for row in alike) for name in names} if others else alike[-1]
            self.tell(Event("epoch", job, {"epochs": job.config["epochs"], **shown}))

    def _outcome(self, reference: Any, job: Job) -> Event:
        try:
            event: Event = self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            message = f"trial {key_of(job.config)}: {type(error).__name__} after {ATTEMPTS} attempts: {error}"
            return Event("failed", job, {"message": message, "stops": False})
        return event


def _run_one(place: Place, job: Job) -> Event:
    """In a process of Ray's, which sees the GPU it may use: the trial's last event."""
    if place.device.startswith("cuda"):
        place = replace(place, device="cuda")
    waiting: list[Job | None] = [job, None]
    events: list[Event] = []
    for _ in range(ATTEMPTS):
        work(place.alone(), lambda _: waiting.pop(0), events.append)
        if events[-1].kind != "busy":
            break
        time.sleep(2.0)  # the process that was lost may still hold it
        waiting[:] = [job, None]
    return events[-1]
