"""Which trials an experiment needs, given results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tam.lab.experiment import Arm, Experiment, Plan, Study, experiments
from tam.lab.images import config_of
from tam.lab.store import LabError, TrialFolder


def plan(root: Path, **more: Any) -> Plan:
    arms = (
        Arm("SGDM", "sgdm", (0.1, 0.01)),
        Arm("TAM", "tam", (0.2, 0.02)),
        Arm("TAM, d shuffled", "tam", control_of="TAM", damping="shuffled"),
        Arm("SGDM at TAM's effective lr", "sgdm", control_of="TAM", lr_ratio=0.5),
    )
    workload = {"data": "digits", "model": "tiny", "epochs": 1}
    given = {"arms": arms, "baseline": "SGDM", "seeds": (0, 1), "tuning_seeds": (100,), **more}
    study = Study("digits", "digits", workload, **given)
    experiment = Experiment("images", "", lambda *_: iter(()), config_of, {"paper": (study,)}, {}, ())
    return Plan(experiment, study, root)


def finish(root: Path, trial: dict[str, Any], validation: float, diverged: bool = False) -> None:
    folder = TrialFolder(root, trial)
    with folder.at_work():
        folder.finish({"validation": validation, "diverged": diverged})


def test_tuning_comes_first_with_other_seeds_and_no_test_images(tmp_path: Path) -> None:
    trials = plan(tmp_path).to_run()
    assert len(trials) == 4 and {trial["seed"] for trial in trials} == {100}
    assert not any(trial.get("test") for trial in trials)


def test_the_winner_is_compared_then_its_controls(tmp_path: Path) -> None:
    made = plan(tmp_path)
    best = {"sgdm": 0.1, "tam": 0.02}
    for trial in made.to_run():
        finish(tmp_path, trial, 90.0 if trial["lr"] == best[trial["optimizer"]] else 80.0)
    trials = made.to_run()
    lrs = {(trial["optimizer"], trial["lr"]) for trial in trials}
    assert lrs == {
        ("sgdm", 0.1),
        ("tam", 0.02),
        ("sgdm", 0.01),
    }  # the last is the control at half of TAM's lr
    assert all(trial["test"] for trial in trials) and {trial["seed"] for trial in trials} == {0, 1}
    for trial in trials:
        finish(tmp_path, trial, 91.0)
    controls = made.to_run()
    assert [trial["damping"] for trial in controls] == ["shuffled", "shuffled"]
    sources = made.reported(made.study.arm("TAM"))
    assert sources is not None
    assert [trial["damping_of"] for trial in controls] == [TrialFolder(tmp_path, t).key for t in sources]
    for trial in controls:
        finish(tmp_path, trial, 91.0)
    assert made.to_run() == []


def test_a_diverged_trial_does_not_win_and_edges_are_flagged(tmp_path: Path) -> None:
    made = plan(tmp_path)
    for trial in made.to_run():
        finish(tmp_path, trial, 95.0 if trial["lr"] >= 0.1 else 80.0, diverged=trial["lr"] == 0.2)
    assert made.chosen(made.study.arm("SGDM")) == (0.1, True)
    assert made.chosen(made.study.arm("TAM")) == (0.02, True)


def test_grids_are_extended_alike_until_every_winner_is_inside(tmp_path: Path) -> None:
    made = plan(tmp_path, extend=True)
    best = {"sgdm": 0.1 * 10**0.5, "tam": 0.02}  # half a decade above its grid, and the lower edge
    rounds = []
    while trials := [t for t in made.to_run() if not t.get("test")]:
        rounds.append(len(trials))
        for trial in trials:
            distance = abs(trial["lr"] / best[trial["optimizer"]] - 1)
            finish(tmp_path, trial, 90.0 - distance)
    sgdm, tam = (made.grid(made.study.arm(name)) for name in ("SGDM", "TAM"))
    assert len(sgdm) == len(tam) and sgdm[-1] / 0.1 == pytest.approx(tam[-1] / 0.2)
    for name in ("SGDM", "TAM"):
        chosen = made.chosen(made.study.arm(name))
        assert chosen is not None and not chosen[1], (name, chosen)
    assert len(rounds) > 1


def test_a_selection_keeps_what_its_arms_need(tmp_path: Path) -> None:
    study = plan(tmp_path).study.only(["TAM, d shuffled"], 1)
    assert [arm.name for arm in study.arms] == ["SGDM", "TAM", "TAM, d shuffled"] and study.seeds == (0,)
    with pytest.raises(LabError, match="has no arm 'TAN'; it has SGDM, TAM"):
        study.only(["TAN"], None)


def test_every_file_of_experiments_is_found_and_its_configs_are_valid(tmp_path: Path) -> None:
    found = experiments()
    assert "images" in found
    for experiment in found.values():
        assert {"paper", "fair", "quick", "smoke"} <= set(experiment.presets)
        for studies in experiment.presets.values():
            for study in studies:
                assert Plan(experiment, study, tmp_path).to_run()
                assert study.arm(study.baseline)
                assert not set(study.seeds) & set(study.tuning_seeds)
