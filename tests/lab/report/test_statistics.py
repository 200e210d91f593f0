"""Intervals and verdicts, against figures worked out by hand and scipy's own tests."""

from __future__ import annotations

import math

import pytest
from scipy.stats import t as student
from scipy.stats import ttest_1samp

from tam.lab.report import statistics as stats
from tam.lab.report.statistics import Pairs


def test_an_interval_worked_out_by_hand() -> None:
    # mean 2, standard deviation 1, n = 3: t(0.975, 2) = 4.3027.
    _, low, high = stats.t_test([1.0, 2.0, 3.0])
    assert (low, high) == (
        pytest.approx(2 - 4.30265 / math.sqrt(3), abs=1e-4),
        pytest.approx(4.48414, abs=1e-4),
    )
    assert all(math.isnan(x) for x in stats.t_test([1.0]))


def test_p_is_students() -> None:
    found = stats.compare({"b": Pairs([0.2, 0.9, 0.5])})["b"]
    assert found.n == 3 and found.mean == pytest.approx(1.6 / 3)
    assert found.p == pytest.approx(ttest_1samp([0.2, 0.9, 0.5], 0).pvalue)


@pytest.mark.parametrize(
    "differences, verdict",
    [
        ((1.0, 1.1, 0.9, 1.05), "better"),
        ((-1.0, -1.1, -0.9, -1.05), "worse"),
        ((0.01, -0.02, 0.03, 0.0), "equivalent"),
        ((1.0, -1.0, 0.5, -0.4), "undecided"),
        ((3.0,), ""),  # one seed says nothing
        ((0.5, 0.5), ""),  # nor do those of which no spread can be told
        ((0.30000000000000004, 0.3, 0.3), ""),
        ((0.0, 0.0, 0.0), ""),
    ],
)
def test_verdicts(differences: tuple[float, ...], verdict: str) -> None:
    assert stats.compare({"other": Pairs(differences)})["other"].verdict == verdict
    turned = {"better": "worse", "worse": "better"}.get(verdict, verdict)
    assert stats.compare({"other": Pairs(differences, higher=False)})["other"].verdict == turned


def test_holm_over_a_family_worked_out_by_hand() -> None:
    clear, weak = Pairs([5.0, 5.01, 5.02, 5.03, 5.04]), Pairs([0.9, 1.6, 0.2, 1.4, 0.5])
    alone = ttest_1samp(weak.differences, 0).pvalue
    assert 0.025 < alone < 0.05
    two = stats.compare({"clear": clear, "weak": weak})
    assert two["weak"].p == pytest.approx(alone) and two["weak"].verdict == "better"
    assert two["clear"].p == pytest.approx(2 * ttest_1samp(clear.differences, 0).pvalue)
    # Of three comparisons, the second is held to half the level, also if the third is not run yet.
    for third in ([1.0, -1.0, 0.5, -0.6, 0.2], [], [0.4]):
        three = stats.compare({"clear": clear, "weak": weak, "third": Pairs(third)})
        assert three["weak"].p == pytest.approx(2 * alone) and three["weak"].verdict == "undecided"
        assert three["clear"].verdict == "better" and ("third" in three) == bool(third)
        # The interval is that of one comparison.
        assert (three["weak"].low, three["weak"].high) == (two["weak"].low, two["weak"].high)


def test_what_a_first_verdict_takes() -> None:
    """A mean at that many standard errors has just the level, after Holm's correction."""
    for n, comparisons in ((3, 34), (5, 1), (10, 12)):
        away = stats.needed_standard_errors(n, comparisons)
        assert 2 * comparisons * student.sf(away, n - 1) == pytest.approx(0.05)
    assert stats.needed_standard_errors(1, 3) == float("inf")
