"""What the losses of a ladder say of a variant: its best lr, its knees and its learning rate sensitivity.

    summary = summarize({0.1: [1.52, 1.50], 0.2: [1.48, 1.47], 0.4: [1.60, 1.71]}, tolerance=0.02)

Nothing here knows plans or files. Losses are capped before: see `cap_loss`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

EDGE = 1e-3  # relative: a rung this close to an end of a window is inside

Losses = Mapping[float, Sequence[float]]  # by lr, one per seed
Window = tuple[float, float]  # the lowest and the highest lr


@dataclass(frozen=True)
class LadderSummary:
    """The best rung of a variant and its knees. A knee is None if it lies outside the rungs (censored)."""

    best_lr: float
    best_loss: float  # mean over the seeds
    lower_knee: float | None
    upper_knee: float | None

    @property
    def width(self) -> float | None:
        """The upper knee divided by the lower one."""
        if self.lower_knee is None or self.upper_knee is None:
            return None
        return self.upper_knee / self.lower_knee


def cap_loss(loss: float, cap: float) -> float:
    """Return the loss, or the cap if the loss is larger or not finite."""
    return min(loss, cap) if math.isfinite(loss) else cap


def mean_losses(losses_by_lr: Losses) -> dict[float, float]:
    """Return the mean loss of every rung that has losses, by ascending lr."""
    means = {lr: fmean(losses) for lr, losses in sorted(losses_by_lr.items()) if losses}
    if not all(map(math.isfinite, means.values())):
        raise ValueError("losses must be finite: cap them first")
    return means


def summarize(losses_by_lr: Losses, tolerance: float) -> LadderSummary:
    """Return the best rung and the knees: where the mean loss crosses the best one plus the tolerance.

    Between two rungs, the crossing is interpolated linearly in the loss and in log(lr). On each side the
    crossing nearest to the best rung counts.

    Raises:
        ValueError: There is no loss, a loss is not finite, or the tolerance is not positive.
    """
    means = mean_losses(losses_by_lr)
    if not means or not tolerance > 0:
        raise ValueError("a summary needs losses and a positive tolerance")
    best = min(means, key=means.__getitem__)
    rungs = [*means.items()]
    place = [*means].index(best)
    level = means[best] + tolerance
    lower, upper = _crossing(rungs[place::-1], level), _crossing(rungs[place:], level)
    return LadderSummary(best, means[best], lower, upper)


def _crossing(rungs: Sequence[tuple[float, float]], level: float) -> float | None:
    """Return the first lr, going away from the best rung, at which the loss reaches this level."""
    for (lr, loss), (next_lr, next_loss) in pairwise(rungs):
        if next_loss >= level:
            return float(lr * (next_lr / lr) ** ((level - loss) / (next_loss - loss)))
    return None


def in_window(losses_by_lr: Losses, window: Window) -> dict[float, Sequence[float]]:
    """Return the rungs inside a window that have losses."""
    low, high = window[0] * (1 - EDGE), window[1] * (1 + EDGE)
    return {lr: losses for lr, losses in sorted(losses_by_lr.items()) if low <= lr <= high and losses}


def sensitivity(losses_by_lr: Losses, window: Window) -> float | None:
    """Return the learning rate sensitivity of Wortsman et al. (2023, arXiv:2309.14322).

    It is the mean, over the rungs in the window, of the capped loss minus the best loss in the window. None
    if no rung lies in the window.
    """
    means = mean_losses(in_window(losses_by_lr, window))
    return fmean(means.values()) - min(means.values()) if means else None


def shift_window(window: Window, best_lr: float, reference_lr: float) -> Window:
    """Return the window of a reference, moved by the ratio of the two best learning rates."""
    ratio = best_lr / reference_lr
    return window[0] * ratio, window[1] * ratio


def count_failures(failed_by_lr: Mapping[float, Sequence[bool]]) -> dict[float, tuple[int, int]]:
    """Return how many trials failed at each rung, of how many."""
    return {lr: (sum(failed), len(failed)) for lr, failed in sorted(failed_by_lr.items())}
