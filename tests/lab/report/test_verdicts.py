"""The rule that turns results into verdicts, against figures worked out by hand and scipy's own tests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from scipy import stats as scipy_stats

from tam.lab.core.study import Variant
from tam.lab.report.claim_pages import format_estimate
from tam.lab.report.claims import Claim, Part
from tam.lab.report.evidence import Evidence
from tam.lab.report.outcomes import Measure
from tam.lab.report.statistics import Estimate, equivalence_p, estimate, holm
from tam.lab.report.verdicts import Row, judge_claims
from tests.lab.report.results import finish, plan_for

CONTROL = "TAM, another seed's damping"
VARIANTS = (
    Variant("SGDM", "sgdm", (0.1,)),
    Variant("TAM", "tam", (0.2,)),
    Variant(CONTROL, "tam", control_of="TAM", damping="another"),
    Variant("TAM, constant damping", "tam", control_of="TAM", damping="mean"),
)
BASE = [90.0, 90.2, 90.1, 90.4, 90.3]
BETTER, MUCH_BETTER = ([x + d for x, d in zip(BASE, ds, strict=True)] for ds in (
    (0.9, 1.1, 1.0, 1.2, 0.8), (1.9, 2.2, 2.0, 2.1, 1.8),
))  # fmt: skip
ALIKE = [x + d for x, d in zip(BASE, (0.05, -0.04, 0.02, -0.05, 0.03), strict=True)]
WORSE = [x - d for x, d in zip(BASE, (0.9, 1.1, 1.0, 1.2, 0.8), strict=True)]
SPREAD = [x + d for x, d in zip(BASE, (3.0, -2.5, 2.0, -3.0, 1.0), strict=True)]
NONE = [math.nan] * 5


def part(**more: Any) -> Part:
    defaults: dict[str, Any] = {
        "rule": "superiority", "label": "digits", "study": "images/digits", "variant": "TAM",
        "against": "SGDM", "margin": 0.5, "n": 5, "measure": Measure(result=("validation",), chance=10.0),
    }  # fmt: skip
    return Part(**{**defaults, **more})


def claim(*parts: Part, number: int = 1) -> Claim:
    return Claim(number=number, claim="TAM is better", section="4", link="S4", paper="1", parts=parts)


def evidence(outcomes: dict[str, list[float]], alignment: float = 0.5, **more: Any) -> Evidence:
    """Return made-up registered results. A NaN is a run that diverged."""
    plan = plan_for(5, variants=VARIANTS)
    for name, values in outcomes.items():
        for trial, value in zip(plan.comparison_trials(plan.study.variant(name)) or [], values, strict=False):
            finish(plan, trial, value, diverged=math.isnan(value))
            record = plan.results.records[trial.key]
            record.metrics = [{"epoch": 1, "loss": 1.0, "alignment": alignment}]
    return Evidence(plan.results, {("images", "registered", "digits"): plan})


def judge(outcomes: dict[str, list[float]], *parts: Part, alignment: float = 0.5) -> Row:
    (row,) = judge_claims([claim(*(parts or (part(),)))], evidence(outcomes, alignment))
    return row


@pytest.mark.parametrize(
    "tam, verdict",
    [(BETTER, "undecided"), (ALIKE, "does not hold"), (WORSE, "does not hold"), (SPREAD, "undecided")],
)
def test_superiority_without_controls(tam: list[float], verdict: str) -> None:
    gated = part(controls=(CONTROL,))
    assert judge({"SGDM": BASE, "TAM": tam}, gated).verdict == verdict


@pytest.mark.parametrize(
    "control, verdict",
    [(ALIKE, "holds"), (BETTER, "holds"), (MUCH_BETTER, "holds as a schedule"), (SPREAD, "undecided")],
)
def test_the_gate(control: list[float], verdict: str) -> None:
    outcomes = {"SGDM": BASE, "TAM": MUCH_BETTER, CONTROL: control}
    if control is MUCH_BETTER:  # as good as TAM itself, with some spread
        outcomes[CONTROL] = [x + d for x, d in zip(control, (0.1, -0.1, 0.2, -0.2, 0.1), strict=True)]
    assert judge(outcomes, part(controls=(CONTROL,))).verdict == verdict


def test_a_control_counts_only_with_all_its_seeds() -> None:
    outcomes = {"SGDM": BASE, "TAM": MUCH_BETTER, CONTROL: ALIKE}
    assert judge(outcomes, part(controls=(CONTROL,))).verdict == "holds"
    row = judge({**outcomes, CONTROL: ALIKE[:4]}, part(controls=(CONTROL,)))
    assert row.verdict == "undecided" and not row.parts[0].controls


def test_constant_damping_at_one_half_is_the_baseline_itself() -> None:
    both = part(controls=(CONTROL, "TAM, constant damping"))
    outcomes = {"SGDM": BASE, "TAM": MUCH_BETTER, CONTROL: ALIKE}
    assert judge(outcomes, both, alignment=0.0).verdict == "holds"  # d = 1/2: that control is not needed
    assert judge(outcomes, both, alignment=0.5).verdict == "undecided"


@pytest.mark.parametrize(
    "rule, tam, verdict",
    [
        ("equality", ALIKE, "holds"),
        ("equality", BETTER, "does not hold"),
        ("equality", WORSE, "does not hold"),
        ("equality", SPREAD, "undecided"),
        ("no-worse", ALIKE, "holds"),
        ("no-worse", BETTER, "holds"),
        ("no-worse", WORSE, "does not hold"),
        ("no-worse", SPREAD, "undecided"),
    ],
)
def test_equality_and_no_worse(rule: str, tam: list[float], verdict: str) -> None:
    assert judge({"SGDM": BASE, "TAM": tam}, part(rule=rule)).verdict == verdict


@pytest.mark.parametrize("target, verdict", [(90.2, "holds"), (92.0, "does not hold"), (89.6, "undecided")])
def test_a_target(target: float, verdict: str) -> None:
    # The interval of BASE is 90.2 ± 0.196, the margin 0.5.
    assert judge({"TAM": BASE}, part(rule="target", against="", target=target)).verdict == verdict


def test_no_verdict_before_n() -> None:
    row = judge({"SGDM": BASE, "TAM": MUCH_BETTER[:4]}, part(gate=False))
    assert row.verdict == "undecided" and row.why == "4 of 5 seeds run so far"
    assert row.parts[0].estimate is None  # nothing is shown before n is reached
    assert judge({"SGDM": BASE, "TAM": MUCH_BETTER}, part(gate=False)).verdict == "holds"


def test_a_run_without_the_outcome_does_not_count() -> None:
    made = evidence({"SGDM": BASE, "TAM": MUCH_BETTER})
    for record in list(made.results.records.values())[-2:]:
        record.stored_result["validation"] = math.nan
    (row,) = judge_claims([claim(part(gate=False))], made)
    assert row.verdict == "undecided" and row.parts[0].estimate is None


def test_the_gate_needs_each_of_its_controls() -> None:
    """Constant damping that is the baseline itself does not stand in for another seed's damping."""
    both = part(controls=(CONTROL, "TAM, constant damping"))
    outcomes = {"SGDM": BASE, "TAM": MUCH_BETTER, "TAM, constant damping": ALIKE}
    assert judge(outcomes, both, alignment=0.0).verdict == "undecided"


