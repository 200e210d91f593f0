"""Trials in processes of this machine. One that dies is replaced; its trials go on from their checkpoints."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from multiprocessing.connection import Connection, wait
from pickle import UnpicklingError
from typing import Any

import torch

from tam.lab.engines.work import ATTEMPTS, Event, Job, Place, work
from tam.lab.store import LabError, key_of

TO_END = 10.0  # seconds processes may take to end when they are asked to


class Local:
    """The processes, and who works on what. A context: at its end they are gone.

    Each process has a pipe of its own: one that is killed in the middle of a message harms no other.
    """

    def __init__(self, place: Place, workers: int, tell: Callable[[Event], None]) -> None:
        self.place, self.workers, self.tell = place, workers, tell
        self.context = multiprocessing.get_context("spawn")
        self.processes: dict[int, Any] = {}  # by number
        self.pipes: dict[int, Connection] = {}
        self.at_work: dict[int, dict[str, Job]] = {}  # by number and key
        self.deaths: dict[str, int] = {}  # of processes, by the key of a trial
        self.failures: list[str] = []

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if not any(self.at_work.values()):  # idle ones clean up when asked; by force Python warns
                for pipe in self.pipes.values():
                    with suppress(OSError):
                        pipe.send(None)
                self._wait()
        finally:
            for process in self.processes.values():
                process.terminate()
            try:
                self._wait()
            finally:
                for process in self.processes.values():
                    process.kill()
                    process.join()

    def _wait(self) -> None:
        until = time.monotonic() + TO_END
        for process in self.processes.values():
            process.join(max(0.0, until - time.monotonic()))

    def run(self, jobs: Sequence[Job]) -> None:
        """Runs all of them. Raises LabError where some could not be done."""
        waiting = list(reversed(jobs))
        for number in range(min(self.workers, len(jobs))):
            if number not in self.processes:
                self._start(number)
        self._hand_out(waiting)
        while any(self.at_work.values()):
            ready = wait(list(self.pipes.values()))
            for number, pipe in list(self.pipes.items()):
                if pipe in ready:
                    try:
                        event = pipe.recv()
                    except (EOFError, OSError, UnpicklingError):
                        self._replace(number, waiting)
                    else:
                        self._take_note(number, event)
            self._hand_out(waiting)
        if self.failures:
            raise LabError("\n".join(self.failures))

    def _start(self, number: int) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_main, args=(self.place, theirs), daemon=True)
        with _seeing(number) if self.place.device == "cuda" else nullcontext():
            process.start()
        theirs.close()  # so that ours ends with the process
        self.processes[number], self.pipes[number], self.at_work[number] = process, ours, {}

    def _hand_out(self, waiting: list[Job]) -> None:
        """To whoever has the least to do."""
        while waiting:
            number = min(self.at_work, key=lambda n: len(self.at_work[n]))
            if len(self.at_work[number]) >= self.place.together:
                return
            job = waiting.pop()
            self.at_work[number][key_of(job.config)] = job
            with suppress(OSError):  # it has just died: we will hear of it
                self.pipes[number].send(job)

    def _take_note(self, number: int, event: Event) -> None:
        self.tell(event)
        if event.kind in ("done", "busy", "failed"):
            self.at_work[number].pop(key_of(event.job.config), None)
        if event.kind == "failed":
            self.failures.append(event.detail["message"])
            if event.detail["stops"]:
                raise LabError(event.detail["message"])

    def _replace(self, number: int, waiting: list[Job]) -> None:
        """A process has died: another one takes over its trials."""
        process = self.processes[number]
        process.kill()
        process.join()
        for key, job in self.at_work[number].items():
            self.deaths[key] = self.deaths.get(key, 0) + 1
            if self.deaths[key] < ATTEMPTS:
                waiting.append(job)
            else:
                message = f"trial {key}: its process died {ATTEMPTS} times (exit {process.exitcode})"
                self.failures.append(message)
        self._start(number)


@contextmanager
def _seeing(number: int) -> Iterator[None]:
    """A process that begins inside sees one GPU, the next process the next one; some programs take all."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    known = before.split(",") if before else [str(i) for i in range(max(1, torch.cuda.device_count()))]
    os.environ["CUDA_VISIBLE_DEVICES"] = known[number % len(known)]
    try:
        yield
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        os.environ |= {} if before is None else {"CUDA_VISIBLE_DEVICES": before}


def _main(place: Place, pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    threading.Thread(target=_end_with_the_parent, daemon=True).start()

    def take(waits: bool) -> Job | None:
        if not waits and not pipe.poll():
            raise queue.Empty
        job: Job | None = pipe.recv()
        return job

    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        work(place, take, pipe.send)


def _end_with_the_parent() -> None:
    """A parent that is killed cannot end us; trials go on from their checkpoints."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
