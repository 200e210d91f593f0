"""Paired comparisons: the mean difference, its 95 % interval, and tests that check it.

For one seed all variants share the split, the initial weights and the batches, so differences are paired by
seed. Intervals belong to one comparison (Student's t). Only the claims of `verdicts` are corrected for their
number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from tam.lab.core.results import TrialRecord

LEVEL = 0.05


@dataclass(frozen=True)
class Summary:
    """The mean of some outcomes and their standard deviation, nan for a single one."""

    mean: float
    spread: float

    def format(self, digits: int) -> str:
        return f"{self.mean:.{digits}f}" + ("" if math.isnan(self.spread) else f" ± {self.spread:.{digits}f}")


@dataclass(frozen=True)
class Estimate:
    """The mean of a difference with its 95 % interval. The interval is NaN if the spread is not known."""

    mean: float
    low: float
    high: float
    p: float
    n: int
    wilcoxon: float = math.nan  # p of the signed-rank test, as a check of the t-test
    failures: tuple[int, int] = (0, 0)  # diverged runs of the two variants
    mcnemar: float = math.nan  # exact p of a difference in failures

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low + self.high)

    def format(self, digits: int) -> str:
        form = f"{{:+.{digits}f}}"
        mean, low, high = (form.format(value) for value in (self.mean, self.low, self.high))
        return f"{mean} [{low}, {high}]" if self.has_interval else mean


def summarise(values: Sequence[float]) -> Summary:
    return Summary(fmean(values), stdev(values) if len(values) > 1 else math.nan)


def estimate(ours: Mapping[int, float], theirs: Mapping[int, float] | float, lower: bool) -> Estimate | None:
    """Return the mean difference by seed, positive where ours is better. None without a common seed.

    `theirs` can be one number: the value that ours is compared with. `lower` means that lower is better.
    """
    from scipy.stats import ttest_rel, wilcoxon

    others = theirs if isinstance(theirs, Mapping) else dict.fromkeys(ours, theirs)
    seeds = sorted(ours.keys() & others.keys())
    better, worse = (others, ours) if lower else (ours, others)
    a, b = [better[seed] for seed in seeds], [worse[seed] for seed in seeds]
    if not seeds or not all(map(math.isfinite, a + b)):
        return None
    differences = [x - y for x, y in zip(a, b, strict=True)]
    mean = fmean(differences)
    # Equal differences say as little about their spread as a single one; their last digits may differ.
    if len(seeds) < 2 or stdev(differences) <= 1e-4 * max(map(abs, differences)):
        return Estimate(mean, math.nan, math.nan, math.nan, len(seeds))
    test = ttest_rel(a, b)
    interval, signed_rank = test.confidence_interval(1 - LEVEL), float(wilcoxon(differences).pvalue)
    low, high, p = float(interval.low), float(interval.high), float(test.pvalue)
    return Estimate(mean, low, high, p, len(seeds), signed_rank)


def compare_failures(
    ours: Mapping[int, TrialRecord], theirs: Mapping[int, TrialRecord]
) -> tuple[tuple[int, int], float]:
    """Return the numbers of diverged runs, and the exact p of McNemar's test on the common seeds."""
    from scipy.stats import binomtest

    pairs = [(ours[seed].diverged, theirs[seed].diverged) for seed in ours.keys() & theirs.keys()]
    only_ours, only_theirs = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    discordant = only_ours + only_theirs
    p = float(binomtest(only_ours, discordant).pvalue) if discordant else math.nan
    return (sum(a for a, _ in pairs), sum(b for _, b in pairs)), p


def compare_jumps(ours: Mapping[int, float], theirs: Mapping[int, float], last: int) -> Estimate | None:
    """Return the mean delay of an event, censored at the last epoch, with p of the log-rank test.

    An event that was not seen is infinite. The interval says what the test says: it excludes 0 if p is at
    most 0.05 (and the mean is not 0, which would leave no side).
    """
    from scipy.stats import CensoredData, logrank

    if min(len(ours), len(theirs)) < 2 or not ours.keys() & theirs.keys():
        return None
    samples = [
        CensoredData(
            uncensored=[v for v in side.values() if math.isfinite(v)],
            right=[float(last)] * sum(map(math.isinf, side.values())),
        )
        for side in (ours, theirs)
    ]
    delays = [min(ours[seed], last) - min(theirs[seed], last) for seed in ours.keys() & theirs.keys()]
    was_seen = any(map(math.isfinite, (*ours.values(), *theirs.values())))
    mean, p = fmean(delays), float(logrank(*samples).pvalue) if was_seen else math.nan
    low, high = (-math.inf, math.inf)
    if p <= LEVEL and mean:
        low, high = (math.ulp(0.0), math.inf) if mean > 0 else (-math.inf, -math.ulp(0.0))
    return Estimate(mean, low, high, p, len(delays))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted by Holm's method, in the same order. NaN counts as 1."""
    values = [1.0 if math.isnan(p) else p for p in p_values]
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, values[i] * (len(values) - rank)))
        adjusted[i] = largest
    return adjusted


def p_above(found: Estimate, bound: float) -> float:
    """Return p, two-sided, of a mean above this bound: at most 0.05 if the 95 % interval lies above it."""
    from scipy.stats import t as student

    error = (found.high - found.low) / 2 / float(student.ppf(1 - LEVEL / 2, found.n - 1))
    return min(1.0, 2 * float(student.sf((found.mean - bound) / error, found.n - 1)))


def equivalence_p(found: Estimate, margin: float) -> float:
    """Return p of two one-sided tests: at most 0.05 if the 95 % interval lies inside the margin."""
    mirrored = replace(found, mean=-found.mean)
    return max(p_above(found, -margin), p_above(mirrored, -margin))
