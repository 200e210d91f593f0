"""Trials as Ray tasks: the same results, nothing that listens on the network, and progress from files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tam.lab.engines.events import Job, RunLocation, TrialFinished
from tam.lab.engines.ray import JobMonitor, RayEngine
from tests.lab.engines.test_engines import PATHS, Dying, deaths, jobs, run_here
from tests.lab.experiments.test_images import config, outcome

LISTENING = """
import os
from contextlib import suppress
from pathlib import Path
from tam.lab.engines.events import RunLocation
from tam.lab.engines.ray import RayEngine
from tests.lab.engines.test_engines import jobs

def is_ours(pid):
    while pid > 1 and pid != os.getpid():
        with suppress(OSError):
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            continue
        return False
    return pid == os.getpid()

def addresses():
    # Of sockets that this process or a descendant listens on.
    inodes = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if is_ours(int(process.name)):
                inodes |= {os.readlink(link) for link in (process / "fd").iterdir()}
    lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in inodes]

if __name__ == "__main__":
    root = Path(os.environ["ROOT"])
    with RayEngine(RunLocation(root, root), 1, lambda event: None) as engine:
        engine.run(jobs(1))
        print("\\n".join(addresses()))
"""


def test_ray_gives_the_same_and_replaces_a_killed_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:1")  # of a cluster we were not told to use
    monkeypatch.setenv("PYTHONPATH", PATHS)
    todo = jobs(2)
    run_here(tmp_path / "whole", todo)
    root, events = tmp_path / "ray", []
    with RayEngine(RunLocation(root, tmp_path, save_every=0.0), 2, events.append) as engine:
        engine.run([Dying("images", todo[0].config), todo[1]])
    assert len(deaths(root)) == 1 and [type(event) for event in events].count(TrialFinished) == 2
    for job in todo:
        whole, found = (outcome(job.folders(path)[0]) for path in (tmp_path / "whole", root))
        assert found == whole


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no /proc/net here")
def test_without_an_address_ray_listens_on_loopback_alone(tmp_path: Path) -> None:
    (tmp_path / "listening.py").write_text(LISTENING)
    environment = {**os.environ, "PYTHONPATH": PATHS, "ROOT": str(tmp_path)}
    command = [sys.executable, str(tmp_path / "listening.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    addresses = [line.split(":")[0] for line in done.stdout.split()]
    assert len(addresses) > 3, done.stderr  # the driver's, the node's, the head's and workers'
    assert {address[-8:] for address in addresses} == {"0100007F"}, done.stdout  # 127.0.0.1, or so in IPv6


def test_a_monitor_reports_what_all_networks_of_a_population_have_done(tmp_path: Path) -> None:
    """Their mean, of what all have; damaged metrics are the worker's to set right."""
    configs = [config(seed=seed) for seed in range(3)]
    job = Job("images", configs[0], others=tuple(configs[1:]))
    folders = job.folders(tmp_path)
    monitor, events = JobMonitor(job, tmp_path), []

    def log(number: int, text: str) -> None:
        folders[number].path.mkdir(parents=True, exist_ok=True)
        with (folders[number].path / "metrics.jsonl").open("a") as file:
            file.write(text + "\n")
        events.append(monitor.new_event())

    for number in (0, 1):
        log(number, f'{{"epoch": 1, "online": {number}, "alignment": 0.5}}')
    log(0, '{"epoch": 2, "online": 9}')
    assert not any(events)  # the third has done nothing yet
    log(2, '{"epoch": 1, "online": 5}')
    event = events[-1]
    assert event is not None and (event.epoch, event.epochs) == (1, 3)
    assert event.metrics == {"epoch": 1, "online": 2}
    log(2, '{"online": 1}')
    log(1, "garbage{")
    assert not any(events[-2:])


def test_a_monitor_reads_only_what_was_appended(tmp_path: Path) -> None:
    (job,) = jobs(1)
    (folder,) = job.folders(tmp_path)
    folder.path.mkdir(parents=True)
    path, monitor = folder.path / "metrics.jsonl", JobMonitor(job, tmp_path)
    assert monitor.new_event() is None
    lines = [json.dumps({"epoch": epoch, "loss": 1.0 / epoch}) + "\n" for epoch in (1, 2, 3)]
    path.write_text(lines[0] + lines[1][:8])  # a row that is being written
    event = monitor.new_event()
    assert event is not None and event.epoch == 1
    with path.open("r+b") as file:  # what was read is not looked at again
        file.write(b"X" * (len(lines[0]) - 1))
        file.seek(0, os.SEEK_END)
        file.write(lines[1][8:].encode())
    event = monitor.new_event()
    assert event is not None and event.epoch == 2 and event.metrics["loss"] == 0.5
    folder.begin_with([json.loads(lines[0])])  # the task begins again, from the first checkpoint
    assert monitor.new_event() is None
    for line in lines[1:]:
        folder.log(json.loads(line))
    event = monitor.new_event()
    assert event is not None and event.epoch == 3


def test_a_monitor_forgets_the_rows_of_a_trial_that_begins_again(tmp_path: Path) -> None:
    configs = [config(seed=seed) for seed in range(2)]
    job = Job("images", configs[0], others=tuple(configs[1:]))
    folders, monitor = job.folders(tmp_path), JobMonitor(job, tmp_path)
    rows = [{"epoch": epoch, "loss": 1.0 / epoch} for epoch in (1, 2)]
    for folder, count in zip(folders, (2, 1), strict=True):
        folder.path.mkdir(parents=True)
        folder.begin_with(rows[:count])
    event = monitor.new_event()
    assert event is not None and event.epoch == 1
    folders[0].begin_with(rows[:1])  # it was killed before its checkpoint
    assert monitor.new_event() is None
    folders[1].log(rows[1])
    assert monitor.new_event() is None  # the first has not ended its second epoch again
    folders[0].log(rows[1])
    event = monitor.new_event()
    assert event is not None and event.epoch == 2
