"""What paired runs say: the mean difference, its 95% interval, and a verdict.

For one seed all arms share the split, the initial weights and the batches, so that differences are taken seed
by seed. The interval is that of one comparison (Student's t). Whether a difference is told from 0 is decided
by Holm's method over all comparisons an experiment's preset plans, run or not: otherwise a verdict could come
and go with what else is run.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import TypeVar

LEVEL = 0.05
Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Summary:
    """An arm's outcomes."""

    n: int
    mean: float
    spread: float  # the standard deviation over the seeds; nan for one


@dataclass(frozen=True)
class Pairs:
    """Differences of an arm to what it is compared with, one a seed, and what they are judged by."""

    differences: Sequence[float]
    margin: float = 0.2  # differences within it matter to nobody
    higher: bool = True  # is better
    lost: int = 0  # seeds of either arm without a figure: what is left must not decide


@dataclass(frozen=True)
class Difference:
    """An arm against another, seed by seed."""

    n: int
    mean: float
    low: float  # of the interval; nan where the spread cannot be known
    high: float
    p: float  # Holm's
    verdict: str  # better, worse, equivalent or undecided; "" where there can be none
    lost: int = 0


def summarise(values: Sequence[float]) -> Summary:
    return Summary(len(values), mean(values), stdev(values) if len(values) > 1 else math.nan)


def paired(
    values: Mapping[int, float], others: Mapping[int, float], margin: float = 0.2, higher: bool = True
) -> Pairs:
    """Outcomes by seed, less those of another arm."""
    return Pairs([value - others[seed] for seed, value in values.items() if seed in others], margin, higher)


def compare(family: Mapping[Name, Pairs]) -> dict[Name, Difference]:
    """All comparisons of an experiment; those without pairs count in Holm's method, but have no answer."""
    p = _holm({name: _p(pairs.differences) for name, pairs in family.items()})
    return {name: _judged(pairs, p[name]) for name, pairs in family.items() if pairs.differences}


def _judged(pairs: Pairs, p: float) -> Difference:
    low, high = interval(pairs.differences)
    middle = mean(pairs.differences)
    verdict = "" if math.isnan(low) or pairs.lost else "undecided"
    if not verdict:
        pass
    elif low >= -pairs.margin and high <= pairs.margin:
        verdict = "equivalent"
    elif p <= LEVEL:
        verdict = "better" if (middle > 0) == pairs.higher else "worse"
    return Difference(len(pairs.differences), middle, low, high, p, verdict, pairs.lost)


def interval(differences: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """The interval of the mean that misses it with this probability (Student's t)."""
    from scipy import stats

    if not _has_spread(differences):
        return math.nan, math.nan
    half = stats.t.ppf(1 - level / 2, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return mean(differences) - float(half), mean(differences) + float(half)


def least(n: int, comparisons: int) -> float:
    """The standard errors a mean of n must be from 0 for Holm's first step: with few seeds, many."""
    from scipy import stats

    return float(stats.t.isf(LEVEL / max(comparisons, 1) / 2, n - 1)) if n > 1 else math.inf


def _p(differences: Sequence[float]) -> float:
    """Of a mean as far from 0 as this one, were it 0; nan where the spread cannot be known."""
    from scipy import stats

    if not _has_spread(differences):
        return math.nan
    t = abs(mean(differences)) * math.sqrt(len(differences)) / stdev(differences)
    return float(2 * stats.t.sf(t, len(differences) - 1))


def _has_spread(differences: Sequence[float]) -> bool:
    """Equal differences say as little of their spread as one; they may differ in their last digits."""
    return len(differences) > 1 and stdev(differences) > 1e-4 * max(map(abs, differences))


def _holm(p: Mapping[Name, float]) -> dict[Name, float]:
    """Adjusted: the k-th least of m is multiplied by m - k + 1, and none is less than those before it."""
    found: dict[Name, float] = dict.fromkeys(p, math.nan)
    least = 0.0
    known = sorted((value, i, name) for i, (name, value) in enumerate(p.items()) if not math.isnan(value))
    for k, (value, _, name) in enumerate(known):
        least = max(least, min(1.0, value * (len(p) - k)))
        found[name] = least
    return found
