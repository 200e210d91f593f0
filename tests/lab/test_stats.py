"""Intervals and verdicts, against figures worked out by hand and scipy's own tests."""

from __future__ import annotations

import math

import pytest
from scipy.stats import ttest_1samp

from tam.lab import stats


def test_an_interval_worked_out_by_hand() -> None:
    # mean 2, standard deviation 1, n = 3: t(0.975, 2) = 4.3027.
    low, high = stats.interval([1.0, 2.0, 3.0], 0.05)
    assert (low, high) == (
        pytest.approx(2 - 4.30265 / math.sqrt(3), abs=1e-4),
        pytest.approx(4.48414, abs=1e-4),
    )
    assert all(math.isnan(x) for x in stats.interval([1.0], 0.05))


def test_pairs_are_matched_by_seed_and_p_is_students() -> None:
    baseline = {0: 90.0, 1: 91.0, 2: 95.0, 3: 94.0}
    other = {2: 95.5, 0: 90.2, 1: 91.9, 9: 50.0}
    found = stats.compare({"a": baseline, "b": other}, "a")["b"]
    assert found.n == 3 and found.mean == pytest.approx(1.6 / 3)
    assert found.p == pytest.approx(ttest_1samp([0.2, 0.9, 0.5], 0).pvalue)


def test_verdicts() -> None:
    base = dict.fromkeys(range(4), 90.0)

    def verdict(*differences: float) -> str:
        other = {i: 90 + d for i, d in enumerate(differences)}
        return stats.compare({"base": base, "other": other}, "base")["other"].verdict

    assert verdict(1.0, 1.1, 0.9, 1.05) == "better"
    assert verdict(-1.0, -1.1, -0.9, -1.05) == "worse"
    assert verdict(0.01, -0.02, 0.03, 0.0) == "equivalent"
    assert verdict(1.0, -1.0, 0.5, -0.4) == "undecided"
    assert verdict(3.0) == "undecided"  # one seed says nothing


def test_holm_holds_the_second_comparison_to_the_full_level() -> None:
    base = dict.fromkeys(range(5), 0.0)
    arms = {
        "base": base,
        "clear": {i: 5 + 0.01 * i for i in range(5)},
        "weak": {0: 0.9, 1: 1.6, 2: 0.2, 3: 1.4, 4: 0.5},
    }
    both = stats.compare(arms, "base")
    assert 0.05 > both["weak"].p > 0.025 and both["weak"].verdict == "better"
    # Of three comparisons, the second is held to half the level.
    arms["none"] = {0: 1.0, 1: -1.0, 2: 0.5, 3: -0.6, 4: 0.2}
    three = stats.compare(arms, "base")
    assert [three[name].verdict for name in ("clear", "weak", "none")] == ["better", "undecided", "undecided"]
