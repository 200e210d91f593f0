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


def metric_by_epoch(records: Iterable[TrialRecord], key: str) -> dict[float, list[float]]:
    """Return the values of all runs by epoch. Not all runs have the metric at all epochs."""
    by_epoch: dict[float, list[float]] = {}
    for row in (row for record in records for row in record.metrics if key in row):
        by_epoch.setdefault(row["epoch"], []).append(row[key])
    return dict(sorted(by_epoch.items()))


def _is_intact(record: TrialRecord) -> bool:
    losses = [row["loss"] for row in record.metrics if "loss" in row]
    has_exploded = bool(losses) and math.inf > losses[-1] > EXPLODED * abs(losses[0])
    return not record.diverged and not has_exploded
