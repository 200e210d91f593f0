"""Paired comparisons: the mean difference, its 95% interval, and a verdict.

For one seed all variants share the split, the initial weights and the batches, so differences are paired by
seed. The interval belongs to one comparison (Student's t). A difference is significant by Holm's method over
all comparisons that a preset plans, run or not. So a verdict does not depend on what else was run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean, stdev
from typing import TypeVar

LEVEL = 0.05
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Summary:
    """The mean of some outcomes and their standard deviation, nan for a single one."""

    mean: float
    spread: float

    def format(self, digits: int) -> str:
        return f"{self.mean:.{digits}f}" + ("" if math.isnan(self.spread) else f" ± {self.spread:.{digits}f}")


@dataclass(frozen=True)
class Pairs:
    """The differences between two variants, one per seed, and how they are judged."""

    differences: Sequence[float]
    margin: float = 0.2  # smaller differences do not matter
    higher: bool = True  # is better
    lost: int = 0  # seeds of either variant that diverged without an outcome: the rest must not decide


@dataclass(frozen=True)
class Difference:
    """The result of a paired comparison of two variants."""

    n: int
    mean: float
    low: float  # of the interval; nan if the spread is not known
    high: float
    p: float  # after Holm's correction
    verdict: str  # better, worse, equivalent or undecided; "" if there can be none
    lost: int = 0

    def format_interval(self, digits: int) -> str:
        return f"{self.low:+.{digits}f} to {self.high:+.{digits}f}"

    def explain_no_verdict(self) -> str:
        if self.lost:
            return f"{self.lost} diverged: no verdict"
        return "one seed: no verdict" if self.n == 1 else f"equal in all {self.n} seeds: no verdict"


def summarise(values: Sequence[float]) -> Summary:
    return Summary(mean(values), stdev(values) if len(values) > 1 else math.nan)


def compare(family: Mapping[Name, Pairs]) -> dict[Name, Difference]:
    """Judge all comparisons of a family. One without pairs counts in Holm's method, but has no result."""
    tests = {name: t_test(pairs.differences) for name, pairs in family.items()}
    adjusted = _holm({name: test[0] for name, test in tests.items()})
    results = {}
    for name, pairs in family.items():
        if not pairs.differences:
            continue
        p, low, high = adjusted[name], *tests[name][1:]
        middle, verdict = mean(pairs.differences), "undecided"
        if math.isnan(low) or pairs.lost:
            verdict = ""
        elif low >= -pairs.margin and high <= pairs.margin:
            verdict = "equivalent"
        elif p <= LEVEL:
            verdict = "better" if (middle > 0) == pairs.higher else "worse"
        results[name] = Difference(len(pairs.differences), middle, low, high, p, verdict, pairs.lost)
    return results


def t_test(differences: Sequence[float]) -> tuple[float, float, float]:
    """Return the p-value of a mean of 0 and the ends of the mean's interval (Student's t)."""
    # Equal differences say as little about their spread as a single one; their last digits may differ.
    if len(differences) < 2 or stdev(differences) <= 1e-4 * max(map(abs, differences)):
        return math.nan, math.nan, math.nan
    from scipy.stats import ttest_1samp

    test = ttest_1samp(differences, 0.0)
    interval = test.confidence_interval(1 - LEVEL)
    return float(test.pvalue), float(interval.low), float(interval.high)


def needed_standard_errors(n: int, comparisons: int) -> float:
    """Return how many standard errors from 0 a mean of n must be for Holm's first step."""
    from scipy.stats import t as student

    return float(student.isf(LEVEL / max(comparisons, 1) / 2, n - 1)) if n > 1 else math.inf


def _holm(p: Mapping[Name, float]) -> dict[Name, float]:
    """Multiply the k-th smallest of m p-values by m - k + 1; none becomes smaller than those before it."""
    ordered = sorted((name for name in p if not math.isnan(p[name])), key=p.__getitem__)
    scaled = [min(1.0, p[name] * (len(p) - k)) for k, name in enumerate(ordered)]
    return {**dict.fromkeys(p, math.nan), **dict(zip(ordered, accumulate(scaled, max), strict=True))}
