"""Curves of a metric: the mean over the seeds of each variant, with a band over all of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tam.lab.core.plan import Outcome
from tam.lab.core.results import TrialRecord
from tam.lab.report.charts import Series, mean_series

EXPLODED = 100.0  # a run whose training loss ends so many times above its first value


def curve_lines(outcomes: Sequence[Outcome], key: str, styles: Mapping[str, int]) -> Iterator[Series]:
    """Return the line of each variant that has the metric."""
    for name, records in runs_to_draw(outcomes).items():
        if by_epoch := metric_by_epoch(records, key):
            yield mean_series(name, by_epoch, styles[name])


def runs_to_draw(outcomes: Sequence[Outcome]) -> dict[str, list[TrialRecord]]:
    """Return the runs of each variant that neither diverged nor exploded: one of those flattens all curves.

    If no variant has such a run, all runs are returned: they are what there is to show.
    """
    runs = {one.variant.name: [*one.records.values()] for one in outcomes}
    intact = {name: [*filter(_is_intact, records)] for name, records in runs.items()}
    return intact if any(intact.values()) else runs


def describe_undrawn(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Say per variant which of its finished runs the curves leave out."""
    drawn = runs_to_draw(outcomes)
    for outcome in outcomes:
        name, kept = outcome.variant.name, {record.key for record in drawn[outcome.variant.name]}
        runs = [
            f"seed {seed} ({_describe_end(record)})"
            for seed, record in outcome.records.items()
            if record.key not in kept
        ]
        if runs:
            yield (f'"{name}" without ' if kept else f'No curve of "{name}": ') + ", ".join(runs) + "."


def metric_by_epoch(records: Iterable[TrialRecord], key: str) -> dict[float, list[float]]:
    """Return the values of all runs by epoch. Not all runs have the metric at all epochs."""
    by_epoch: dict[float, list[float]] = {}
    for row in (row for record in records for row in record.metrics if key in row):
        by_epoch.setdefault(row["epoch"], []).append(row[key])
    return dict(sorted(by_epoch.items()))


def _losses(record: TrialRecord) -> list[float]:
    return [row["loss"] for row in record.metrics if "loss" in row]


def _describe_end(record: TrialRecord) -> str:
    """Return how a run that is not drawn has ended, with its last training loss."""
    loss = "".join(f"loss {loss:.3g}" for loss in _losses(record)[-1:])
    return ", ".join(filter(None, ["diverged" if record.diverged else "", loss]))


def _is_intact(record: TrialRecord) -> bool:
    losses = _losses(record)
    has_exploded = bool(losses) and math.inf > losses[-1] > EXPLODED * abs(losses[0])
    return not record.diverged and not has_exploded
