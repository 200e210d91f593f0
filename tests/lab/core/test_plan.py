"""Which trials an experiment needs, given results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tam.lab.core.config import TrialConfig
from tam.lab.core.controls import another_seeds_damping, controls, with_controls
from tam.lab.core.errors import LabError
from tam.lab.core.ladder_plan import make_plan
from tam.lab.core.plan import Plan
from tam.lab.core.registry import Experiment, experiment_names, get_experiment
from tam.lab.core.results import Results, TrialRecord, load_results
from tam.lab.core.runner import count_trials
from tam.lab.core.study import Ladder, Study, Variant
from tam.lab.experiments.images.trial import Config

RESULTS = Path(__file__).parents[3] / "results"


def plan(**more: Any) -> Plan:
    variants = (
        Variant("SGDM", "sgdm", (0.1, 0.01)),
        Variant("TAM", "tam", (0.2, 0.02)),
        Variant("TAM, shuffled damping", "tam", control_of="TAM", damping="shuffled"),
        Variant("SGDM at TAM's effective lr", "sgdm", control_of="TAM", lr_ratio=0.5),
    )
    workload = {"data": "digits", "model": "tiny", "epochs": 1}
    given = {"variants": variants, "baseline": "SGDM", "seeds": (0, 1), "tuning_seeds": (100,), **more}
    study = Study("digits", "digits", workload, **given)
    experiment = Experiment(
        name="images", title="", run=lambda *_: iter(()), config=Config, presets={"paper": (study,)},
        choices={}, curves=(),
    )  # fmt: skip
    return Plan(experiment, study, Results())


def to_run(made: Plan) -> list[TrialConfig]:
    return [trial for _, trial in made.to_run()]


def finish(made: Plan, trial: TrialConfig, validation: float, diverged: bool = False, s: float = 0.5) -> None:
    result = {"validation": validation, "diverged": diverged}
    made.results.records[trial.key] = record = TrialRecord(trial.key, result)
    record.metrics = [{"epoch": 1, "alignment": s}] if trial.optimizer == "tam" else [{"epoch": 1}]


def test_tuning_comes_first_with_other_seeds_and_no_test_images() -> None:
    trials = to_run(plan())
    assert len(trials) == 4 and {trial.seed for trial in trials} == {100}
    assert not any(trial.test for trial in trials)


def test_the_winner_is_compared_then_its_controls() -> None:
    made = plan()
    best = {"sgdm": 0.1, "tam": 0.02}
    for trial in to_run(made):
        finish(made, trial, 90.0 if trial.lr == best[trial.optimizer] else 80.0)
    trials = to_run(made)
    lrs = {(trial.optimizer, trial.lr) for trial in trials}
    assert lrs == {
        ("sgdm", 0.1),
        ("tam", 0.02),
        ("sgdm", 0.01),
    }  # the last is the control at half of TAM's lr
    assert all(trial.test for trial in trials) and {trial.seed for trial in trials} == {0, 1}
    for trial in trials:
        finish(made, trial, 91.0)
    shuffled = to_run(made)
    assert [trial.damping for trial in shuffled] == ["shuffled", "shuffled"]
    sources = made.comparison_trials(made.study.variant("TAM"))
    assert sources is not None
    assert [trial.damping_of for trial in shuffled] == [t.key for t in sources]
    for trial in shuffled:
        finish(made, trial, 91.0)
    assert to_run(made) == []


def test_a_diverged_trial_does_not_win_and_edges_are_flagged() -> None:
    made = plan()
    for trial in to_run(made):
        finish(made, trial, 95.0 if trial.lr >= 0.1 else 80.0, diverged=trial.lr == 0.2)
    assert made.selected_lr(made.study.variant("SGDM")) == (0.1, True)
    assert made.selected_lr(made.study.variant("TAM")) == (0.02, True)


def test_grids_are_extended_alike_until_every_winner_is_inside() -> None:
    made = plan(extend=True)
    best = {"sgdm": 0.1 * 10**0.5, "tam": 0.02}  # half a decade above its grid, and the lower edge
    rounds = []
    while trials := [t for t in to_run(made) if not t.test]:
        rounds.append(len(trials))
        for trial in trials:
            distance = abs(trial.lr / best[trial.optimizer] - 1)
            finish(made, trial, 90.0 - distance)
    sgdm, tam = (made.grid(made.study.variant(name)) for name in ("SGDM", "TAM"))
    assert len(sgdm) == len(tam) and sgdm[-1] / 0.1 == pytest.approx(tam[-1] / 0.2)
    for name in ("SGDM", "TAM"):
        chosen = made.selected_lr(made.study.variant(name))
        assert chosen is not None and not chosen[1], (name, chosen)
    assert len(rounds) > 1


def test_a_control_waits_for_its_source_and_needs_one_that_did_not_diverge() -> None:
    made = plan()
    for trial in to_run(made):
        finish(made, trial, 90.0)
    sources = made.comparison_trials(made.study.variant("TAM"))
    assert sources is not None
    finish(made, sources[0], 90.0)
    waiting = [trial for trial in to_run(made) if trial.damping]
    assert [trial.damping_of for trial in waiting] == [sources[0].key]
    finish(made, sources[1], 10.0, diverged=True)
    assert [trial for trial in to_run(made) if trial.damping] == waiting


@pytest.mark.parametrize("name", ["images", "ablations", "dynamics", "beyond", "imagenet", "toy"])
def test_fair_grids_have_one_range_of_effective_lr(name: str) -> None:
    """Of a settled step: SGDM's is 10 lr and TAM's 5 lr, SGD's and Adam's lr, AdaTAM's 5 lr, AdaTAM2's lr."""
    for study in get_experiment(name).presets["fair"]:
        assert study.extend
        ranges: dict[bool, set[tuple[float, ...]]] = {}
        for variant in study.variants:
            if variant.control_of is None:
                factor = {"sgdm": 10, "tam": 5, "adatam": 1 if variant.options.get("ema") else 5}.get(
                    variant.optimizer, 1
                )
                effective = tuple(round(lr * factor, 6) for lr in variant.lrs)
                ranges.setdefault(
                    variant.optimizer.startswith("ada") or "angular" in variant.optimizer, set()
                ).add(effective)
        assert all(len(found) == 1 for found in ranges.values()), (study.name, ranges)


def test_controls_can_be_had_for_every_variant_of_tam() -> None:
    for experiment in map(get_experiment, experiment_names()):
        for study in experiment.presets.get("paper", experiment.presets["quick"]):
            found = with_controls(study)
            if not study.controls:
                assert found == study
                continue
            for variant in study.variants:
                if variant.optimizer.startswith(("tam", "adatam")) and not variant.control_of:
                    by_name = {one.name: one for one in found.variants if one.control_of == variant.name}
                    plain = {"tam": "SGDM", "adatam": "Adam", "adatamw": "AdamW"}[variant.optimizer]
                    ratio = by_name[f"{plain} at {variant.name}'s effective lr"].lr_ratio
                    assert ratio == (0.5 if plain == "SGDM" else 1 if variant.options.get("ema") else 5)
                    dampings = sorted(one.damping for one in by_name.values() if one.damping)
                    assert dampings == ["another", "mean", "shuffled"]
            assert with_controls(found) == found


def test_grids_are_extended_only_so_far_and_where_all_diverge_no_lr_is_chosen() -> None:
    made = plan(extend=True)
    while trials := [t for t in to_run(made) if not t.test]:
        for trial in trials:  # the less the better for SGDM; TAM always diverges
            finish(made, trial, 90.0 - trial.lr, diverged=trial.optimizer == "tam")
    assert len(made.grid(made.study.variant("SGDM"))) == 2 + 4
    assert made.selected_lr(made.study.variant("TAM")) is None
    assert {trial.optimizer for trial in to_run(made)} == {"sgdm"}


def test_with_extended_grids_all_variants_are_tuned_also_those_not_asked_for() -> None:
    whole = plan(extend=True).study
    part = Plan(plan().experiment, whole.only(["SGDM"], None), Results(), "fair", whole)
    assert {trial.optimizer for trial in to_run(part)} == {"sgdm", "tam"}


@pytest.mark.parametrize(
    "mistake",
    [
        {"tuning_seeds": ()},
        {"tuning_seeds": (0,)},
        {"baseline": "Adam"},
        {"seeds": ()},
        {"variants": (Variant("SGDM", "sgdm", (0.1,)), Variant("SGDM", "sgdm", (0.2,)))},
        {"variants": (Variant("SGDM", "sgdm", (0.1,)), Variant("TAM", "tam"))},
    ],
)
def test_a_study_that_cannot_be_run_is_refused(mistake: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="study digits"):
        plan(**mistake)


def test_a_selection_keeps_what_its_variants_need() -> None:
    study = plan().study.only(["TAM, shuffled damping"], 1)
    assert [variant.name for variant in study.variants] == [
        "SGDM",
        "TAM",
        "TAM, shuffled damping",
    ] and study.seeds == (0,)
    with pytest.raises(LabError, match='has no variant "TAN"; it has "SGDM", "TAM"'):
        study.only(["TAN"], None)


def test_every_file_of_experiments_is_found_and_its_configs_are_valid() -> None:
    assert "images" in experiment_names()
    for experiment in map(get_experiment, experiment_names()):
        assert {"quick", "smoke"} <= set(experiment.presets)
        for studies in experiment.presets.values():
            for study in studies:
                made = make_plan(experiment, with_controls(study), Results())
                assert all(trial.epochs >= 0 for _, trial in made.to_run())  # progress needs them
                assert made.to_run()
                assert all(
                    made.comparison_trials(variant)
                    for variant in made.study.variants
                    if len(variant.lrs) == 1 or isinstance(study, Ladder)
                )
                assert study.variant(study.baseline)
                assert not set(study.seeds) & set(study.tuning_seeds)


REGISTERED = [("online", 420), ("runtime", 40), ("images", 20), ("graph", 318)]


@pytest.mark.parametrize("name, count", REGISTERED)
def test_registered_seeds_are_fresh(name: str, count: int) -> None:
    """No trial that was run before has a registered seed; there are as many as registered.md says."""
    stored: dict[str, set[int]] = {}
    for record in load_results(RESULTS / name):
        if record.result["timing"].get("date", "") < "2026-11-17":  # the day of the registration
            setting, seed = without_seed(record.config)
            stored.setdefault(setting, set()).add(seed)
    experiment, trials = get_experiment(name), {}
    for study in experiment.presets["registered"]:
        workload = {**study.workload, **({"titles": TITLES} if name == "graph" else {})}
        made = make_plan(experiment, replace(study, workload=workload), Results())
        assert len(study.seeds) >= 10 and not study.tuning_seeds
        trials |= {
            trial.key: trial.canonical
            for variant in study.variants
            for trial in made.comparison_trials(variant) or []
        }
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
    return json.dumps(setting, sort_keys=True), int(trial["seed"])


def test_a_control_with_another_seeds_damping_is_one_trial() -> None:
    """It takes the d of the next seed of the whole study, also where fewer seeds are run."""
    variants = (
        Variant("SGDM", "sgdm", (0.1,)),
        tam := Variant("TAM", "tam", (0.2,)),
        another_seeds_damping(tam),
    )
    whole = plan(variants=variants, tuning_seeds=(), seeds=(4, 7, 9))
    control, sources = whole.comparison_trials(whole.study.variants[2]), whole.comparison_trials(tam)
    assert control is not None and sources is not None
    keys = [source.key for source in sources]
    assert [trial.damping_of for trial in control] == [keys[1], keys[2], keys[0]]
    part = Plan(whole.experiment, whole.study.only([], 2), Results(), "", whole.study)
    assert part.comparison_trials(whole.study.variants[2]) == control[:2]
    assert not any(trial.damping for trial in to_run(whole))  # before there is a d to take
    for source in sources[:2]:
        finish(whole, source, 90.0)
    assert [trial.seed for trial in to_run(whole) if trial.damping] == [4, 9]


def test_a_study_with_one_seed_has_no_control_with_another_ones_damping() -> None:
    variants = (Variant("SGDM", "sgdm", (0.1,)), tam := Variant("TAM", "tam", (0.2, 0.1)), *controls(tam))
    single = plan(variants=variants, seeds=(4,))
    another = single.study.variant("TAM, another seed's damping")
    assert single.comparison_trials(another) == []
    assert count_trials([single]).later_trials == 5  # SGDM, TAM and the three other controls
    while trials := to_run(single):
        for trial in trials:
            finish(single, trial, 90.0, s=0.5)
    outcomes = {outcome.variant.name: outcome for outcome in single.outcomes()}
    assert outcomes[another.name].planned == 0 and not outcomes[another.name].records
    assert [outcome.planned for name, outcome in outcomes.items() if name != another.name] == [1] * 5
    assert single.why_left_out(another) == "the study has one seed"
    # A part with one seed of a study with several has the control.
    whole = plan(variants=variants, tuning_seeds=(100,), seeds=(4, 7))
    part = Plan(whole.experiment, whole.study.only([], 1), whole.results, "", whole.study)
    for trial in to_run(whole):
        finish(whole, trial, 90.0)
    assert len(part.comparison_trials(another) or ()) == 1


def constant_plan(*alignments: float, scope: str = "global") -> Plan:
    """Return a study of TAM and its controls in which the runs of TAM have these means of s."""
    sgdm, tam = Variant("SGDM", "sgdm", (0.1,)), Variant("TAM", "tam", (0.2,), {"scope": scope})
    made = plan(
        variants=(sgdm, tam, *controls(tam)), tuning_seeds=(), seeds=tuple(range(max(2, len(alignments))))
    )
    sources = made.comparison_trials(tam)
    assert sources is not None
    for source, s in zip(sources, alignments, strict=False):
        finish(made, source, 90.0, s=s)
    return made


@pytest.mark.parametrize(
    "alignments, left_out",
    [
        ((0.0, 0.0), True),
        ((0.009, 0.009), True),  # 2 d = 1.009
        ((-0.0099, -0.0099), True),
        ((0.011, 0.011), False),
        ((-0.02, -0.02), False),
        ((0.03, -0.02), True),  # 1.005 on average: the control is left out for all seeds or none
        ((0.5,), False),  # the other seed is not finished
        ((), False),  # nobody knows yet
    ],
)
def test_constant_damping_is_left_out_where_it_is_the_baseline(
    alignments: tuple[float, ...], left_out: bool
) -> None:
    made = constant_plan(*alignments)
    control = made.study.variant("TAM, constant damping")
    mean_d = sum((1 + s) / 2 for s in alignments) / max(1, len(alignments))
    assert bool(alignments and abs(2 * mean_d - 1) <= 0.01) == left_out
    assert made.comparison_trials(control) == [] if left_out else made.comparison_trials(control)
    assert ("2 x mean(d) is" in made.why_left_out(control)) == left_out
    outcomes = {outcome.variant.name: outcome.planned for outcome in made.outcomes()}
    assert outcomes == dict.fromkeys(outcomes, 2) | {control.name: 0 if left_out else 2}
    dampings = [trial.damping for trial in to_run(made)]
    assert dampings.count("mean") == (0 if left_out else len(alignments))
    assert dampings.count("shuffled") == dampings.count("another") == len(alignments)
    planned = count_trials([made])
    missing = 2 + 2 - len(alignments)  # runs of SGDM, which has TAM's effective lr, and of TAM
    assert planned.trials + planned.later_trials == missing + 2 * (2 if left_out else 3)


def test_constant_damping_that_was_run_before_is_left_out_too() -> None:
    made = constant_plan(0.1, 0.1)
    while trials := to_run(made):
        for trial in trials:
            finish(made, trial, 90.0, s=0.1)
    assert {len(outcome.records) for outcome in made.outcomes()} == {2}
    for source in made.comparison_trials(made.study.variant("TAM")) or ():
        finish(made, source, 90.0, s=0.001)
    by_name = {outcome.variant.name: len(outcome.records) for outcome in made.outcomes()}
    assert by_name.pop("TAM, constant damping") == 0 and set(by_name.values()) == {2}
    assert to_run(made) == []


def test_segments_have_a_constant_each_whose_mean_says_nothing_about_the_baseline() -> None:
    made = constant_plan(0.0, 0.0, scope="tensor")
    assert not made.why_left_out(made.study.variant("TAM, constant damping"))


def test_the_steps_after_a_warm_up_do_not_count() -> None:
    made = constant_plan()
    for source in made.comparison_trials(made.study.variant("TAM")) or ():
        finish(made, source, 90.0)
        made.results.records[source.key].metrics = [{"alignment": 0.012}, {"alignment": 0.0}, {"epoch": 3}]
    assert "is 1.006" in made.why_left_out(made.study.variant("TAM, constant damping"))
