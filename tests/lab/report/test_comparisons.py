"""Which comparisons a report makes, at which learning rates, and how its answer counts them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tam.lab.core.selection import PresetGroup
from tam.lab.core.study import Variant
from tam.lab.report import build_report
from tam.lab.report.comparisons import Comparison, StudyResults
from tam.lab.report.model import Tally
from tests.lab.report.results import ALL, LESS, SGDM, TAM, VARIANTS, WORKLOAD, finish, group_with, plan_for

ALIKE = [90.1, 90.1, 90.2, 90.3, 90.4]  # SGDM ± 0.1
EXPLORATORY = (
    "These intervals are exploratory: Student's t, one comparison each. The command 'tam lab verdicts' "
    "judges the paper's claims."
)


def comparisons_of(group: PresetGroup) -> dict[tuple[str, str], Comparison]:
    (plan,) = group.plans
    return {(one.variant, one.other): one for one in StudyResults(plan).comparisons()}


def study_with(tam: list[float], number: int = 1, **more: Any) -> PresetGroup:
    """Return TAM at 0.2 against SGDM at 0.1. Studies with other numbers have other trials."""
    workload = {**WORKLOAD, "epochs": number}
    return group_with({"SGDM": SGDM, "TAM": tam}, variants=VARIANTS[:2], workload=workload, **more)


def tally_of(*groups: PresetGroup) -> Tally:
    return build_report(groups).tally


def test_differences_are_paired_by_seed() -> None:
    plan = plan_for(seeds=4, variants=VARIANTS[:2])
    outcomes = {"SGDM": {0: 90.0, 1: 91.0, 2: 95.0, 3: 94.0}, "TAM": {2: 95.5, 0: 90.2, 1: 91.9}}
    for name, values in outcomes.items():
        for trial in plan.comparison_trials(plan.study.variant(name)) or []:
            if trial.seed in values:
                finish(plan, trial, values[trial.seed])
    difference = StudyResults(plan).difference("TAM", "SGDM")
    assert difference is not None and difference.n == 3
    assert difference.mean == pytest.approx((0.2 + 0.9 + 0.5) / 3)


@pytest.mark.parametrize(
    "ours, theirs, shape",
    [
        (("tam", 0.2), ("sgdm", 0.1), "square"),  # with d = 1/2 the steps have the same length
        (("tam", 0.1), ("sgdm", 0.1), "hollow"),  # an equal lr, half the effective one
        (("tam", 0.2), ("sgdm", 0.102), "hollow"),  # 2 % apart
        (("tam", 0.2), ("sgdm", 0.1005), "square"),  # 0.5 % apart
        (("tam", 0.2), ("sgd", 1.0), "square"),  # momentum 0.9 sums to ten steps
        (("tam", 0.2), ("adam", 0.1), "hollow"),  # the same number, but another family
        (("adatam", 0.0002), ("adam", 0.001), "square"),
        (("adatam", 0.001), ("adam", 0.001), "hollow"),
        (("adatam", 0.02), ("sgdm", 0.1), "hollow"),
        (("adatamw", 0.0002), ("adamw", 0.001), "square"),
        (("adatamw", 0.0002), ("adam", 0.001), "hollow"),
    ],
)
def test_an_equal_effective_lr(ours: tuple[str, float], theirs: tuple[str, float], shape: str) -> None:
    (name, lr), (other, other_lr) = ours, theirs
    variants = Variant("theirs", other, (other_lr,)), Variant("ours", name, (lr,))
    group = group_with({"theirs": SGDM, "ours": TAM}, variants=variants, baseline="theirs")
    assert comparisons_of(group)["ours", "theirs"].shape == shape
    assert tally_of(group).total == int(shape == "square")


def test_which_comparisons_are_made() -> None:
    """Those of TAM with its baseline, others, and controls that it must beat; not those of other variants."""
    another = Variant("TAM, another seed's damping", "tam", control_of="TAM", damping="another")
    sgd = Variant("SGD", "sgd", (1.0,))
    group = group_with({**ALL, "SGD": SGDM, another.name: LESS}, variants=(*VARIANTS, another, sgd))
    found = {names: one.shape for names, one in comparisons_of(group).items()}
    assert found == {("TAM", "SGDM"): "square", ("TAM", another.name): "triangle"}


def test_the_answer_counts_intervals_at_an_equal_effective_lr() -> None:
    behind = [90.0, 90.0, 89.8, 90.1, 90.1]  # 0, -0.2, -0.3, -0.3, -0.2: t = -3.65, p = 0.02
    unequal = (VARIANTS[0], Variant("TAM", "tam", (0.1,)))
    groups = [
        study_with(TAM, 1), study_with(LESS, 2), study_with(ALIKE, 3), study_with(behind, 4),
        group_with({"SGDM": SGDM, "TAM": TAM}, variants=unequal, workload={**WORKLOAD, "epochs": 5}),
        study_with([92.0], 6),  # one seed has no interval
    ]  # fmt: skip
    report = build_report(groups)
    assert report.tally == Tally(ahead=2, behind=1, unclear=1)
    counts = (
        "TAM or AdaTAM is ahead in 2 of 4 comparisons and behind in 1; in 1 the 95 % interval includes 0."
    )
    assert report.answer == [f"At an equal effective learning rate, {counts}", EXPLORATORY]


def test_the_answer_for_one_none_and_small_ones() -> None:
    assert "ahead in 1 of 1 comparison and behind in 0;" in build_report([study_with(TAM)]).answer[0]
    nothing = build_report([study_with([])]).answer
    assert nothing == ["No variant of TAM is compared at an equal effective learning rate yet.", EXPLORATORY]
    small = build_report([study_with(TAM, small=True)])
    assert small.answer == ["This is a small test run.", "Its figures mean nothing."]


def test_where_lower_is_better_a_lower_outcome_is_ahead() -> None:
    assert tally_of(study_with(TAM, higher=False)) == Tally(0, 1, 0)
    assert tally_of(study_with([x - 2 for x in ALIKE], higher=False)) == Tally(1, 0, 0)


def test_runs_of_two_presets_are_counted_once() -> None:
    """A preset can share studies with another one, also with fewer seeds."""
    group, same, fewer = study_with(TAM), study_with(TAM), study_with(TAM[:3], seeds=3)
    for other in (same, fewer):
        other.plans[0].preset = "quick"
    for groups in ([group, same], [group, fewer], [fewer, group]):
        assert tally_of(*groups) == Tally(1, 0, 0)
    assert tally_of(group, study_with(TAM, 2)) == Tally(2, 0, 0)


def test_the_rest_of_the_seeds_does_not_count_if_a_run_is_lost() -> None:
    group = study_with([92.0, math.nan, 92.2, 92.3, 92.1])
    (comparison,) = comparisons_of(group).values()
    assert comparison.estimate.n == 4 and comparison.estimate.low > 0 and comparison.lost == 1
    report = build_report([group])
    assert report.tally.total == 0 and "n = 4, 1 without an outcome" in report.forest


def test_a_variant_with_the_runs_of_another_is_not_compared_again() -> None:
    group = group_with({**ALL, "SGDM at TAM's effective lr": SGDM})  # that is SGDM at 0.1: the same trials
    assert [*comparisons_of(group)] == [("TAM", "SGDM")]
