"""The section of a ladder: its tables and what they do not show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace

from tam.lab.core import ladder
from tam.lab.core.ladder_plan import LadderPlan, has_failed
from tam.lab.core.study import Ladder, Study, Variant
from tam.lab.report.comparisons import SAME
from tam.lab.report.ladder_charts import ladder_charts
from tam.lab.report.model import LadderRow, LadderSection, RungSummary, Sensitivity, StudySection, TableData
from tam.lab.report.statistics import summarise
from tam.lab.report.texts import TEXTS


def ladder_section(section: StudySection, plan: LadderPlan, styles: Mapping[str, int]) -> LadderSection:
    """Return the section of a ladder, with what its experiment adds to it."""
    rows = summarise_ladder(plan)
    parts = {field.name: getattr(section, field.name) for field in fields(section)}
    parts["tables"] = [*_tables(plan, rows), *section.tables]
    parts["paragraphs"] = [*_describe(plan), *section.paragraphs]
    parts["charts"] = [*ladder_charts(plan, styles), *section.charts]
    return LadderSection(**parts, ladder=rows)


def describe_rules(study: Study) -> dict[str, str]:
    """Return the cap and the tolerance of a ladder. Other studies have none."""
    if not isinstance(study, Ladder):
        return {}
    return {"cap": f"{study.cap:.4g}", "tolerance": f"{study.tolerance:g}"}


def summarise_ladder(plan: LadderPlan) -> list[LadderRow]:
    """Return a row per variant that is not left out."""
    variants = [one for one in plan.study.variants if not plan.why_left_out(one)]
    window = common_window(plan, variants)
    best = _best_lr(plan, plan.study.variant(plan.study.baseline))
    return [_row(plan, variant, window, best) for variant in variants]


def common_window(plan: LadderPlan, variants: Sequence[Variant]) -> ladder.Window | None:
    """Return the range of effective lrs in which all variants have rungs. None if there is none."""
    grids = [[plan.effective_lr(variant, lr) for lr in plan.grid(variant)] for variant in variants]
    low, high = max(grid[0] for grid in grids), min(grid[-1] for grid in grids)
    return (low, high) if low <= high * (1 + ladder.EDGE) else None


def _best_lr(plan: LadderPlan, variant: Variant) -> float | None:
    selected = plan.selected_lr(variant)
    return None if selected is None else plan.effective_lr(variant, selected[0])


def _row(plan: LadderPlan, variant: Variant, window: ladder.Window | None, best: float | None) -> LadderRow:
    trials = plan.comparison_trials(variant)
    row = LadderRow(
        name=variant.name, best_lr=None, best_loss=None, at_edge=False, lower_knee=None, upper_knee=None,
        octaves=None, sensitivity=None, shifted_sensitivity=None, rungs=_rungs(plan, variant),
        missing=sum(plan.record(trial) is None for trial in trials), planned=len(trials),
    )  # fmt: skip
    selected, losses = plan.selected_lr(variant), plan.losses(variant, with_skipped=True)
    if selected is None:
        return row
    counted = [*plan.complete_rungs(variant), *plan.skipped_rungs(variant)]
    losses = {lr: losses[lr] for lr in sorted(plan.effective_lr(variant, own) for own in counted)}
    summary = ladder.summarize(losses, plan.rules.tolerance)
    grid = plan.grid(variant)
    factor = (grid[-1] / grid[0]) ** (1 / (len(grid) - 1))
    shifted = None
    if window is not None and best is not None:
        shifted = ladder.shift_window(window, summary.best_lr, best)
    return replace(
        row, best_lr=summary.best_lr, best_loss=summarise(losses[summary.best_lr]),
        at_edge=selected[1], lower_knee=summary.lower_knee, upper_knee=summary.upper_knee,
        octaves=None if summary.width is None else math.log2(summary.width),
        sensitivity=_sensitivity(losses, window, factor),
        shifted_sensitivity=_sensitivity(losses, shifted, factor),
    )  # fmt: skip


def _sensitivity(losses: ladder.Losses, window: ladder.Window | None, factor: float) -> Sensitivity | None:
    value = None if window is None else ladder.sensitivity(losses, window)
    if window is None or value is None:
        return None
    expected = 1 + math.floor(math.log(window[1] / window[0]) / math.log(factor) + ladder.EDGE)
    return Sensitivity(value, window, len(ladder.in_window(losses, window)), expected)


def _rungs(plan: LadderPlan, variant: Variant) -> list[RungSummary]:
    records, skipped = plan.ladder(variant), plan.skipped_rungs(variant)
    rungs = []
    for lr in plan.grid(variant):
        of_rung = [*records.get(lr, {}).values()]
        losses = [*map(plan.loss, of_rung)]
        rungs.append(RungSummary(
            effective_lr=plan.effective_lr(variant, lr), lr=lr, loss=summarise(losses) if losses else None,
            failed=sum(map(has_failed, of_rung)), finished=len(of_rung),
            planned=len(of_rung) if lr in skipped else len(plan.study.seeds),
        ))  # fmt: skip
    return rungs


def _tables(plan: LadderPlan, rows: Sequence[LadderRow]) -> list[TableData]:
    study, texts = plan.study, TEXTS["ladder"]
    windows = [row.sensitivity.window for row in rows if row.sensitivity]
    window = f"{windows[0][0]:.3g} to {windows[0][1]:.3g}" if windows else "not known"
    header = ["variant", "best lr", f"{study.label} there (lower is better)", "lower knee", "upper knee",
              "width (octaves)", "sensitivity", "after the best shift", "missing trials"]  # fmt: skip
    cells = [_summary_cells(row, study.digits) for row in rows]
    columns = _columns(rows)
    lrs = ["variant", *(f"{lr:.3g}" for lr in columns)]
    failures = [[row.name, *(_at(row, lr, _failure_cell) for lr in columns)] for row in rows]
    losses = [
        [row.name, *(_at(row, lr, lambda rung: _loss_cell(rung, study.digits)) for lr in columns)]
        for row in rows
    ]
    return [
        TableData(header, cells, caption=texts["summary"].format(window=window)),
        TableData(lrs, failures, caption=texts["failures"]),
        TableData(lrs, losses, caption=texts["losses"].format(label=study.label)),
    ]


def _summary_cells(row: LadderRow, digits: int) -> list[str]:
    missing = f"{row.missing} of {row.planned}"
    if row.best_lr is None or row.best_loss is None:
        return [row.name, "", "not run", "", "", "", "", "", missing]
    most = max(rung.finished for rung in row.rungs)
    finished = [rung.effective_lr for rung in row.rungs if rung.finished == most]
    lower = f"below {finished[0]:.3g}" if row.lower_knee is None else f"{row.lower_knee:.3g}"
    upper = f"above {finished[-1]:.3g}" if row.upper_knee is None else f"{row.upper_knee:.3g}"
    span = math.log2((row.upper_knee or finished[-1]) / (row.lower_knee or finished[0]))
    width = f"over {span:.2f}" if row.octaves is None else f"{row.octaves:.2f}"
    best = f"{row.best_lr:.3g}" + (" (edge of its ladder)" if row.at_edge else "")
    sensitivities = [_sensitivity_cell(one, digits + 1) for one in (row.sensitivity, row.shifted_sensitivity)]
    return [row.name, best, row.best_loss.format(digits), lower, upper, width, *sensitivities, missing]


def _sensitivity_cell(found: Sensitivity | None, digits: int) -> str:
    if found is None:
        return ""
    part = "" if found.rungs >= found.expected else f" ({found.rungs} of {found.expected} rungs)"
    return f"{found.value:.{digits}f}{part}"


def _columns(rows: Sequence[LadderRow]) -> list[float]:
    """Return the effective lrs of all variants, ascending. Those that differ by rounding are one."""
    columns: list[float] = []
    for lr in sorted(rung.effective_lr for row in rows for rung in row.rungs):
        if not columns or not math.isclose(lr, columns[-1], rel_tol=SAME):
            columns.append(lr)
    return columns


def _at(row: LadderRow, lr: float, text: Callable[[RungSummary], str]) -> str:
    """Return the text of a row's rung at an effective lr. Empty if it has none there."""
    return next((text(rung) for rung in row.rungs if math.isclose(rung.effective_lr, lr, rel_tol=SAME)), "")


