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
from tam.lab.engines import local
from tam.lab.engines.local import Local
from tam.lab.engines.ray import Ray
from tam.lab.engines.work import Event, Job, Place, work
from tam.lab.store import LabError, TrialFolder
from tests.lab.test_images import config, outcome

PATHS = os.pathsep.join(str(path) for path in (Path(__file__).parents[2], Path(tam.__file__).parents[1]))


def jobs(n: int, **more: Any) -> list[Job]:
    return [Job("images", config(seed=seed, **more)) for seed in range(n)]


def here(root: Path, todo: list[Job], together: int = 1) -> list[Event]:
    """In this process."""
    waiting, events = [*todo, None], []
    work(Place(root, root, together=together, save_every=0.0), lambda _: waiting.pop(0), events.append)
    return events


def test_side_by_side_or_one_after_the_other(tmp_path: Path) -> None:
    for together in (1, 2):
        events = here(tmp_path / str(together), jobs(3), together)
        assert [event.kind for event in events].count("done") == 3
    for job in jobs(3):
        one, two = (outcome(TrialFolder(tmp_path / str(n), job.config)) for n in (1, 2))
        assert one == two


def test_on_a_gpu_no_kernel_that_adds_is_chosen_by_its_time() -> None:
    """In a process of its own: the settings are torch's, for all that runs in one."""
    program = """if True:
        import os, types, torch
        from tam.lab.engines.work import prepare

        torch.backends.cudnn.benchmark = True
        prepare(torch.device("cuda"))
        print(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
        print(torch._inductor.config.deterministic, os.environ["CUBLAS_WORKSPACE_CONFIG"])
        torch._inductor.config = types.SimpleNamespace()  # of an older torch
        prepare(torch.device("cuda"))
        print(vars(torch._inductor.config))"""
    without = {k: v for k, v in os.environ.items() if k != "CUBLAS_WORKSPACE_CONFIG"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=without)
    assert done.stdout.split() == ["False", "True", "True", ":4096:8", "{}"], done.stderr


def test_a_finished_trial_is_not_run_again(tmp_path: Path) -> None:
    here(tmp_path, jobs(1))
    path = TrialFolder(tmp_path, jobs(1)[0].config).path / "result.json"
    before = path.stat().st_mtime_ns
    assert [event.kind for event in here(tmp_path, jobs(1))] == ["done"]
    assert path.stat().st_mtime_ns == before