def test_without_runs_a_claim_is_not_tested() -> None:
    assert judge({}).verdict == "not tested"
    missing = replace(claim(), missing="The data is not at hand")
    (row,) = judge_claims([missing], Evidence())
    assert (row.verdict, row.why) == ("not tested", "The data is not at hand")


@pytest.mark.parametrize(
    "tams, verdict",
    [
        ((MUCH_BETTER, MUCH_BETTER), "holds"),
        ((MUCH_BETTER, ALIKE), "does not hold"),
        ((MUCH_BETTER, SPREAD), "undecided"),
    ],
)
def test_a_claim_with_two_parts(tams: tuple[list[float], list[float]], verdict: str) -> None:
    outcomes = {"SGDM": BASE, "TAM": tams[0], CONTROL: tams[1]}
    parts = part(gate=False), part(gate=False, variant=CONTROL)
    assert judge(outcomes, *parts).verdict == verdict


def test_a_diverged_run_counts_at_chance() -> None:
    outcomes = {"SGDM": [*BASE[:4], math.nan], "TAM": MUCH_BETTER}
    found = judge(outcomes, part(gate=False)).parts[0].estimate
    assert found is not None and found.n == 5
    assert found.mean == pytest.approx((1.9 + 2.2 + 2.0 + 2.1 + (MUCH_BETTER[4] - 10)) / 5)
    assert found.failures == (0, 1) and found.mcnemar == 1.0  # one discordant pair of two sides: p = 1


