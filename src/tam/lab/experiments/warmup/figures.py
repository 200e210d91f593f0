"""What the report of a warm-up shows: jumps of the gradient norm, the step at a switch, loss barriers."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean

from markupsafe import Markup

from tam.lab.core.plan import Outcome, Plan
from tam.lab.core.study import Table
from tam.lab.report.charts import line_chart, mean_series
from tam.lab.report.outcomes import JUMP_WINDOW, Jump, first_jump

BARRIERS = {
    "barrier_train": "training loss",
    "barrier_validation": "validation loss",
    "barrier_train_as_they_are": "training loss, statistics as interpolated",
    "barrier_validation_as_they_are": "validation loss, statistics as interpolated",
}


def report_tables(plan: Plan) -> list[Table]:
    """Return the steps at a switch and the jumps of the gradient norm; for forks, all barriers."""
    tables = [_barriers(plan)] if plan.study.outcome == "barrier" else [_switches(plan), _jumps(plan)]
    return [table for table in tables if table.rows]


def report_lines(plan: Plan) -> list[str]:
    """Say that no run has a jump of the gradient norm."""
    jumps = [jump for of_seed in _jumps_by_variant(plan).values() for jump in of_seed.values()]
    return ["No run has a jump of the gradient norm."] if jumps and not any(jumps) else []


def _jumps_by_variant(plan: Plan) -> dict[str, dict[int, Jump | None]]:
    """Return the first jump of each run that is long enough to have one, by variant and seed."""
    duplicates = plan.duplicates()
    jumps: dict[str, dict[int, Jump | None]] = {}
    for outcome in plan.outcomes():
        norms = {
            seed: [row["grad_norm"] for row in record.metrics if "grad_norm" in row]
            for seed, record in outcome.records.items()
        }
        found = {seed: first_jump(values) for seed, values in norms.items() if len(values) > JUMP_WINDOW}
        if found and outcome.variant.name not in duplicates:
            jumps[outcome.variant.name] = found
    return jumps


def _jumps(plan: Plan) -> Table:
    """Return a row per variant, with a column per seed. It is empty if there is no jump at all."""
    jumps = _jumps_by_variant(plan)
    rows = []
    if any(jump for of_seed in jumps.values() for jump in of_seed.values()):
        for name, of_seed in jumps.items():
            texts = {
                seed: f"{jump.epoch} (x {jump.size:.2f})" if jump else "none"
                for seed, jump in of_seed.items()
            }
            rows.append([name, *(texts.get(seed, "") for seed in plan.study.seeds)])
    caption = "Epoch of the first jump of the gradient norm, and its size."
    return Table(["variant", *(f"seed {seed}" for seed in plan.study.seeds)], rows, caption)


def _switches(plan: Plan) -> Table:
    """Return the length of the first step after a switch, relative to those before it."""
    rows = []
    for outcome in plan.outcomes():
        ratios = {}
        for seed, record in outcome.records.items():
            norms = [row["update_norm"] for row in record.metrics if "update_norm" in row]
            if len(norms) == 2 and norms[0] > 0:
                ratios[seed] = f"{norms[1] / norms[0]:.2f}"
        if ratios:
            rows.append([outcome.variant.name, *(ratios.get(seed, "") for seed in plan.study.seeds)])
    caption = "Length of the first step after the switch, relative to the steps before it."
    return Table(["variant", *(f"seed {seed}" for seed in plan.study.seeds)], rows, caption)


def _barriers(plan: Plan) -> Table:
    """Return the mean barriers of each variant, and how far apart its forks are."""
    rows = []
    for outcome in plan.outcomes():
        cells = [_barrier_cell(outcome, key) for key in BARRIERS]
        distances = outcome.values("apart").values()
        apart = f"{mean(distances):.2g}" if distances else ""
        if any((*cells, apart)):
            rows.append([outcome.variant.name, *cells, apart])
    header = ["variant", *BARRIERS.values(), "distance / norm"]
    return Table(header, rows, "Mean barriers, and the distance of the forks relative to their norm.")


def _barrier_cell(outcome: Outcome, key: str) -> str:
    """Return the mean barrier, and in how many pairs of forks no point lies above the higher end."""
    heights = outcome.values(key)
    if not heights:
        return ""
    results = (outcome.records[seed].result for seed in heights)
    line_key = key.replace("barrier", "line")  # older results have none
    line_losses = [result[line_key] for result in results if result.get(line_key)]
    at_ends = sum(max(losses) in (losses[0], losses[-1]) for losses in line_losses)
    count = f" (at an end in {at_ends} of {len(line_losses)})" if line_losses else ""
    return f"{mean(heights.values()):.4f}{count}"


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
