"""Ladders: what their losses say, and which trials they need."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tam.lab.core import ladder
from tam.lab.core.config import TrialConfig
from tam.lab.core.controls import with_controls
from tam.lab.core.ladder_plan import LadderPlan, make_plan
from tam.lab.core.plan import Plan
from tam.lab.core.registry import Experiment, get_experiment
from tam.lab.core.results import Results, TrialRecord, load_results
from tam.lab.core.runner import count_trials, finished_trials, run
from tam.lab.core.selection import Selection, load_groups, select_plans
from tam.lab.core.study import Ladder, Study, Variant, rungs
from tam.lab.engines.events import Event, Notice, RoundStarted, RunLocation
from tam.lab.experiments.images.trial import Config

LRS = rungs(0.05, 5)
TAM_LRS = tuple(2 * lr for lr in LRS)
VARIANTS = (
    Variant("SGDM", "sgdm", LRS),
    Variant("TAM", "tam", TAM_LRS),
    Variant("SGDM at TAM's effective lr", "sgdm", control_of="TAM", lr_ratio=0.5),
    Variant("TAM, shuffled damping", "tam", control_of="TAM", damping="shuffled"),
    Variant("TAM, another seed's damping", "tam", control_of="TAM", damping="another"),
)
TAM, AT_EFFECTIVE_LR, SHUFFLED, ANOTHER = VARIANTS[1:]


def make_ladder(**more: Any) -> Ladder:
    fields: dict[str, Any] = {
        "name": "digits", "title": "Digits", "workload": {"data": "digits", "model": "tiny", "epochs": 1},
        "variants": VARIANTS, "baseline": "SGDM", "seeds": (0, 1, 2, 3), "cap": 5.0, "outcome": "validation",
    }  # fmt: skip
    return Ladder(**{**fields, **more})


def make_ladder_plan(study: Ladder | None = None) -> LadderPlan:
    study = study or make_ladder()
    experiment = Experiment(
        name="images", title="", run=lambda *_: iter(()), config=Config, presets={"paper": (study,)},
        choices={}, curves=(),
    )  # fmt: skip
    plan = make_plan(experiment, study, Results())
    assert isinstance(plan, LadderPlan)
    return plan


def finish(plan: Plan, trial: TrialConfig, loss: float, **more: Any) -> None:
    result = {"validation": loss, "diverged": math.isnan(loss), **more}
    plan.results.records[trial.key] = TrialRecord(trial.key, result)


def finish_all(plan: LadderPlan, loss: Callable[[TrialConfig], float]) -> int:
    """Finish all trials that can run, until none is left. Return the number of rounds."""
    for number in range(10):
        if not plan.to_run():
            return number
        for _, trial in plan.to_run():
            finish(plan, trial, loss(trial))
    raise AssertionError("no end")


def trials_of(plan: Plan, variant: Variant) -> list[TrialConfig]:
    return [trial for one, trial in plan.to_run() if one.name == variant.name]


def test_best_knees_and_width_are_those_computed_by_hand() -> None:
    losses = {1.0: [1.1, 1.3], 2.0: [1.0, 1.0], 4.0: [1.01, 1.01], 8.0: [1.11, 1.11], 16.0: [9.0, 9.0]}
    summary = ladder.summarize(losses, 0.02)
    assert (summary.best_lr, summary.best_loss) == (2.0, 1.0)
    assert summary.lower_knee == pytest.approx(2 * 0.5**0.1)  # 0.02 of the 0.2 to the next rung
    assert summary.upper_knee == pytest.approx(4 * 2**0.1)  # 0.01 of the 0.1 from 4 to 8
    assert summary.width == pytest.approx(2 * 2**0.2)


def test_the_crossing_nearest_to_the_best_rung_counts() -> None:
    losses = {1.0: [2.0], 2.0: [1.0], 4.0: [1.04], 8.0: [1.0], 16.0: [3.0]}
    summary = ladder.summarize(losses, 0.02)
    assert summary.best_lr == 2.0 and summary.upper_knee == pytest.approx(2 * 2**0.5)


def test_a_knee_outside_of_the_rungs_is_censored() -> None:
    summary = ladder.summarize({4.0: [1.5], 1.0: [1.0], 2.0: [1.01]}, 0.02)
    assert summary.lower_knee is None and summary.upper_knee is not None and summary.width is None
    exact = ladder.summarize({1.0: [0.0], 2.0: [0.25]}, 0.25)  # it reaches the level at the last rung
    assert exact.upper_knee == 2.0


@pytest.mark.parametrize("losses, tolerance", [({}, 0.02), ({1.0: []}, 0.02), ({1.0: [1.0]}, 0.0)])
def test_a_summary_needs_losses_and_a_tolerance(losses: ladder.Losses, tolerance: float) -> None:
    with pytest.raises(ValueError, match="needs losses and a positive tolerance"):
        ladder.summarize(losses, tolerance)


def test_losses_must_be_capped() -> None:
    with pytest.raises(ValueError, match="cap them first"):
        ladder.summarize({1.0: [math.nan]}, 0.02)
    assert [ladder.cap_loss(x, 5.0) for x in (1.0, 7.0, math.inf, math.nan)] == [1.0, 5.0, 5.0, 5.0]


def test_sensitivity_is_the_mean_loss_above_the_best_one_in_the_window() -> None:
    losses = {1.0: [1.2, 1.4], 2.0: [1.0, 1.0], 4.0: [1.1, 1.1], 8.0: [5.0, 5.0]}
    assert ladder.sensitivity(losses, (1.0, 4.0)) == pytest.approx((0.3 + 0.0 + 0.1) / 3)
    assert ladder.sensitivity(losses, (4.0, 8.0)) == pytest.approx(3.9 / 2)
    assert ladder.sensitivity(losses, (1.0004, 1.9)) == 0.0  # the first rung is inside, as far as one can say
    assert ladder.sensitivity(losses, (16.0, 32.0)) is None
    window = ladder.shift_window((1.0, 4.0), best_lr=4.0, reference_lr=2.0)
    assert window == (2.0, 8.0)
    assert ladder.sensitivity(losses, window) == pytest.approx((0.0 + 0.1 + 4.0) / 3)


def test_failures_are_counted_exactly() -> None:
    assert ladder.count_failures({2.0: [True, False], 1.0: [False]}) == {1.0: (0, 1), 2.0: (1, 2)}


LOSSES = st.lists(st.lists(st.floats(0, 5), min_size=2, max_size=2), min_size=1, max_size=8)


@given(LOSSES, st.floats(1e-3, 1e3))
def test_scaling_all_lrs_scales_best_and_knees(losses: list[list[float]], scale: float) -> None:
    before = ladder.summarize({2.0**i: one for i, one in enumerate(losses)}, 0.02)
    after = ladder.summarize({scale * 2.0**i: one for i, one in enumerate(losses)}, 0.02)
    assert after.best_loss == before.best_loss
    for name in ("best_lr", "lower_knee", "upper_knee"):
        expected = getattr(before, name)
        assert getattr(after, name) == (None if expected is None else pytest.approx(scale * expected))


@given(st.lists(st.integers(0, 640), min_size=1, max_size=8), st.integers(-640, 640))
def test_a_constant_added_to_all_losses_moves_no_knee(losses: list[int], constant: int) -> None:
    """In units of 1/128, so sums are exact and ties stay ties."""
    before = ladder.summarize({2.0**i: [loss / 128] for i, loss in enumerate(losses)}, 1 / 64)
    moved = {2.0**i: [(loss + constant) / 128] for i, loss in enumerate(losses)}
    after = ladder.summarize(moved, 1 / 64)
    assert (after.best_lr, after.lower_knee, after.upper_knee) == (
        before.best_lr, before.lower_knee, before.upper_knee,
    )  # fmt: skip
    window = (1.0, 16.0)
    expected = ladder.sensitivity({2.0**i: [loss / 128] for i, loss in enumerate(losses)}, window)
    assert ladder.sensitivity(moved, window) == pytest.approx(expected)


def test_rungs_are_a_factor_apart_and_rounded() -> None:
    assert rungs(0.1, 5, 2) == (0.1, 0.2, 0.4, 0.8, 1.6)
    assert rungs(0.05, 3) == (0.05, 0.0707107, 0.1)


BAD = {
    "TAM must have at least 5 rungs, got 4": {"variants": (VARIANTS[0], replace(TAM, lrs=TAM_LRS[:4]))},
    "rungs of TAM must be positive and a constant factor apart": {
        "variants": (VARIANTS[0], replace(TAM, lrs=(0.1, 0.2, 0.4, 0.8, 1.61)))
    },
    "rungs of SGDM must be positive": {"variants": (replace(VARIANTS[0], lrs=(0.0, 0.1, 0.2, 0.4, 0.8)),)},
    "rungs of SGDM must be positive and": {"variants": (replace(VARIANTS[0], lrs=(0.1,) * 5),)},
    "there can be no tuning seeds": {"tuning_seeds": (100,)},
    "lower must be better": {"higher": True},
    "cap must be finite": {"cap": math.inf},
    "tolerance finite and positive": {"tolerance": 0.0},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_ladders_are_refused(message: str) -> None:
    with pytest.raises(ValueError, match=f"ladder digits: .*{message}"):
        make_ladder(**BAD[message])


def test_every_variant_runs_at_every_rung_with_every_seed_and_no_test_data() -> None:
    plan = make_ladder_plan()
    assert {(trial.lr, trial.seed) for trial in trials_of(plan, VARIANTS[0])} == {
        (lr, seed) for lr in LRS for seed in range(4)
    }
    every = [trial for _, trial in plan.to_run()]
    assert not any(trial.test or trial.damping for trial in every)
    assert {t.key for t in trials_of(plan, AT_EFFECTIVE_LR)} == {t.key for t in trials_of(plan, VARIANTS[0])}
    assert plan.study.trials() == 5 * 5 * 4
    assert count_trials([plan]) == RoundStarted(40, 40, 1)  # the baseline's trials are shared
    assert finish_all(plan, lambda trial: 1.0) == 2
    assert plan.is_finished() and count_trials([plan]) == RoundStarted(0, 0, 0)
    assert len(finished_trials(plan)) == 80
    assert plan.duplicates() == {"SGDM at TAM's effective lr": "SGDM"}


def test_controls_take_over_the_damping_of_their_source_at_the_same_rung() -> None:
    whole = make_ladder_plan()
    sources = {(trial.lr, trial.seed): trial.key for trial in whole.comparison_trials(TAM)}
    part = make_plan(whole.experiment, whole.study.only([], 2), Results(), "", whole.study)
    for plan in (whole, part):
        for trial in plan.comparison_trials(SHUFFLED) or ():
            assert (trial.damping, trial.damping_of) == ("shuffled", sources[trial.lr, trial.seed])
        for trial in plan.comparison_trials(ANOTHER) or ():
            assert trial.damping_of == sources[trial.lr, (trial.seed + 1) % 4]
    assert len(part.comparison_trials(ANOTHER) or ()) == 5 * 2
    half = replace(SHUFFLED, name="TAM, shuffled damping at half the lr", lr_ratio=0.5)
    plan = make_ladder_plan(make_ladder(variants=(*VARIANTS[:2], half)))
    assert [t.damping_of for t in plan.comparison_trials(half)] == [*sources.values()]
    assert {t.lr for t in plan.comparison_trials(half)} == {lr / 2 for lr in TAM_LRS}


def test_a_control_whose_source_diverged_is_not_run() -> None:
    plan = make_ladder_plan()
    worst = max(TAM_LRS)
    finish_all(plan, lambda trial: math.nan if trial.lr == worst and trial.seed == 1 else 1.0)
    missing = [t for t in plan.comparison_trials(SHUFFLED) if plan.record(t) is None]
    assert [(trial.lr, trial.seed) for trial in missing] == [(worst, 1)]
    missing = [t for t in plan.comparison_trials(ANOTHER) if plan.record(t) is None]
    assert [(trial.lr, trial.seed) for trial in missing] == [(worst, 0)]  # seed 1 would be its source
    assert not plan.is_finished() and not plan.to_run()
    assert plan.complete_rungs(SHUFFLED) == [*TAM_LRS[:4]]
    assert plan.losses(TAM)[LRS[-1]] == [1.0, 5.0, 1.0, 1.0]
    assert plan.failures(TAM)[LRS[-1]] == (1, 4)


def test_one_seed_has_no_other_seeds_damping() -> None:
    plan = make_ladder_plan(make_ladder(seeds=(0,)))
    assert plan.why_left_out(ANOTHER) == "the study has one seed"
    assert plan.comparison_trials(ANOTHER) == [] and plan.ladder(ANOTHER) == {}


def fail_at(plan: LadderPlan, variant: Variant, lrs: tuple[float, ...], seeds: int = 4) -> None:
    """Finish trials of a variant with a finite loss, and say that they failed."""
    for trial in plan.comparison_trials(variant):
        if trial.lr in lrs and trial.seed < seeds:
            finish(plan, trial, 2.0, failed=True)


def test_rungs_above_two_at_which_all_seeds_failed_are_not_run() -> None:
    plan = make_ladder_plan()
    fail_at(plan, TAM, TAM_LRS[2:3])
    assert plan.skipped_rungs(TAM) == []
    fail_at(plan, TAM, TAM_LRS[1:2], seeds=3)
    assert plan.skipped_rungs(TAM) == []  # one seed is missing
    fail_at(plan, TAM, TAM_LRS[1:2])
    assert plan.skipped_rungs(TAM) == [*TAM_LRS[3:]]
    assert {trial.lr for trial in trials_of(plan, TAM)} == {TAM_LRS[0]}
    finish_all(plan, lambda trial: 1.0)
    assert not {t.lr for t in plan.comparison_trials(SHUFFLED) if plan.record(t)} & {*TAM_LRS[3:]}
    assert [*plan.losses(TAM)] == [*LRS[:3]] and plan.losses(TAM)[LRS[2]] == [2.0] * 4
    assert plan.losses(TAM, with_skipped=True)[LRS[4]] == [5.0] * 4
    assert plan.failures(TAM) == {LRS[0]: (0, 4), LRS[1]: (4, 4), LRS[2]: (4, 4)}


def test_the_stop_rule_needs_four_seeds_and_can_be_switched_off() -> None:
    for more in ({"seeds": (0, 1, 2)}, {"skip_above": False}):
        plan = make_ladder_plan(make_ladder(**more))
        fail_at(plan, TAM, TAM_LRS[1:3])
        assert plan.skipped_rungs(TAM) == []
        assert {trial.lr for trial in trials_of(plan, TAM)} == {TAM_LRS[0], *TAM_LRS[3:]}


def test_a_rung_above_that_was_run_in_part_is_not_continued() -> None:
    plan = make_ladder_plan()
    fail_at(plan, TAM, TAM_LRS[3:4], seeds=1)
    fail_at(plan, TAM, TAM_LRS[:2])
    assert plan.skipped_rungs(TAM) == [*TAM_LRS[2:]] and trials_of(plan, TAM) == []
    assert plan.losses(TAM, with_skipped=True)[LRS[3]] == [2.0, 5.0, 5.0, 5.0]


def test_the_best_rung_so_far_is_the_outcome() -> None:
    plan = make_ladder_plan()
    assert all(outcome.lr is None and outcome.planned == 4 for outcome in plan.outcomes())
    finish_all(plan, lambda trial: abs(math.log(trial.lr / TAM_LRS[1])))
    outcomes = {outcome.variant.name: outcome for outcome in plan.outcomes()}
    assert outcomes["TAM"].lr == TAM_LRS[1] and not outcomes["TAM"].at_edge
    assert outcomes["SGDM"].lr == LRS[3] and set(outcomes["SGDM"].records) == {0, 1, 2, 3}
    assert plan.effective_lr(TAM, TAM_LRS[1]) == LRS[1]
    assert plan.effective_lr(AT_EFFECTIVE_LR, LRS[1]) == LRS[1]
    assert plan.study.comparisons() == []


def test_all_controls_can_be_added() -> None:
    study = with_controls(make_ladder(variants=VARIANTS[:2]))
    assert isinstance(study, Ladder) and len(study.variants) == 2 + 4
    plan = make_ladder_plan(study)
    finish_all(plan, lambda trial: 1.0)
    assert plan.is_finished()


@pytest.fixture
def toy_with_ladder(monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """The preset smoke of `toy` with a ladder next to its studies."""
    experiment = get_experiment("toy")
    (study, *_) = experiment.presets["smoke"]
    variants = (VARIANTS[0], TAM, SHUFFLED)
    added = Ladder(
        name="rungs", title="A ladder", workload=study.workload, variants=variants, baseline="SGDM",
        seeds=(0, 1), outcome="final", cap=10.0,
    )  # fmt: skip
    presets = {**experiment.presets, "smoke": (study, added)}
    changed = replace(experiment, presets=presets)
    for module in ("selection", "runner"):
        monkeypatch.setattr(f"tam.lab.core.{module}.get_experiment", lambda _: changed)
    return changed


@pytest.mark.usefixtures("toy_with_ladder")
def test_a_ladder_is_selected_run_and_found_again(tmp_path: Path) -> None:
    plans = select_plans(Selection("toy", "smoke"), Results())
    assert [type(plan) for plan in plans] == [Plan, LadderPlan]
    selection = Selection("toy", "smoke", studies=("rungs",), variants=("SGDM",), seeds=1)
    events: list[Event] = []
    run(selection, RunLocation(tmp_path, tmp_path), 1, events.append)
    assert len(load_results(tmp_path).records) == 5
    run(selection, RunLocation(tmp_path, tmp_path), 1, events.append)
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert notices[-1] == "all 5 trials are finished: nothing to run"
    (group,) = load_groups(tmp_path)
    (plan,) = group.plans
    assert isinstance(plan, LadderPlan) and len(plan.to_run()) == 5 + 10 and not plan.is_finished()
    assert [len(by_seed) for by_seed in plan.ladder(VARIANTS[0]).values()] == [1] * 5
    assert isinstance(plan.study, Study) and plan.study.seeds == (0, 1)
