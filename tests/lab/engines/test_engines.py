"""Trials in processes: a killed one is replaced, and the result is that of an undisturbed run."""

from __future__ import annotations

import multiprocessing.context
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tam
from tam.lab.core.errors import LabError
from tam.lab.core.store import TrialFolder
from tam.lab.engines import local
from tam.lab.engines.events import (
    EpochEnded,
    Event,
    Job,
    RunLocation,
    TrialBusy,
    TrialEnded,
    TrialEvent,
    TrialFailed,
    TrialFinished,
    TrialStarted,
)
from tam.lab.engines.local import LocalEngine, show_one_gpu
from tam.lab.engines.worker import run_jobs
from tests.lab.experiments.test_images import config, outcome

PATHS = os.pathsep.join(str(path) for path in (Path(__file__).parents[3], Path(tam.__file__).parents[1]))


def jobs(n: int, **more: Any) -> list[Job]:
    return [Job("images", config(seed=seed, **more)) for seed in range(n)]


def bad_job() -> Job:
    """Return a job whose trial fails."""
    return Job("images", config(options={"nonsense": 1}))


def run_here(root: Path, todo: list[Job], together: int = 1) -> list[Any]:
    """Run jobs in this process and return the events."""
    waiting, events = iter(todo), []
    location = RunLocation(root, root, trials_per_process=together, save_every=0.0)
    run_jobs(location, lambda _: next(waiting, None), events.append)
    return events


def test_side_by_side_or_one_after_the_other(tmp_path: Path) -> None:
    for together in (1, 2):
        events = run_here(tmp_path / str(together), jobs(3), together)
        assert [type(event) for event in events].count(TrialFinished) == 3
    for job in jobs(3):
        one, two = (outcome(TrialFolder(tmp_path / str(n), job.config)) for n in (1, 2))
        assert one == two


def test_on_a_gpu_no_kernel_that_adds_is_chosen_by_its_time() -> None:
    """In a process of its own: the settings are torch's, for all that runs in one."""
    program = """if True:
        import os, types, torch
        from tam.lab.engines.worker import configure_torch

        torch.backends.cudnn.benchmark = True
        configure_torch(torch.device("cuda"))
        print(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
        print(torch._inductor.config.deterministic, os.environ["CUBLAS_WORKSPACE_CONFIG"])
        torch._inductor.config = types.SimpleNamespace()  # of an older torch
        configure_torch(torch.device("cuda"))
        print(vars(torch._inductor.config))"""
    without = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=without)
    assert done.stdout.split() == ["False", "True", "True", ":4096:8", "{}"], done.stderr


def test_a_finished_trial_is_not_run_again(tmp_path: Path) -> None:
    run_here(tmp_path, jobs(1))
    path = TrialFolder(tmp_path, jobs(1)[0].config).path / "result.json"
    before = path.stat().st_mtime_ns
    assert [type(event) for event in run_here(tmp_path, jobs(1))] == [TrialFinished]
    assert path.stat().st_mtime_ns == before