def test_a_diverged_run_counts_as_the_worst_of_its_study() -> None:
    measure = Measure(result=("validation",), lower=True)
    outcomes = {"SGDM": BASE, "TAM": [*WORSE[:4], math.nan], CONTROL: [200.0] * 5}
    found = judge(outcomes, part(gate=False, measure=measure)).parts[0].estimate
    assert found is not None
    assert found.mean == pytest.approx((0.9 + 1.1 + 1.0 + 1.2 + (BASE[4] - 200.0)) / 5)


def test_a_claim_that_holm_demotes_keeps_its_figure() -> None:
    weak = [x + d for x, d in zip(BASE, (0.9, 1.6, 0.2, 1.4, 0.5), strict=True)]
    one = part(gate=False)
    rows = judge_claims([claim(one), claim(one, number=2)], evidence({"SGDM": BASE, "TAM": weak}))
    assert all(row.deciding is not None and row.deciding.estimate is not None for row in rows)


def test_an_estimate_worked_out_by_hand() -> None:
    # Differences 1, 2, 3: mean 2, standard deviation 1, t(0.975, 2) = 4.30265.
    found = estimate({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0}, lower=False)
    assert found is not None
    assert (found.mean, found.n) == (2.0, 3)
    assert found.low == pytest.approx(2 - 4.30265 / math.sqrt(3), abs=1e-4)
    assert found.high == pytest.approx(2 + 4.30265 / math.sqrt(3), abs=1e-4)
    assert found.p == pytest.approx(scipy_stats.ttest_1samp([1.0, 2.0, 3.0], 0).pvalue)
    turned = estimate({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0}, lower=True)
    assert turned is not None and turned.mean == -2.0 and turned.high == pytest.approx(-found.low)
    single = estimate({0: 1.0}, {0: 2.0}, lower=False)
    assert single is not None and single.mean == -1.0 and math.isnan(single.low)
    assert estimate({0: 1.0}, {1: 2.0}, lower=False) is None


@pytest.mark.parametrize("shift", [0.0, 0.2, 0.4, 0.6, -0.45])
def test_equivalence_agrees_with_the_interval(shift: float) -> None:
    values = {i: shift + d for i, d in enumerate((0.1, -0.1, 0.15, -0.05, 0.0))}
    found = estimate(values, dict.fromkeys(values, 0.0), lower=False)
    assert found is not None
    inside = found.low >= -0.5 and found.high <= 0.5
    assert (equivalence_p(found, 0.5) <= 0.05) == inside


def test_holm_worked_out_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.02]) == [0.02]
    assert holm([math.nan, 0.01]) == pytest.approx([1.0, 0.02])
    assert holm([]) == []


def test_holm_corrects_only_claims_that_would_hold() -> None:
    # p = 0.03 holds alone, and next to claims that fail, but not next to another one with p = 0.03.
    weak = [x + d for x, d in zip(BASE, (0.9, 1.6, 0.2, 1.4, 0.5), strict=True)]
    made = evidence({"SGDM": BASE, "TAM": weak, CONTROL: WORSE})
    one, fails = part(gate=False), part(gate=False, variant=CONTROL)
    found = {
        row.claim.number: row.verdict for row in judge_claims([claim(one), claim(fails, number=2)], made)
    }
    assert found == {1: "holds", 2: "does not hold"}
    twice = judge_claims([claim(one), claim(one, number=2)], made)
    assert [row.verdict for row in twice] == ["undecided", "undecided"]


@pytest.mark.parametrize(
    "rule, low, high, p, text",
    [
        ("superiority", -1.5, 2.5, 0.4, "+0.5 [-1.5, +2.5] epochs"),
        ("superiority", math.nan, math.nan, math.nan, "+0.5 epochs"),  # one seed
        ("log-rank", -math.inf, math.inf, 0.2, "+0.5 epochs, p = 0.2"),
        ("log-rank", 5e-324, math.inf, 0.0123, "+0.5 epochs, p = 0.012"),
        ("log-rank", -math.inf, math.inf, math.nan, "+0.5 epochs"),  # no run has a jump
    ],
)
def test_a_test_without_an_interval_is_shown_with_its_p(
    rule: str, low: float, high: float, p: float, text: str
) -> None:
    found = Estimate(0.5, low, high, p, 3)
    assert format_estimate(part(rule=rule, unit="epochs"), found) == text
