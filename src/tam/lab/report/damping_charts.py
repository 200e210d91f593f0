"""Charts of the damping that runs recorded at every step."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from markupsafe import Markup
from torch import Tensor

from tam.lab.core.plan import Plan
from tam.lab.report.charts import Series, line_chart
from tam.step.rule import damping_of

BINS = 60
PARTS = {"the whole run": (0, 100), "its first tenth": (0, 10), "its last tenth": (90, 100)}  # percent


def distribution(plan: Plan, styles: Mapping[str, int]) -> list[Markup]:
    """Return how d is distributed over the steps of a run, all seeds together, for each part of the run."""
    dampings: dict[str, list[Tensor]] = {}  # by variant, one tensor per seed
    for outcome in plan.outcomes():
        recorded = [record.alignment for record in outcome.records.values()]
        usable = [s for s in recorded if s is not None and len(s) and bool(s.isfinite().all())]
        if usable and not outcome.variant.damping:
            dampings[outcome.variant.name] = [damping_of(s) for s in usable]
    charts = []
    for part, (start, end) in PARTS.items() if dampings else ():
        low, high = torch.cat([d for runs in dampings.values() for d in runs]).aminmax()
        lines = []
        for name, runs in dampings.items():
            steps = [d[len(d) * start // 100 : max(1, len(d) * end // 100)] for d in runs]  # one at least
            lines.append(_histogram(name, torch.cat(steps), float(low), float(high), styles.get(name)))
        title = f"Distribution of d over {part}"
        charts.append(line_chart(lines, title, "d = (1 + s) / 2", "% of the steps"))
    return charts


def _histogram(name: str, d: Tensor, low: float, high: float, style: int | None) -> Series:
    counts = torch.histc(d, BINS, low, high) / len(d)
    middles = [low + (high - low) * (i + 0.5) / BINS for i in range(BINS)]
    sample = d.double()[:: max(1, len(d) // 100_000)]
    quantiles = torch.quantile(sample, torch.tensor([0.05, 0.5, 0.95]).double())
    text = ", ".join(f"{quantile:.3f}" for quantile in quantiles.tolist())
    return Series(f"{name}: 5, 50, 95% at {text}", middles, (100 * counts).tolist(), style=style)