def test_workers_end_by_themselves_when_all_is_done_and_by_force_when_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By themselves they clean up; else Python warns at the end of semaphores that were left."""
    monkeypatch.setattr(local, "SHUTDOWN_SECONDS", 100.0)  # so that a slow machine's end by themselves, too
    with LocalEngine(RunLocation(tmp_path, tmp_path), 2, lambda event: None) as engine:
        engine.run(jobs(2))
    assert [process.exitcode for process in engine.processes.values()] == [0, 0]
    bad = bad_job()
    with (
        pytest.raises(LabError, match=r"^1 trial failed: \w+: .*nonsense.* Finished trials are kept\.$"),
        LocalEngine(RunLocation(tmp_path, tmp_path), 1, lambda event: None) as engine,
    ):
        engine.run([bad])
    assert [process.exitcode for process in engine.processes.values()] == [0]

    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        LocalEngine(RunLocation(tmp_path / "stopped", tmp_path), 1, stop) as engine,
    ):
        engine.run(jobs(1, epochs=40))
    assert [process.exitcode for process in engine.processes.values()] == [-signal.SIGTERM]


def test_why_a_worker_could_not_be_started_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = multiprocessing.context.SpawnProcess.start

    def first_only(process: Any) -> None:
        if engine.processes:
            raise BlockingIOError(11, "too many processes")
        start(process)

    monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", first_only)
    monkeypatch.setattr(local, "SHUTDOWN_SECONDS", 100.0)
    engine = LocalEngine(RunLocation(tmp_path, tmp_path), 2, lambda event: None)
    with pytest.raises(BlockingIOError, match="too many processes"), engine:
        engine.run(jobs(2))
    assert [process.exitcode for process in engine.processes.values()] == [0]


def test_a_worker_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SHUTDOWN_SECONDS", 0.5)
    with LocalEngine(RunLocation(tmp_path, tmp_path), 1, lambda event: None) as engine:
        engine.run(jobs(1))
        os.kill(engine.processes[0].pid, signal.SIGSTOP)
    assert [process.exitcode for process in engine.processes.values()] == [-signal.SIGKILL]


@dataclass(frozen=True)
class Dying(Job):
    """Its process is killed at the end of an epoch, so many times."""

    at: int = 2
    times: int = 1

    def folders(self, root: Path) -> list[TrialFolder]:
        return [Mortal(root, self)]


class Mortal(TrialFolder):
    def __init__(self, root: Path, job: Dying) -> None:
        super().__init__(root, job.config)
        self.root, self.job = root, job

    def log(self, row: Any) -> None:
        super().log(row)
        if row["epoch"] == self.job.at and len(deaths(self.root)) < self.job.times:
            with (self.root / "deaths").open("a") as file:
                file.write(f"{os.getpid()}\n")
            os.kill(os.getpid(), signal.SIGKILL)


def deaths(root: Path) -> list[int]:
    path = root / "deaths"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    todo = jobs(2)
    run_here(tmp_path / "whole", todo)
    epochs: list[int] = []  # of the trial that is killed
    dying = Dying("images", todo[0].config)

    def on_event(event: Event) -> None:
        if isinstance(event, TrialEvent) and event.job == dying:
            epochs.append(event.epoch if isinstance(event, EpochEnded | TrialStarted) else 0)

    root = tmp_path / "killed"
    with LocalEngine(RunLocation(root, tmp_path, save_every=0.0), 1, on_event) as engine:
        engine.run([dying, todo[1]])
    assert len(deaths(root)) == 1 and engine.processes[0].pid not in deaths(root)
    assert epochs == [0, 1, 1, 2, 3, 0]  # it started again, from the first epoch's checkpoint
    for job in todo:
        whole, found = (outcome(job.folders(path)[0]) for path in (tmp_path / "whole", root))
        assert found == whole


def test_a_trial_finished_by_another_process_meanwhile_is_not_run_again(tmp_path: Path) -> None:
    (job,) = jobs(1)
    (folder,) = job.folders(tmp_path)
    with folder.at_work():
        thread = threading.Thread(target=run_here, args=(tmp_path, [job]))
        thread.start()  # it waits a moment for the lock
        folder.finish({"validation": 99.0, "diverged": False}, 1.0, torch.device("cpu"))
    thread.join()
    assert folder.read_result() is not None and folder.read_result()["validation"] == 99.0


def test_a_trial_that_kills_its_process_is_given_up(tmp_path: Path) -> None:
    dying = Dying("images", config(), times=9)
    with (
        LocalEngine(RunLocation(tmp_path, tmp_path), 1, lambda event: None) as engine,
        pytest.raises(LabError, match="died 3 times"),
    ):
        engine.run([dying])
    assert len(set(deaths(tmp_path))) == 3


def test_a_trial_that_kills_its_process_does_not_fail_those_beside_it(tmp_path: Path) -> None:
    whole, *others = jobs(4)
    dying = Dying("images", whole.config, times=9)
    location = RunLocation(tmp_path, tmp_path, trials_per_process=4)
    with (
        LocalEngine(location, 1, lambda event: None) as engine,
        pytest.raises(LabError, match="died 3 times"),
    ):
        engine.run([dying, *others])
    assert [failure.job for failure in engine.failures] == [dying]
    for job in others:
        (folder,) = job.folders(tmp_path)
        assert folder.read_result() is not None


@pytest.mark.parametrize(
    ("running", "deaths", "number"),
    [
        ({0: ["b", "c"], 1: ["d"]}, {}, 1),
        ({0: ["b", "c", "d"], 1: ["e", "f", "g"]}, {}, None),
        ({0: ["b"], 1: ["c", "d"]}, {"b": 2}, 1),  # a last attempt leaves the other process its places
        ({0: ["b"], 1: ["c", "d"]}, {"a": 2}, None),
        ({0: ["b"], 1: []}, {"a": 2, "b": 2}, 1),
        ({0: ["b"], 1: ["c", "d"]}, {"a": 1, "b": 1}, 0),
    ],
)
def test_the_process_that_takes_a_trial(
    running: dict[int, list[str]], deaths: dict[str, int], number: int | None
) -> None:
    assert local.choose_process(running, "a", deaths, limit=3) == number


def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "from tests.lab.engines.test_engines import LocalEngine, RunLocation, jobs\n"
        "from pathlib import Path\nimport sys\n"
        "root = Path(sys.argv[1])\n"
        "def on_event(event): print(engine.processes[0].pid, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    with LocalEngine(RunLocation(root, root), 1, on_event) as engine:\n"
        "        engine.run(jobs(1, epochs=2000))\n"
    )
    (tmp_path / "parent.py").write_text(code)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "parent.py"), str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": PATHS},
    )  # fmt: skip
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    process.kill()
    process.wait()
    latest = time.monotonic() + 60
    with suppress(OSError):  # it is gone
        while Path(f"/proc/{worker}/cmdline").read_bytes():
            assert time.monotonic() < latest, "the worker outlives its parent"
            time.sleep(0.1)


def test_a_device_that_fails_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a CUDA error nothing more can be done there; a trial's own error is its own."""

    def fails(*given: object, **more: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("torch.optim.SGD.step", fails)
    monkeypatch.setattr("tam.TAM.step", fails)
    with pytest.raises(RuntimeError, match="device-side assert"):
        run_here(tmp_path, jobs(1))


def test_missing_data_stops_the_run_with_its_message(tmp_path: Path) -> None:
    with (
        LocalEngine(RunLocation(tmp_path, tmp_path), 1, lambda _: None) as engine,
        pytest.raises(LabError) as error,
    ):
        engine.run(jobs(2, data="cifar10", model="resnet18"))
    assert "cifar10 is incomplete: 6 of 6 files" in str(error.value)


def test_one_failure_does_not_lose_the_others(tmp_path: Path) -> None:
    todo = jobs(2)
    todo.insert(1, bad_job())
    events = run_here(tmp_path, todo)
    endings = [event for event in events if isinstance(event, TrialEnded)]
    assert [type(event) for event in endings] == [TrialFinished, TrialFailed, TrialFinished]
    assert "nonsense" in endings[1].message and not endings[1].stops_run


def test_the_summary_of_failures_names_each_reason_once() -> None:
    failures = [
        TrialFailed.from_error(job, ValueError(f"bad {job.config.seed % 4}.\nmore")) for job in jobs(5)
    ]
    expected = "5 trials failed: ValueError: bad 0; ValueError: bad 1; ValueError: bad 2; ..."
    assert str(TrialFailed.summarize(failures)) == f"{expected}. Finished trials are kept."
    assert str(TrialFailed.summarize(failures[:1])).startswith("1 trial failed: ValueError: bad 0. Finished")


def test_a_trial_at_work_elsewhere_is_left_alone(tmp_path: Path) -> None:
    (job,) = jobs(1)
    with job.folders(tmp_path)[0].at_work():
        events = run_here(tmp_path, [job])
    assert [type(event) for event in events] == [TrialBusy]


def test_each_process_sees_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    for number, expected in enumerate(("3", "5", "3")):
        with show_one_gpu(number):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with show_one_gpu(1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_missing_package_stops_the_run_without_a_traceback() -> None:
    (job,) = jobs(1)
    failure = TrialFailed.from_error(job, ModuleNotFoundError(name="scipy"))
    assert failure.stops_run and failure.message.endswith("pip install '.[lab]'")
    assert not TrialFailed.from_error(job, ModuleNotFoundError(name="no_such_package")).stops_run
