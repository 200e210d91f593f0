"""What paired runs say: the mean difference, its 95% interval, and a verdict.

For one seed all arms share the split, the initial weights and the batches, so that differences are taken seed
by seed. Of m comparisons the intervals are of 1 - 5% / m (Bonferroni), so that all of them together hold with
95%; whether a difference is told from 0 is decided by Holm's method, which is sharper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

LEVEL = 0.05


@dataclass(frozen=True)
class Summary:
    """An arm's outcomes."""

    n: int
    mean: float
    spread: float  # the standard deviation over the seeds; nan for one


@dataclass(frozen=True)
class Difference:
    """An arm against the baseline, seed by seed."""

    n: int
    mean: float
    low: float  # of the interval; nan where there are fewer than two pairs
    high: float
    p: float
    verdict: str  # better, worse, equivalent or undecided


def summarise(values: Sequence[float]) -> Summary:
    return Summary(len(values), mean(values), stdev(values) if len(values) > 1 else math.nan)


def compare(
    arms: Mapping[str, Mapping[int, float]], baseline: str, equivalent: float = 0.2, higher: bool = True
) -> dict[str, Difference]:
    """Every other arm against the baseline; outcomes by seed, of which higher (or lower) ones are better."""
    pairs = {
        name: [value - arms[baseline][seed] for seed, value in outcomes.items() if seed in arms[baseline]]
        for name, outcomes in arms.items()
        if name != baseline
    }
    p = {name: _p(differences) for name, differences in pairs.items()}
    testable = [name for name in p if not math.isnan(p[name])]
    found = {}
    significant = True  # Holm: after one that is not, none is
    for i, name in enumerate(sorted(p, key=lambda name: (math.isnan(p[name]), p[name]))):
        differences = pairs[name]
        if not differences:
            continue
        low, high = interval(differences, LEVEL / max(1, len(testable)))
        significant = significant and p[name] <= LEVEL / max(1, len(testable) - i)
        verdict = "undecided"
        if low >= -equivalent and high <= equivalent:
            verdict = "equivalent"
        elif significant:
            verdict = "better" if (mean(differences) > 0) == higher else "worse"
        found[name] = Difference(len(differences), mean(differences), low, high, p[name], verdict)
    return found


def interval(differences: Sequence[float], level: float) -> tuple[float, float]:
    """The interval of the mean that misses it with this probability (Student's t)."""
    from scipy import stats

    if len(differences) < 2:
        return math.nan, math.nan
    half = stats.t.ppf(1 - level / 2, len(differences) - 1) * stdev(differences) / math.sqrt(len(differences))
    return mean(differences) - float(half), mean(differences) + float(half)


def _p(differences: Sequence[float]) -> float:
    """Of a mean as far from 0 as this one, were it 0."""
    from scipy import stats

    if len(differences) < 2:
        return math.nan
    spread = stdev(differences)
    if spread == 0:
        return 0.0 if mean(differences) else 1.0
    t = abs(mean(differences)) * math.sqrt(len(differences)) / spread
    return float(2 * stats.t.sf(t, len(differences) - 1))
