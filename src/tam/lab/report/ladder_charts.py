"""Charts of a ladder: the loss at every learning rate, and d at the best rungs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from markupsafe import Markup

from tam.lab.core.ladder_plan import LadderPlan
from tam.lab.core.plan import Outcome
from tam.lab.report.charts import Series, line_chart, mean_series
from tam.lab.report.curves import curve_lines, metric_by_epoch, runs_to_draw

AT_BEST = "at the best rung"
ROOM = 1.0  # nats above the best loss that the chart shows
MAX_LAYER_CHARTS = 4
DAMPING, LAYER_PREFIX = "damping", "damping_"  # metrics: the mean d of an epoch, of all layers or of one type


def ladder_charts(plan: LadderPlan, styles: Mapping[str, int]) -> list[Markup]:
    """Return the charts of a ladder. A variant with the runs of another one is not drawn."""
    repeated = plan.duplicates()
    outcomes = [one for one in plan.outcomes() if one.records and one.variant.name not in repeated]
    if not outcomes:
        return []
    unit = str(getattr(plan.experiment.config, "unit", "epoch"))
    return [
        _loss_chart(plan, outcomes, styles),
        *_damping_chart(outcomes, styles, unit),
        *_layer_charts(outcomes, unit),
    ]


def loss_chart(plan: LadderPlan, variants: Sequence[str]) -> Markup:
    """Return the mean loss of some variants by effective lr, with the seeds as dots."""
    outcomes = [one for one in plan.outcomes() if one.variant.name in variants]
    return _loss_chart(plan, outcomes, {name: style for style, name in enumerate(variants)})


def _loss_chart(plan: LadderPlan, outcomes: Sequence[Outcome], styles: Mapping[str, int]) -> Markup:
    """Return the mean loss of each variant by effective lr, with the seeds as dots."""
    lines = []
    for outcome in outcomes:
        losses = plan.losses(outcome.variant)
        seeds = [(lr, loss) for lr, of_rung in losses.items() for loss in of_rung]
        name, means = outcome.variant.name, [*map(fmean, losses.values())]
        lines.append(Series(name, [*losses], means, style=styles[name], points=seeds))
    limit = min(y for line in lines for y in line.y) + ROOM
    title = f"{plan.study.label} by lr (dots: seeds; triangles: above the axis)"
    return line_chart(lines, title, "effective lr", plan.study.label, log_x=True, limit=limit)


def _damping_chart(outcomes: Sequence[Outcome], styles: Mapping[str, int], unit: str) -> Iterator[Markup]:
    if lines := [*curve_lines(outcomes, DAMPING, styles)]:
        yield line_chart(lines, f"d over the run, {AT_BEST}", unit, "d")


def _layer_charts(outcomes: Sequence[Outcome], unit: str) -> Iterator[Markup]:
    """Return d by type of layer, one chart per variant."""
    keys = {outcome.variant.name: _layer_keys(outcome) for outcome in outcomes}
    runs = runs_to_draw(outcomes)
    names = [name for name, own in keys.items() if own and runs[name]][:MAX_LAYER_CHARTS]
    types = {key: i for i, key in enumerate(dict.fromkeys(key for one in keys.values() for key in one))}
    for name in names:
        lines = [
            mean_series(
                key.removeprefix(LAYER_PREFIX).replace("_", " "), metric_by_epoch(runs[name], key), types[key]
            )
            for key in keys[name]
        ]  # a type of layer looks the same in all charts
        yield line_chart(lines, f"d by type of layer: {name}, {AT_BEST}", unit, "d")


def _layer_keys(outcome: Outcome) -> list[str]:
    rows = (row for record in outcome.records.values() for row in record.metrics)
    return [*dict.fromkeys(key for row in rows for key in row if key.startswith(LAYER_PREFIX))]
