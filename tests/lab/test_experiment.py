"""Which trials an experiment needs, given results."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tam.lab.experiment import Arm, Experiment, Plan, Study, experiments
from tam.lab.images import config_of
from tam.lab.store import LabError, TrialFolder, key_of
from tam.lab.variants import another_seeds_damping, with_controls


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


REGISTERED = [("online", 420), ("runtime", 40), ("images", 20), ("graph", 318)]


@pytest.mark.parametrize("name, count", REGISTERED)
def test_registered_seeds_are_fresh(name: str, count: int) -> None:
    """No trial that was run before has a registered seed; there are as many as docs/registered.md says."""
    stored: dict[str, set[int]] = {}
    for path in (Path(__file__).parents[2] / "results" / name).glob("trials/*/config.json"):
        timing = json.loads(path.with_name("result.json").read_text(encoding="utf-8"))["timing"]
        if timing.get("date", "") < "2026-11-17":  # the day of the registration
            setting, seed = without_seed(json.loads(path.read_text(encoding="utf-8")))
            stored.setdefault(setting, set()).add(seed)
    experiment, trials = experiments()[name], {}
    for study in experiment.presets["registered"]:
        workload = {**study.workload, **({"titles": TITLES} if name == "graph" else {})}
        made = Plan(experiment, replace(study, workload=workload), Path("nothing"))
        assert len(study.seeds) >= 10 and not study.tuning_seeds
        trials |= {key_of(trial): trial for arm in study.arms for trial in made.reported(arm) or []}
    assert len(trials) == count
    pilots = 0
    for trial in trials.values():
        setting, seed = without_seed(trial)
        pilots += setting in stored
        assert seed not in stored.get(setting, ())
    assert pilots  # so the settings are spelled alike


TITLES = "titles-04e54d61b6a6ed19.pt"  # of the stored trials


def without_seed(trial: dict[str, Any]) -> tuple[str, int]:
    """Return a trial's setting, and its seed."""
    setting = {k: v for k, v in trial.items() if k not in ("seed", "damping_of")}
    return json.dumps(setting, sort_keys=True), trial["seed"]


def test_a_control_with_another_seeds_damping_is_one_trial(tmp_path: Path) -> None:
    """It takes the d of the next seed of the whole study, also where fewer seeds are run."""
    arms = (Arm("SGDM", "sgdm", (0.1,)), tam := Arm("TAM", "tam", (0.2,)), another_seeds_damping(tam))
    whole = plan(tmp_path, arms=arms, tuning_seeds=(), seeds=(4, 7, 9))
    control, sources = whole.reported(whole.study.arms[2]), whole.reported(tam)
    assert control is not None and sources is not None
    keys = [key_of(source) for source in sources]
    assert [trial["damping_of"] for trial in control] == [keys[1], keys[2], keys[0]]
    part = Plan(whole.experiment, whole.study.only([], 2), tmp_path, "", whole.study)
    assert part.reported(whole.study.arms[2]) == control[:2]
    assert not any("damping" in trial for trial in to_run(whole))  # before there is a d to take
    for source in sources[:2]:
        finish(tmp_path, source, 90.0)
    assert [trial["seed"] for trial in to_run(whole) if "damping" in trial] == [4, 9]
    single = plan(tmp_path, arms=arms, tuning_seeds=(), seeds=(4,))
    with pytest.raises(LabError, match="digits has one seed"):
        single.reported(single.study.arms[2])
