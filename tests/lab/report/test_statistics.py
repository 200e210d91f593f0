"""Estimates, against figures worked out by hand and scipy's own tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import comb, inf

import pytest
from scipy import stats as scipy_stats

from tam.lab.core.results import TrialRecord
from tam.lab.report.statistics import compare_failures, compare_jumps, estimate, summarise


def by_seed(values: Sequence[float]) -> dict[int, float]:
    return dict(enumerate(values))


def test_an_interval_worked_out_by_hand() -> None:
    # Differences 1, 2, 3 have the mean 2 and the standard deviation 1. With n = 3, t(0.975, 2) = 4.30265.
    found = estimate(by_seed([1.0, 2.0, 3.0]), by_seed([0.0, 0.0, 0.0]), lower=False)
    assert found is not None and (found.mean, found.n) == (2.0, 3)
    assert found.low == pytest.approx(2 - 4.30265 / math.sqrt(3), abs=1e-4)
    assert found.high == pytest.approx(4.48414, abs=1e-4)
    assert found.format(2) == "+2.00 [-0.48, +4.48]"


def test_p_is_students_and_wilcoxons() -> None:
    differences = [0.2, 0.9, 0.5, 1.4, -0.3]
    found = estimate(by_seed([90 + x for x in differences]), by_seed([90.0] * 5), lower=False)
    assert found is not None and found.mean == pytest.approx(2.7 / 5)
    assert found.p == pytest.approx(scipy_stats.ttest_1samp(differences, 0).pvalue)
    # The signed ranks 1 (0.2), 4, 3, 5 and -2 (-0.3): the negative ones sum to 2. Of the 2^5 signs, 3 give a
    # sum of at most 2: {}, {1} and {2}.
    assert found.wilcoxon == pytest.approx(2 * 3 / 32)


@pytest.mark.parametrize(
    "differences",
    [(3.0,), (0.5, 0.5), (0.30000000000000004, 0.3, 0.3), (0.0, 0.0, 0.0)],
    ids=["one seed", "two alike", "alike up to rounding", "the same runs"],
)
def test_without_a_spread_there_is_no_interval(differences: tuple[float, ...]) -> None:
    found = estimate(by_seed(differences), dict.fromkeys(range(len(differences)), 0.0), lower=False)
    assert found is not None and found.mean == pytest.approx(differences[0])
    assert not found.has_interval and math.isnan(found.p)
    assert found.format(1) == f"{differences[0]:+.1f}"


def test_lower_is_better_turns_the_difference() -> None:
    ours, theirs = by_seed([0.5, 0.6, 0.7]), by_seed([1.0, 1.0, 1.4])
    found, turned = (estimate(ours, theirs, lower) for lower in (False, True))
    assert found is not None and turned is not None
    assert (turned.mean, turned.low, turned.high) == pytest.approx((-found.mean, -found.high, -found.low))
    assert turned.mean == pytest.approx(1.6 / 3) and turned.p == pytest.approx(found.p)


def test_a_value_to_compare_with() -> None:
    values = [1.02, 0.98, 1.01, 1.05]
    found = estimate(by_seed(values), 1.12, lower=False)
    assert found is not None
    interval = scipy_stats.ttest_1samp(values, 1.12).confidence_interval()
    assert (found.low, found.high) == pytest.approx((interval.low - 1.12, interval.high - 1.12))


@pytest.mark.parametrize("theirs", [{}, {7: 1.0}, {0: math.nan, 1: 1.0}])
def test_no_estimate_without_common_seeds_or_finite_values(theirs: dict[int, float]) -> None:
    assert estimate(by_seed([1.0, 2.0]), theirs, lower=False) is None


def test_the_spread_is_that_of_a_sample() -> None:
    assert summarise([1.0, 2.0, 3.0]).format(1) == "2.0 ± 1.0"
    assert summarise([2.0]).format(1) == "2.0"


def runs(diverged: Sequence[int]) -> dict[int, TrialRecord]:
    return {seed: TrialRecord(str(seed), {"diverged": bool(one)}) for seed, one in enumerate(diverged)}


def test_mcnemar_is_the_exact_binomial() -> None:
    # One seed failed on our side alone, seven on theirs alone, one on both and one on neither.
    ours, theirs = runs([1, 0, 0, 0, 0, 0, 0, 0, 1, 0]), runs([0, 1, 1, 1, 1, 1, 1, 1, 1, 0])
    failures, p = compare_failures(ours, theirs)
    assert failures == (2, 8)
    assert p == pytest.approx(2 * (comb(8, 0) + comb(8, 1)) / 2**8)  # 0.0703
    assert compare_failures(theirs, ours)[1] == pytest.approx(p)


def test_mcnemar_needs_discordant_pairs_of_common_seeds() -> None:
    failures, p = compare_failures(runs([1, 0, 0]), runs([1, 0]))
    assert failures == (1, 1) and math.isnan(p)
    only_ours = {9: TrialRecord("9", {"diverged": True})}
    assert compare_failures(only_ours, runs([0, 0]))[0] == (0, 0)


def log_rank_p(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return p of the log-rank test by its textbook sums: observed minus expected events of one group."""
    difference = variance = 0.0
    for time in sorted({t for t in (*ours, *theirs) if t < inf}):
        at_risk, all_at_risk = (sum(t >= time for t in side) for side in (ours, (*ours, *theirs)))
        events = sum(t == time for t in (*ours, *theirs))
        share = at_risk / all_at_risk
        difference += sum(t == time for t in ours) - events * share
        if all_at_risk > 1:
            variance += events * share * (1 - share) * (all_at_risk - events) / (all_at_risk - 1)
    return float(scipy_stats.chi2.sf(difference**2 / variance, 1))


