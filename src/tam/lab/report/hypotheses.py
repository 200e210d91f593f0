"""Hypotheses about means: how often a statement holds if the seeds are drawn again.

The seeds of every variant and rung are drawn with replacement. p is the share of draws in which the statement
is false.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tam.lab.core.study import Ladder
from tam.lab.report.verdicts import FAILS, HOLDS, NOT_TESTED, UNDECIDED

Array = NDArray[np.float64]
SeedFigures = Sequence[float] | Sequence[Sequence[float]]  # of a rung; a seed's first one is its loss
DRAWS = 10_000
LEVEL = 0.025
EDGE = 1e-9  # relative: figures this close are equal


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A statement that was registered, and what the runs say of it.

    Attributes:
        number: "H1", for example.
        title: A few words.
        statement: What is claimed.
        figure: The measured figures.
        n: How many seeds each mean has.
        p: The share of draws in which it is false; None if it is not decided by draws.
        missing: Required runs that do not exist yet. Then p counts what exists: the statement can turn out
            to be false, but not true.
        by_draws: Whether draws decide it.
        verdict: Empty until `judge` has decided it.
        why: A reason of a few words.
    """

    number: str
    title: str
    statement: str
    figure: str = ""
    n: str = ""
    p: float | None = None
    missing: str = ""
    by_draws: bool = True
    verdict: str = ""
    why: str = ""


class Draws:
    """Draws seeds with replacement, the same ones at every call of the program."""

    def __init__(self, count: int = DRAWS) -> None:
        self.count = count
        self._generator = np.random.default_rng(0)

    def means(self, values: Sequence[SeedFigures]) -> Array:
        """Return the means of several groups of seeds: the measured ones first, then one row per draw.

        A seed can have several figures. They are drawn together, and are the last dimension of the means.
        """
        columns = []
        for group in (np.asarray(one, dtype=float) for one in values):
            places = self._generator.integers(0, len(group), (self.count, len(group)))
            columns.append(np.concatenate([group.mean(0)[None], group[places].mean(1)]))
        return np.stack(columns, 1)


@dataclass(frozen=True)
class DrawnLadder:
    """What the draws say of a variant of a ladder. Row 0 is what was measured, each other one a draw."""

    lrs: Array  # the rungs that have figures, by the baseline's lr
    means: Array  # [rows, rungs]; [rows, rungs, figures] if a seed has several figures
    lower_knee: Array
    upper_knee: Array


def draw_ladder(figures: Mapping[float, SeedFigures], draws: Draws, rules: Ladder) -> DrawnLadder:
    """Draw the seeds of a variant, given their figures by the baseline's lr, with capped losses.

    Where all drawn trials of the best rung have failed, both knees are the lowest rung. So they are without
    any rung: of a control whose sources have all diverged.
    """
    lrs = np.array(sorted(figures))
    if not figures:
        lowest = np.full(draws.count + 1, min(rules.variant(rules.baseline).lrs))
        return DrawnLadder(lrs, np.empty((draws.count + 1, 0)), lowest, lowest)
    means = draws.means([figures[lr] for lr in lrs])
    losses = means if means.ndim == 2 else means[..., 0]
    lower, upper = knees(losses, lrs, rules.tolerance)
    # A failed trial counts as the cap. So all drawn ones have failed where the best mean is the cap.
    has_no_best = losses.min(1) >= rules.cap * (1 - EDGE)
    return DrawnLadder(lrs, means, *(np.where(has_no_best, lrs[0], knee) for knee in (lower, upper)))


def knees(means: Array, lrs: Array, tolerance: float) -> tuple[Array, Array]:
    """Return the lower and the upper knee of every row of mean losses, [draws, rungs].

    Like `core.ladder.summarize`, but a knee outside the rungs counts as the last rung.
    """
    best = means.argmin(1)
    level = means.min(1) + tolerance
    upper = _crossing(means, np.log(lrs), best, level)
    lower = _crossing(means[:, ::-1], np.log(lrs[::-1]), len(lrs) - 1 - best, level)
    return np.exp(lower), np.exp(upper)


def _crossing(means: Array, log_lrs: Array, best: NDArray[np.int64], level: Array) -> Array:
    """Return log(lr) at which each row first reaches its level, to the right of its best rung."""
    rows = np.arange(len(means))
    is_above = (means >= level[:, None]) & (np.arange(len(log_lrs)) > best[:, None])
    after = np.where(is_above.any(1), is_above.argmax(1), len(log_lrs) - 1)
    before = np.maximum(after - 1, 0)
    rise = means[rows, after] - means[rows, before]
    share = np.where(is_above.any(1), (level - means[rows, before]) / np.where(rise > 0, rise, 1.0), 1.0)
    crossing: Array = log_lrs[before] + share * (log_lrs[after] - log_lrs[before])
    return crossing


def decide(hypothesis: Hypothesis, is_true: NDArray[np.bool_]) -> Hypothesis:
    """Return the hypothesis with its p. The first entry of `is_true` is for the measured means."""
    return replace(hypothesis, p=float(1 - is_true[1:].mean()))


def judge(hypotheses: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return the hypotheses with their verdicts, after Holm's correction.

    The correction counts all that draws decide and that have no verdict yet. Those that wait for runs are
    among them, so later runs cannot take back a "holds".
    """
    open_ones = [one for one in hypotheses if one.by_draws and not one.verdict]
    complete = sorted((one.p, one.number) for one in open_ones if one.p is not None and not one.missing)
    holding = set()
    for rank, (p, number) in enumerate(complete):
        if not _is_at_most(p, LEVEL / (len(open_ones) - rank)):
            break
        holding.add(number)
    return [_with_verdict(one, one.number in holding) for one in hypotheses]


def _with_verdict(one: Hypothesis, holds: bool) -> Hypothesis:
    if one.verdict:
        return one
    if one.p is None:
        return replace(one, verdict=NOT_TESTED, why=one.why or "Not run yet")
    share = f"True in {100 * (1 - one.p):.1f} % of the draws"
    verdict = HOLDS if holds else FAILS if _is_at_most(1 - one.p, LEVEL) else UNDECIDED
    waits = f"{one.missing} not complete yet" if one.missing else ""
    why = one.why or (waits if waits and verdict == UNDECIDED else ", ".join(filter(None, [share, waits])))
    return replace(one, verdict=verdict, why=why)


def _is_at_most(share: float, limit: float) -> bool:
    """Compare shares of draws. 1 - 0.975 is above 0.025 by rounding."""
    return share <= limit + 1e-9
