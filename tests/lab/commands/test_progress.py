"""What a run prints: an overall counter, and at most two lines per trial where there is no terminal."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tam.lab.commands import progress
from tam.lab.commands.progress import ProgressDisplay
from tam.lab.core.registry import get_experiment
from tam.lab.core.runner import run
from tam.lab.core.selection import Selection
from tam.lab.core.study import Metric
from tam.lab.engines.events import (
    EpochEnded,
    Job,
    Notice,
    RoundStarted,
    RunLocation,
    TrialBusy,
    TrialFailed,
    TrialFinished,
    TrialStarted,
)
from tests.lab.experiments.test_images import config


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def declare(monkeypatch: pytest.MonkeyPatch, *metrics: Metric) -> None:
    experiment = dataclasses.replace(get_experiment("images"), metrics=metrics)
    monkeypatch.setattr(progress, "get_experiment", lambda name: experiment)


def jobs(n: int) -> list[Job]:
    return [Job("images", config(seed=seed, epochs=4), f"trial {seed}") for seed in range(n)]


def run_trial(display: ProgressDisplay, job: Job, clock: Clock, **metrics: Any) -> None:
    display(TrialStarted(job))
    for epoch in range(1, 5):
        clock.now += 10
        display(EpochEnded(job, epoch, 4, {"epoch": epoch, "loss": 1.0 / epoch, **metrics}))
    display(TrialFinished(job))


def test_two_lines_per_trial_with_an_overall_counter(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declare(monkeypatch, Metric("loss", ".2f", False), Metric("validation", ".1f", True))
    with ProgressDisplay() as display:
        display(RoundStarted(4, 10, 2))
        for job in jobs(3):
            run_trial(display, job, clock, validation=90)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 + 2 * 3
    assert lines[0] == "4 trials to run: 0/14 trials, 2 stages to go"
    assert lines[5] == f"trial 2 ({jobs(3)[2].key}): started"
    assert lines[6].endswith(
        ": finished in 40 s; loss 0.25, validation 90.0; 3/14 trials, about 7 min left, 2 stages to go"
    )


def test_without_declared_metrics_the_loss_is_shown(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declare(monkeypatch)
    with ProgressDisplay() as display:
        display(RoundStarted(1))
        run_trial(display, jobs(1)[0], clock, alignment=0.1)
    assert capsys.readouterr().err.splitlines()[-1].endswith("; loss 0.250; 1/1 trials, about 0 s left")


def test_the_estimate_counts_later_rounds_start_up_and_trials_side_by_side(clock: Clock) -> None:
    first, second = jobs(2)
    display = ProgressDisplay(quiet=True)
    display(RoundStarted(2, 2, 1))
    assert display.overall() == "0/4 trials, 1 stage to go"  # nothing is known yet
    display(TrialStarted(first))
    display(TrialStarted(second))
    clock.now += 40  # with 10 to start
    display(EpochEnded(first, 1, 4, {}))
    assert "about 5 min left" in display.overall()  # 3 epochs and 3 trials, 2 at a time
    for epoch in (2, 3, 4):
        clock.now += 30
        display(EpochEnded(first, epoch, 4, {}))
    display(TrialFinished(first))
    assert "about 3 min left" in display.overall()  # 3 trials of 130 s, 2 at a time


def test_a_trial_that_goes_on_from_a_checkpoint_is_not_taken_for_a_fast_one(clock: Clock) -> None:
    (job,) = jobs(1)
    display = ProgressDisplay(quiet=True)
    display(RoundStarted(1))
    display(TrialStarted(job))
    clock.now += 30
    display(EpochEnded(job, 2, 4, {}))
    assert "about 60 s left" in display.overall()


def test_ray_reports_no_starts(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = jobs(1)
    with ProgressDisplay() as display:
        display(RoundStarted(1))
        clock.now += 20
        display(EpochEnded(job, 1, 4, {"loss": 1.0}))
        assert "about 60 s left" in display.overall()
        display(TrialFinished(job))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].split()[0] for line in lines[1:]] == ["started", "finished"]


def test_failures_notices_and_busy_trials_are_shown(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, three = jobs(3)
    with ProgressDisplay() as display:
        display(Notice("[/]a notice[/b]"))  # not markup
        display(RoundStarted(3))
        display(TrialStarted(one))
        display(TrialStarted(one))  # its process was replaced
        display(TrialFailed(one, "no such file"))
        display(TrialBusy(two, "another process works on it"))
        display(TrialFinished(three))  # another process has finished it
    output = capsys.readouterr().err
    assert "[/]a notice[/b]" in output and output.count("trial 0") == 2
    assert "no such file" in output and "another process works on it" in output
    assert "1/1 trials" in output.splitlines()[-1]


def test_a_trial_that_is_resumed_says_from_where(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = jobs(1)
    with ProgressDisplay() as display:
        display(TrialStarted(job, 2))
    assert capsys.readouterr().err == f"trial 0 ({job.key}): continued from epoch 2 of 4\n"


def test_a_traceback_is_shown_once(clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal shows failures, too
    monkeypatch.setenv("COLUMNS", "200")
    one, two, three = jobs(3)
    with ProgressDisplay() as display:
        for job in (one, two):
            display(TrialFailed(job, "Traceback:\nValueError: bad", reason="ValueError: bad"))
        display(TrialFailed(three, "no data", stops_run=True))  # the run ends with this message
    output = capsys.readouterr().err
    assert output.count("Traceback:") == 1 and f"trial 1 ({two.key}): failed, too: ValueError: bad" in output
    assert f"trial 2 ({three.key}): failed\n" in output and "no data" not in output


def test_a_terminal_has_a_table(clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    declare(monkeypatch, Metric("validation", ".1f", True))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with ProgressDisplay() as display:
        assert display.live is not None
        display(RoundStarted(2))
        for job, value in zip(jobs(2), (90.0, 80.0), strict=True):
            display(TrialStarted(job))
            clock.now += 10
            display(EpochEnded(job, 1, 4, {"validation": value}))
        display.live.refresh()
    output = capsys.readouterr().err
    for text in ("0/2 trials", "trial 1", "epoch 1 of 4", "validation 80.0", "90.0 (trial 0)"):
        assert text in output


def test_a_run_prints_two_lines_per_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as display:
        run(Selection("toy", "smoke"), RunLocation(tmp_path, tmp_path), 1, display)
    lines = capsys.readouterr().err.splitlines()
    trials = len(list((tmp_path / "trials").iterdir()))
    rounds = [line for line in lines if "trials to run" in line]
    assert len(lines) - len(rounds) == 2 * trials
    assert f"{trials}/{trials} trials" in lines[-1]
