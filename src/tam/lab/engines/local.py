"""Trials in processes of this machine. A process that dies is replaced; its trials resume."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection, wait
from pickle import UnpicklingError
from typing import Any

import torch

from tam.lab.core.errors import LabError
from tam.lab.engines.events import EventHandler, Job, RunLocation, TrialEnded, TrialEvent, TrialFailed
from tam.lab.engines.worker import ATTEMPTS, run_jobs

SHUTDOWN_SECONDS = 10.0  # that processes have to end when they are asked to


def choose_process(
    running: Mapping[int, Collection[str]], key: str, death_counts: Mapping[str, int], limit: int
) -> int | None:
    """Return which process takes a trial, given the keys that each one runs. None if none can.

    A last attempt runs alone: trials of one process share its death.
    """

    def has_room(keys: Collection[str]) -> bool:
        is_alone = any(death_counts.get(one) == ATTEMPTS - 1 for one in (key, *keys))
        return not keys or (len(keys) < limit and not is_alone)

    able = [number for number, keys in running.items() if has_room(keys)]
    return min(able, key=lambda number: len(running[number]), default=None)


class LocalEngine:
    """The processes and their trials. A context: at its end the processes are gone.

    Each process has its own pipe: one that is killed in the middle of a message harms no other.
    """

    def __init__(self, location: RunLocation, workers: int, on_event: EventHandler) -> None:
        self.location, self.workers, self.on_event = location, workers, on_event
        self.context = multiprocessing.get_context("spawn")
        self.processes: dict[int, Any] = {}  # by number
        self.pipes: dict[int, Connection] = {}
        self.running: dict[int, dict[str, Job]] = {}  # by number and key
        self.death_counts: Counter[str] = Counter()  # of processes, by the key of a trial
        self.failures: list[TrialFailed] = []

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not any(self.running.values()):  # idle ones clean up when asked; by force Python warns
                for pipe in self.pipes.values():
                    with suppress(OSError):
                        pipe.send(None)
                self._join_processes()
        finally:
            for process in self.processes.values():
                process.terminate()
            try:
                self._join_processes()
            finally:
                for process in self.processes.values():
                    process.kill()
                    process.join()

    def _join_processes(self) -> None:
        until = time.monotonic() + SHUTDOWN_SECONDS
        for process in self.processes.values():
            process.join(max(0.0, until - time.monotonic()))

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all jobs. Raises LabError if some failed."""
        waiting = list(reversed(jobs))
        for number in range(len(self.processes), min(self.workers, len(jobs))):
            self._start_process(number)
        self._assign_jobs(waiting)
        while any(self.running.values()):
            ready = wait(list(self.pipes.values()))
            for number in [number for number, pipe in self.pipes.items() if pipe in ready]:
                try:
                    event = self.pipes[number].recv()
                except (EOFError, OSError, UnpicklingError):
                    self._replace_process(number, waiting)
                else:
                    self._handle_event(number, event)
            self._assign_jobs(waiting)
        if self.failures:
            raise TrialFailed.summarize(self.failures)

    def _start_process(self, number: int) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_run_worker, args=(self.location, theirs), daemon=True)
        with show_one_gpu(number) if self.location.device == "cuda" else nullcontext():
            process.start()
        theirs.close()  # so ours ends with the process
        self.processes[number], self.pipes[number], self.running[number] = process, ours, {}

    def _assign_jobs(self, waiting: list[Job]) -> None:
        """Send jobs to the processes with room for them."""
        limit = self.location.trials_per_process
        while waiting:
            number = choose_process(self.running, waiting[-1].key, self.death_counts, limit)
            if number is None:
                return
            job = waiting.pop()
            self.running[number][job.key] = job
            with suppress(OSError):  # it has just died: reading from its pipe will fail
                self.pipes[number].send(job)

    def _handle_event(self, number: int, event: TrialEvent) -> None:
        self.on_event(event)
        if isinstance(event, TrialEnded):
            self.running[number].pop(event.job.key, None)
        if isinstance(event, TrialFailed):
            self.failures.append(event)
            if event.stops_run:
                raise LabError(event.message)

    def _replace_process(self, number: int, waiting: list[Job]) -> None:
        """Start another process after one has died. It takes over the trials."""
        process = self.processes[number]
        process.kill()
        process.join()
        for key, job in list(self.running[number].items()):
            self.death_counts[key] += 1
            if self.death_counts[key] == ATTEMPTS - 1:
                waiting.insert(0, job)  # after the trials that can run side by side
            elif self.death_counts[key] < ATTEMPTS:
                waiting.append(job)
            else:
                message = f"trial {key}: its process died {ATTEMPTS} times (exit {process.exitcode})"
                self._handle_event(number, TrialFailed(job, message))
        self._start_process(number)


@contextmanager
def show_one_gpu(number: int) -> Iterator[None]:
    """Let a process that starts inside see one GPU, the next process the next one. Some programs take all."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = before.split(",") if before else [str(i) for i in range(max(1, torch.cuda.device_count()))]
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        os.environ |= {} if before is None else {"CUDA_VISIBLE_DEVICES": before}


def _run_worker(location: RunLocation, pipe: Connection) -> None:
    """Run jobs from the pipe: the main function of a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    parent = multiprocessing.parent_process()

    def exit_with_parent() -> None:  # a parent that is killed cannot end this process
        if parent is not None:
            parent.join()
            os._exit(1)

    def next_job(waits: bool) -> Job | None:  # the parent sends None only when no trial is left here
        job: Job | None = pipe.recv() if waits or pipe.poll() else None
        return job

    threading.Thread(target=exit_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        run_jobs(location, next_job, pipe.send)