def _failure_cell(rung: RungSummary) -> str:
    return f"{rung.failed}/{rung.finished}" if rung.finished else "not run" if rung.planned else "left out"


def _loss_cell(rung: RungSummary, digits: int) -> str:
    if rung.loss is None:
        return "not run" if rung.planned else "left out"
    part = f" (n = {rung.finished})" if rung.finished < rung.planned else ""
    return f"{rung.loss.mean:.{digits}f}{part}"


def _describe(plan: LadderPlan) -> Iterator[str]:
    """Return what the tables do not show: the paper's words, shared runs and why trials are missing."""
    study = plan.study
    if paper := study.choices.get("the paper says"):
        yield f"The paper says: {paper}"
    for name, other in plan.duplicates().items():
        yield f'"{name}" has the same runs as "{other}" at every rung.'
    for variant in study.variants:
        if why := plan.why_left_out(variant):
            yield f'"{variant.name}": {why}.'
        if skipped := plan.skipped_rungs(variant):
            lrs = ", ".join(f"{plan.effective_lr(variant, lr):.3g}" for lr in skipped)
            yield f'"{variant.name}": not run at {lrs}, above two rungs where every seed failed.'
        missing = [one for one in plan.comparison_trials(variant) if plan.record(one) is None]
        sources = [plan.results.get(one.damping_of) for one in missing if one.damping_of]
        if count := sum(source is not None and source.diverged for source in sources):
            runs = f"{count} run{'s' if count > 1 else ''}"
            yield f'"{variant.name}": {runs} missing, where "{variant.control_of}" diverged and left no d.'
