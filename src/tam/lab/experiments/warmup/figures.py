"""What the report of a warm-up shows: jumps of the gradient norm, the step at a switch, loss barriers."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from markupsafe import Markup

from tam.lab.core.plan import Plan
from tam.lab.report.charts import line_chart, mean_series
from tam.lab.report.outcomes import first_jump

BARRIERS = {
    "barrier_train": "training loss",
    "barrier_validation": "validation loss",
    "barrier_train_as_they_are": "training loss, statistics as interpolated",
    "barrier_validation_as_they_are": "validation loss, statistics as interpolated",
}


def report_lines(plan: Plan) -> list[str]:
    """Return the steps at a switch and the jumps of the gradient norm; for forks, all barriers."""
    if plan.study.outcome == "barrier":
        return _barrier_lines(plan)
    return [*_switch_lines(plan), *_jump_lines(plan)]


def _jump_lines(plan: Plan) -> list[str]:
    lines, without_jump, duplicates = [], [], plan.duplicates()
    for outcome in plan.outcomes():
        name = outcome.variant.name
        norms_by_seed = [[row["grad_norm"] for row in record.metrics] for record in outcome.records.values()]
        jumps = [first_jump(norms) for norms in norms_by_seed if len(norms) > 10]  # fewer cannot be judged
        if name in duplicates or not jumps:
            continue
        if any(jumps):
            texts = ["none" if jump is None else f"epoch {jump.epoch} (x {jump.size:.2f})" for jump in jumps]
            lines.append(f"{name}: first jump of |g| at {', '.join(texts)}.")
        else:
            without_jump.append(name)
    return [*lines, *([f"No jump of |g| in any seed: {'; '.join(without_jump)}."] if without_jump else [])]


def _switch_lines(plan: Plan) -> list[str]:
    """Return the length of the first step after a switch, relative to those before it."""
    lines = []
    for outcome in plan.outcomes():
        metrics = [record.metrics for record in outcome.records.values()]
        pairs = [[row["update_norm"] for row in rows if "update_norm" in row] for rows in metrics]
        ratios = [f"{norms[1] / norms[0]:.2f}" for norms in pairs if len(norms) == 2 and norms[0] > 0]
        if ratios:
            text = f"the first step after the switch has {', '.join(ratios)} of the length of those before it"
            lines.append(f"{outcome.variant.name}: {text}.")
    return lines


def _barrier_lines(plan: Plan) -> list[str]:
    lines = []
    for outcome in plan.outcomes():
        parts = []
        for key, title in BARRIERS.items():
            heights = outcome.values(key)
            if heights:
                line_key = key.replace("barrier", "line")
                results = (outcome.records[seed].result for seed in heights)
                # Older results have none.
                line_losses = [result[line_key] for result in results if result.get(line_key)]
                # In how many pairs of forks no point lies above the higher end.
                at_ends = sum(max(losses) in (losses[0], losses[-1]) for losses in line_losses)
                count = f" (at an end in {at_ends} of {len(line_losses)})" if line_losses else ""
                parts.append(f"{title} {mean(heights.values()):.4f}{count}")
        distances = outcome.values("apart").values()
        if distances:
            parts.append(f"forks {mean(distances):.2g} of their norm apart")
        if parts:
            lines.append(f"{outcome.variant.name}: {', '.join(parts)}.")
    return lines


def barrier_charts(plan: Plan, styles: Mapping[str, int]) -> list[Markup]:
    """Return charts of the barriers against the epoch of the fork, with the looks of each first fork."""
    outcomes = [outcome for outcome in plan.outcomes() if outcome.records]
    if not outcomes or plan.study.outcome != "barrier":
        return []
    names = [outcome.variant.name for outcome in reversed(outcomes)]
    charts, looks = [], {name.split(",")[0]: styles.get(name) for name in names}
    for key, title in BARRIERS.items():
        heights: dict[str, dict[float, list[float]]] = {}  # by optimizer and epoch
        for outcome in outcomes:
            name, at = outcome.variant.name.split(",")[0], float(outcome.variant.settings["at"])
            by_epoch, values = heights.setdefault(name, {}), list(outcome.values(key).values())
            if values:
                by_epoch[at] = values
        series = [mean_series(name, by_epoch, looks[name]) for name, by_epoch in heights.items()]
        charts.append(line_chart(series, f"Barrier: {title}", "epoch of the fork", "barrier"))
    return charts