# Two of ours and one of theirs were censored at epoch 100.
LATE, EARLY = [60.0, inf, 75.0, inf, 80.0, 66.0], [20.0, 31.0, 25.0, 60.0, 28.0, inf]


def test_log_rank_with_censoring() -> None:
    found = compare_jumps(by_seed(LATE), by_seed(EARLY), last=100)
    assert found is not None and found.n == 6
    # 100 is the delay's end for those that were not seen: +40, +69, +50, +40, +52, -34.
    assert found.mean == pytest.approx((40 + 69 + 50 + 40 + 52 - 34) / 6)
    assert found.p == pytest.approx(log_rank_p(LATE, EARLY))
    samples = [
        scipy_stats.CensoredData.right_censored([min(t, 100) for t in side], [t == inf for t in side])
        for side in (LATE, EARLY)
    ]
    assert found.p == pytest.approx(scipy_stats.logrank(*samples).pvalue)


def test_the_log_rank_interval_says_what_the_test_says() -> None:
    later, sooner = [60.0, 70.0, 75.0, inf, 80.0, 66.0], [20.0, 31.0, 25.0, 34.0, 28.0, 22.0]
    assert log_rank_p(later, sooner) < 0.05 < log_rank_p(LATE[:2], EARLY[:2])
    late = compare_jumps(by_seed(later), by_seed(sooner), 100)
    early = compare_jumps(by_seed(sooner), by_seed(later), 100)
    unclear = compare_jumps(by_seed(LATE[:2]), by_seed(EARLY[:2]), 100)
    assert late is not None and early is not None and unclear is not None
    assert late.low > 0 and early.high < 0 and unclear.low < 0 < unclear.high


def test_jumps_that_cannot_be_compared() -> None:
    assert compare_jumps({0: 5.0}, {0: 6.0, 1: 7.0}, 100) is None
    assert compare_jumps({0: 5.0, 1: 6.0}, {2: 6.0, 3: 7.0}, 100) is None  # no common seed
    none_seen = compare_jumps({0: inf, 1: inf}, {0: inf, 1: inf}, 100)
    assert none_seen is not None and none_seen.mean == 0 and none_seen.low < 0 < none_seen.high
