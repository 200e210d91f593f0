"""The rounds of a run, how many trials are left, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tam.lab.core.errors import LabError
from tam.lab.core.plan import Plan
from tam.lab.core.registry import get_experiment
from tam.lab.core.results import Results, load_results
from tam.lab.core.runner import _jobs, check_device, count_trials, run
from tam.lab.core.selection import Selection, select_plans
from tam.lab.core.store import TrialFolder
from tam.lab.core.study import Population, Study, Variant
from tam.lab.engines import torchrun
from tam.lab.engines.events import (
    Event,
    EventHandler,
    Job,
    RoundStarted,
    RunLocation,
    TrialBusy,
    TrialEnded,
    TrialFinished,
)
from tam.lab.engines.local import LocalEngine

CPU = torch.device("cpu")


def tuned_study() -> Study:
    """Return a study with a tuning round, a comparison and a control whose d is replaced."""
    (study, *_) = get_experiment("toy").presets["smoke"]
    variants = (
        Variant("SGDM", "sgdm", (0.1, 0.2)),
        Variant("TAM", "tam", (0.2, 0.4)),
        Variant("TAM, d shuffled", "tam", control_of="TAM", damping="shuffled"),
    )
    return Study(
        "rounds", "Rounds", study.workload, variants, "SGDM", seeds=(0, 1, 2), tuning_seeds=(7,),
        outcome=study.outcome, higher=study.higher,
    )  # fmt: skip


def finish(trials: list[Any], root: Path) -> None:
    for _, trial in trials:
        folder = TrialFolder(root, trial)
        with folder.at_work():
            folder.finish({"diverged": False, "final": 1.0}, 1.0, CPU)


def test_trials_of_later_rounds_are_counted(tmp_path: Path) -> None:
    def plan() -> Plan:
        return Plan(get_experiment("toy"), tuned_study(), load_results(tmp_path))

    assert count_trials([plan()]) == RoundStarted(4, 9, 2)  # the comparison, then the control
    finish(plan().to_run(), tmp_path)
    assert count_trials([plan()]) == RoundStarted(6, 3, 1)
    finish(plan().to_run()[:1], tmp_path)
    assert count_trials([plan()]) == RoundStarted(5, 3, 1)
    finish(plan().to_run(), tmp_path)
    assert count_trials([plan(), plan()]) == RoundStarted(3, 0, 0)  # a trial of two studies counts once
    finish(plan().to_run(), tmp_path)
    assert count_trials([plan()]) == RoundStarted(0, 0, 0)


def test_rounds_add_up(tmp_path: Path) -> None:
    """What a round expects of later ones is what they have."""
    events: list[Event] = []
    run(Selection("toy", "smoke"), RunLocation(tmp_path, tmp_path), 1, events.append)
    rounds = [event for event in events if isinstance(event, RoundStarted)]
    finished = sum(isinstance(event, TrialFinished) for event in events)
    assert sum(event.trials for event in rounds) == finished == len(load_results(tmp_path).records)
    assert rounds[0].trials + rounds[0].later_trials >= finished
    assert (rounds[-1].later_trials, rounds[-1].later_rounds) == (0, 0)
    assert [event.later_rounds for event in rounds] == list(range(len(rounds)))[::-1]


@pytest.mark.parametrize("event", [TrialBusy, TrialFinished])
def test_trials_that_another_run_takes_first_are_tried_again(
    event: type[TrialEnded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run can be killed before its trials are looked at again."""
    rounds: list[Sequence[Job]] = []

    class Engine(LocalEngine):
        def run(self, jobs: Sequence[Job]) -> None:
            rounds.append(jobs)
            if len(rounds) > 1:
                super().run(jobs)
                return
            for job in jobs:
                self.on_event(event(job))

    def make_engine(
        name: str, location: RunLocation, workers: int, on_event: EventHandler, *_: Any
    ) -> Engine:
        return Engine(location, workers, on_event)

    monkeypatch.setattr("tam.lab.core.runner.make_engine", make_engine)
    arguments = Selection("toy", "smoke"), RunLocation(tmp_path, tmp_path), 1, lambda event: None
    if event is TrialFinished:  # a result that is not in the folder never comes
        with pytest.raises(LabError, match="trials left no result"):
            run(*arguments)
        return
    run(*arguments)
    assert rounds[0] == rounds[1] and len(load_results(tmp_path).records) >= len(rounds[0])


def test_a_figure_that_is_no_number_is_named(tmp_path: Path) -> None:
    (plan, *_) = select_plans(Selection("toy", "smoke"), load_results(tmp_path))
    for _, trial in plan.to_run():
        folder = TrialFolder(tmp_path, trial)
        with folder.at_work():
            folder.finish({"diverged": False, plan.study.outcome: "good"}, 1.0, CPU)
    plan.results.refresh()
    with pytest.raises(LabError, match=r"result.json of trial .* is damaged: .* is no number"):
        [outcome.values(plan.study.outcome) for outcome in plan.outcomes()]


def test_a_device_that_is_missing_and_one_that_is_none_differ() -> None:
    check_device("cpu", 0)
    check_device("cuda:1", 2)
    for name in ("tpu", "cuda:x", "", "meta"):
        with pytest.raises(LabError, match=f"--device must be auto, cpu, cuda or cuda:N, got {name!r}"):
            check_device(name, 1)
    with pytest.raises(LabError, match="--device cuda: no such GPU, this machine has none"):
        check_device("cuda", 0)
    with pytest.raises(LabError, match="--device cuda:3: no such GPU, this machine has 2"):
        check_device("cuda:3", 2)


def test_a_rank_in_the_environment_alone_does_not_silence_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("RANK", "1")
    assert torchrun.is_first_rank()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert not torchrun.is_first_rank()
    monkeypatch.setenv("RANK", "0")
    assert torchrun.is_first_rank()


@pytest.mark.parametrize(
    "limit, sizes",
    [(None, [7]), (7, [7]), (100, [7]), (6, [3, 4]), (3, [2, 2, 3]), (2, [1, 2, 2, 2]), (1, [1] * 7)],
)
def test_populations_are_split_evenly_and_keep_their_order(limit: int | None, sizes: list[int]) -> None:
    study = replace(tuned_study(), variants=(Variant("SGDM", "sgdm", (0.1,)),), seeds=tuple(range(7)))
    population = Population(
        run=lambda *_: iter(()), kind=lambda config: "one kind", limit=limit and (lambda config: limit)
    )
    plan = Plan(replace(get_experiment("toy"), population=population), study, Results())
    jobs = _jobs(plan.experiment, [plan])
    assert [job.size for job in jobs] == sizes
    assert [config.seed for job in jobs for config in (job.config, *job.others)] == [*range(7)]
    assert [job.label for job in jobs] == [f"{size} networks at once, one kind" for size in sizes]


def test_the_smallest_limit_of_a_kind_counts_and_must_be_positive() -> None:
    plan = Plan(get_experiment("toy"), tuned_study(), Results())  # 4 trials can run now

    def jobs(limits: list[int]) -> list[int]:
        population = Population(
            run=lambda *_: iter(()), kind=lambda config: config.optimizer,
            limit=lambda config: limits[config.optimizer == "tam"],
        )  # fmt: skip
        return [job.size for job in _jobs(replace(plan.experiment, population=population), [plan])]

    assert jobs([1, 2]) == [1, 1, 2]
    with pytest.raises(LabError, match="limit of a population must be at least 1, got 0 for tam"):
        jobs([1, 0])
