"""Which trials an experiment needs, given results."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tam.lab.experiment import Arm, Experiment, Plan, Study, experiments
from tam.lab.images import config_of
from tam.lab.store import LabError, TrialFolder
from tam.lab.variants import with_controls


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


def to_run(made: Plan) -> list[dict[str, Any]]:
    return [trial for _, trial in made.to_run()]


def finish(root: Path, trial: dict[str, Any], validation: float, diverged: bool = False) -> None:
    folder = TrialFolder(root, trial)
    with folder.at_work():
        folder.finish({"validation": validation, "diverged": diverged}, 1.0, torch.device("cpu"))


def test_tuning_comes_first_with_other_seeds_and_no_test_images(tmp_path: Path) -> None:
    trials = to_run(plan(tmp_path))
    assert len(trials) == 4 and {trial["seed"] for trial in trials} == {100}
    assert not any(trial.get("test") for trial in trials)


def test_the_winner_is_compared_then_its_controls(tmp_path: Path) -> None:
    made = plan(tmp_path)
    best = {"sgdm": 0.1, "tam": 0.02}
    for trial in to_run(made):
        finish(tmp_path, trial, 90.0 if trial["lr"] == best[trial["optimizer"]] else 80.0)
    trials = to_run(made)
    lrs = {(trial["optimizer"], trial["lr"]) for trial in trials}
    assert lrs == {
        ("sgdm", 0.1),
        ("tam", 0.02),
        ("sgdm", 0.01),
    }  # the last is the control at half of TAM's lr
    assert all(trial["test"] for trial in trials) and {trial["seed"] for trial in trials} == {0, 1}
    for trial in trials:
        finish(tmp_path, trial, 91.0)
    controls = to_run(made)
    assert [trial["damping"] for trial in controls] == ["shuffled", "shuffled"]
    sources = made.reported(made.study.arm("TAM"))
    assert sources is not None
    assert [trial["damping_of"] for trial in controls] == [TrialFolder(tmp_path, t).key for t in sources]
    for trial in controls:
        finish(tmp_path, trial, 91.0)
    assert to_run(made) == []


def test_a_diverged_trial_does_not_win_and_edges_are_flagged(tmp_path: Path) -> None:
    made = plan(tmp_path)
    for trial in to_run(made):
        finish(tmp_path, trial, 95.0 if trial["lr"] >= 0.1 else 80.0, diverged=trial["lr"] == 0.2)
    assert made.chosen(made.study.arm("SGDM")) == (0.1, True)
    assert made.chosen(made.study.arm("TAM")) == (0.02, True)


def test_grids_are_extended_alike_until_every_winner_is_inside(tmp_path: Path) -> None:
    made = plan(tmp_path, extend=True)
    best = {"sgdm": 0.1 * 10**0.5, "tam": 0.02}  # half a decade above its grid, and the lower edge
    rounds = []
    while trials := [t for t in to_run(made) if not t.get("test")]:
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


def test_a_control_waits_for_its_source_and_needs_one_that_did_not_diverge(tmp_path: Path) -> None:
    made = plan(tmp_path)
    for trial in to_run(made):
        finish(tmp_path, trial, 90.0)
    sources = made.reported(made.study.arm("TAM"))
    assert sources is not None
    finish(tmp_path, sources[0], 90.0)
    waiting = [trial for trial in to_run(made) if "damping" in trial]
    assert [trial["damping_of"] for trial in waiting] == [TrialFolder(tmp_path, sources[0]).key]
    finish(tmp_path, sources[1], 10.0, diverged=True)
    assert [trial for trial in to_run(made) if "damping" in trial] == waiting


@pytest.mark.parametrize("name", ["images", "ablations", "dynamics", "beyond", "imagenet", "toy"])
def test_fair_grids_have_one_range_of_effective_lr(name: str) -> None:
    """Of a settled step: SGDM's is 10 lr and TAM's 5 lr, SGD's and Adam's lr, AdaTAM's 5 lr, AdaTAM2's lr."""
    for study in experiments()[name].presets["fair"]:
        assert study.extend
        ranges: dict[bool, set[tuple[float, ...]]] = {}
        for arm in study.arms:
            if arm.control_of is None:
                factor = {"sgdm": 10, "tam": 5, "adatam": 1 if arm.options.get("ema") else 5}.get(
                    arm.optimizer, 1
                )
                effective = tuple(round(lr * factor, 6) for lr in arm.lrs)
                ranges.setdefault(arm.optimizer.startswith("ada") or "angular" in arm.optimizer, set()).add(
                    effective
                )
        assert all(len(found) == 1 for found in ranges.values()), (study.name, ranges)


def test_controls_can_be_had_for_every_arm_of_tam() -> None:
    for experiment in experiments().values():
        for study in experiment.presets["paper"]:
            found = with_controls(study)
            if not study.controls:
                assert found == study
                continue
            for arm in study.arms:
                if arm.optimizer.startswith(("tam", "adatam")) and not arm.control_of:
                    controls = {one.name: one for one in found.arms if one.control_of == arm.name}
                    plain = {"tam": "SGDM", "adatam": "Adam", "adatamw": "AdamW"}[arm.optimizer]
                    ratio = controls[f"{plain} at {arm.name}'s effective lr"].lr_ratio
                    assert ratio == (0.5 if plain == "SGDM" else 1 if arm.options.get("ema") else 5)
                    if arm.options.get("scope", "global") == "global":
                        assert {"mean", "shuffled"} <= {one.damping for one in controls.values()}
            assert with_controls(found) == found


def test_grids_are_extended_only_so_far_and_where_all_diverge_no_lr_is_chosen(tmp_path: Path) -> None:
    made = plan(tmp_path, extend=True)
    while trials := [t for t in to_run(made) if not t.get("test")]:
        for trial in trials:  # the less the better for SGDM; TAM always diverges
            finish(tmp_path, trial, 90.0 - trial["lr"], diverged=trial["optimizer"] == "tam")
    assert len(made.grid(made.study.arm("SGDM"))) == 2 + 4
    assert made.chosen(made.study.arm("TAM")) is None
    assert {trial["optimizer"] for trial in to_run(made)} == {"sgdm"}


def test_with_extended_grids_all_arms_are_tuned_also_those_not_asked_for(tmp_path: Path) -> None:
    whole = plan(tmp_path, extend=True).study
    part = Plan(plan(tmp_path).experiment, whole.only(["SGDM"], None), tmp_path, "fair", whole)
    assert {trial["optimizer"] for trial in to_run(part)} == {"sgdm", "tam"}


@pytest.mark.parametrize(
    "mistake",
    [
        {"tuning_seeds": ()},
        {"tuning_seeds": (0,)},
        {"baseline": "Adam"},
        {"seeds": ()},
        {"arms": (Arm("SGDM", "sgdm", (0.1,)), Arm("SGDM", "sgdm", (0.2,)))},
        {"arms": (Arm("SGDM", "sgdm", (0.1,)), Arm("TAM", "tam"))},
    ],
)
def test_a_study_that_cannot_be_run_is_refused(mistake: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="study digits"):
        plan(tmp_path, **mistake)


def test_a_selection_keeps_what_its_arms_need(tmp_path: Path) -> None:
    study = plan(tmp_path).study.only(["TAM, d shuffled"], 1)
    assert [arm.name for arm in study.arms] == ["SGDM", "TAM", "TAM, d shuffled"] and study.seeds == (0,)
    with pytest.raises(LabError, match='has no arm "TAN"; it has "SGDM", "TAM"'):
        study.only(["TAN"], None)


def test_every_file_of_experiments_is_found_and_its_configs_are_valid(tmp_path: Path) -> None:
    found = experiments()
    assert "images" in found
    for experiment in found.values():
        assert {"paper", "fair", "quick", "smoke"} <= set(experiment.presets)
        for studies in experiment.presets.values():
            for study in studies:
                made = Plan(experiment, with_controls(study), tmp_path)
                assert all(trial["epochs"] >= 0 for _, trial in made.to_run())  # progress needs them
                assert made.to_run()
                assert all(made.reported(arm) for arm in made.study.arms if len(arm.lrs) == 1)
                assert study.arm(study.baseline)
                assert not set(study.seeds) & set(study.tuning_seeds)


def test_the_example_of_contributing_is_an_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    example = text.split("experiments/nesterov.py`:\n\n```python\n")[1].split("```")[0]
    (tmp_path / "nesterov.py").write_text(example, encoding="utf-8")
    package = importlib.import_module("tam.lab.experiments")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    found = experiments()["nesterov"]
    assert len(Plan(found, found.presets["paper"][0], tmp_path).to_run()) == 4
    assert len(Plan(found, found.presets["smoke"][0], tmp_path).to_run()) == 4
    (tmp_path / "nothing.py").write_text("")
    with pytest.raises(LabError, match=r"nothing.py has no EXPERIMENT"):
        experiments()