def test_workers_end_by_themselves_when_all_is_done_and_by_force_when_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By themselves they clean up; else Python warns at the end of semaphores that were left."""
    monkeypatch.setattr(local, "TO_END", 100.0)  # so that a slow machine's end by themselves, too
    with Local(Place(tmp_path, tmp_path), 2, lambda event: None) as engine:
        engine.run(jobs(2))
    assert [process.exitcode for process in engine.processes.values()] == [0, 0]
    bad = Job("images", {**jobs(1)[0].config, "model": "none"})
    with pytest.raises(LabError), Local(Place(tmp_path, tmp_path), 1, lambda event: None) as engine:
        engine.run([bad])
    assert [process.exitcode for process in engine.processes.values()] == [0]

    def stop(event: Event) -> None:
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        Local(Place(tmp_path / "stopped", tmp_path), 1, stop) as engine,
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
    monkeypatch.setattr(local, "TO_END", 100.0)
    engine = Local(Place(tmp_path, tmp_path), 2, lambda event: None)
    with pytest.raises(BlockingIOError, match="too many processes"), engine:
        engine.run(jobs(2))
    assert [process.exitcode for process in engine.processes.values()] == [0]


def test_a_worker_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "TO_END", 0.5)
    with Local(Place(tmp_path, tmp_path), 1, lambda event: None) as engine:
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
    here(tmp_path / "whole", todo)
    epochs: list[int] = []  # of the trial that is killed
    dying = Dying("images", todo[0].config)

    def tell(event: Event) -> None:
        if event.job == dying:
            epochs.append(event.detail.get("epoch", 0))

    root = tmp_path / "killed"
    with Local(Place(root, tmp_path, save_every=0.0), 1, tell) as engine:
        engine.run([dying, todo[1]])
    assert len(deaths(root)) == 1 and engine.processes[0].pid not in deaths(root)
    assert epochs == [0, 1, 0, 2, 3, 0]  # it began again, but from the first epoch's checkpoint
    for job in todo:
        whole, found = (outcome(job.folder(path)) for path in (tmp_path / "whole", root))
        assert found == whole


def test_a_trial_finished_by_another_process_meanwhile_is_not_run_again(tmp_path: Path) -> None:
    (job,) = jobs(1)
    folder = job.folder(tmp_path)
    with folder.at_work():
        thread = threading.Thread(target=here, args=(tmp_path, [job]))
        thread.start()  # it waits a moment for the lock
        folder.finish({"validation": 99.0, "diverged": False}, 1.0, torch.device("cpu"))
    thread.join()
    assert folder.result is not None and folder.result["validation"] == 99.0


def test_a_trial_that_kills_its_process_is_given_up(tmp_path: Path) -> None:
    dying = Dying("images", config(), times=9)
    with (
        Local(Place(tmp_path, tmp_path), 1, lambda event: None) as engine,
        pytest.raises(LabError, match="died 3 times"),
    ):
        engine.run([dying])
    assert len(set(deaths(tmp_path))) == 3


def test_processes_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    code = (
        "from tests.lab.test_engines import Local, Place, jobs\n"
        "from pathlib import Path\nimport sys\n"
        "root = Path(sys.argv[1])\n"
        "def tell(event): print(engine.processes[0].pid, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    with Local(Place(root, root), 1, tell) as engine: engine.run(jobs(1, epochs=2000))\n"
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
        here(tmp_path, jobs(1))


def test_missing_data_stops_the_run_with_its_message(tmp_path: Path) -> None:
    with Local(Place(tmp_path, tmp_path), 1, lambda _: None) as engine, pytest.raises(LabError) as error:
        engine.run(jobs(2, data="cifar10", model="resnet18"))
    assert "cifar-10-batches-bin/data_batch_1.bin is missing" in str(error.value)


def test_one_failure_does_not_lose_the_others(tmp_path: Path) -> None:
    todo = jobs(2)
    todo.insert(1, Job("images", {**todo[0].config, "nonsense": 1}))
    events = here(tmp_path, todo)
    assert [event.kind for event in events if event.kind in ("done", "failed")] == ["done", "failed", "done"]
    (failed,) = [event for event in events if event.kind == "failed"]
    assert "nonsense" in failed.detail["message"] and not failed.detail["stops"]


def test_a_trial_at_work_elsewhere_is_left_alone(tmp_path: Path) -> None:
    (job,) = jobs(1)
    with job.folder(tmp_path).at_work():
        events = here(tmp_path, [job])
    assert [event.kind for event in events] == ["busy"]


def test_ray_gives_the_same_and_replaces_a_killed_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:1")  # of a cluster we were not told to use
    monkeypatch.setenv("PYTHONPATH", PATHS)
    todo = jobs(2)
    here(tmp_path / "whole", todo)
    root, told = tmp_path / "ray", []
    with Ray(Place(root, tmp_path, save_every=0.0), 2, told.append) as engine:
        engine.run([Dying("images", todo[0].config), todo[1]])
    assert len(deaths(root)) == 1 and [event.kind for event in told].count("done") == 2
    for job in todo:
        whole, found = (outcome(job.folder(path)) for path in (tmp_path / "whole", root))
        assert found == whole


def test_ray_tells_of_what_all_networks_of_a_population_have_done(tmp_path: Path) -> None:
    """Their mean, of what all have; damaged metrics are the worker's to set right."""
    configs = [config(seed=seed) for seed in range(3)]
    job = Job("images", configs[0], others=tuple(configs[1:]))
    folders = job.folders(tmp_path)
    told: list[Event] = []
    engine, epochs = Ray(Place(tmp_path, tmp_path), 1, told.append), {folders[0].key: 0}

    def log(number: int, text: str) -> None:
        folders[number].path.mkdir(parents=True, exist_ok=True)
        with (folders[number].path / "metrics.jsonl").open("a") as file:
            file.write(text + "\n")
        engine._tell_epochs(job, epochs)

    for number in (0, 1):
        log(number, f'{{"epoch": 1, "online": {number}, "alignment": 0.5}}')
    log(0, '{"epoch": 2, "online": 9}')
    assert not told  # the third has done nothing yet
    log(2, '{"epoch": 1, "online": 5}')
    (event,) = told
    assert event.detail == {"epochs": 3, "epoch": 1, "online": 2} and epochs[folders[0].key] == 1
    log(2, '{"online": 1}')
    log(1, "garbage{")
    assert len(told) == 1


def test_each_process_sees_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    for number, expected in enumerate(("3", "5", "3")):
        with local._seeing(number):
            assert os.environ["CUDA_VISIBLE_DEVICES"] == expected
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3,5"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with local._seeing(1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
