"""The table of a tuned grid: every lr, and the differences where effective learning rates are equal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tam.lab.core.study import Study, Variant
from tam.lab.report import statistics as stats
from tam.lab.report.comparisons import SAME, StudyResults, has_torque
from tam.lab.report.model import TableData


class Cell(NamedTuple):
    """The tuning runs of a variant at one lr: the outcomes by seed, and what the table says of them."""

    by_seed: dict[int, float]
    text: str


Rows = Mapping[float, Mapping[str, Cell]]  # by effective lr and variant


def grid_table(results: StudyResults) -> TableData | None:
    """Return the tuning scores at every lr of the grids. None if nothing was tuned yet."""
    study = results.study
    tuned = [one for one in study.variants if not one.control_of and len(one.lrs) > 1]
    cells: dict[float, dict[str, Cell]] = {}
    for variant in tuned:
        ratio = results.effective_ratio(variant)
        for lr in results.plan.grid(variant):
            place = next((one for one in cells if math.isclose(one, lr * ratio, rel_tol=SAME)), lr * ratio)
            cells.setdefault(place, {})[variant.name] = _cell(results, variant, lr)
    if not any(cell.by_seed for row in cells.values() for cell in row.values()):
        return None
    others = {one.name: _comparator(results, one, cells) if has_torque(one) else "" for one in tuned}
    rows = [
        [f"{effective:.3g}", *(_format(row, name, other, study.digits) for name, other in others.items())]
        for effective, row in sorted(cells.items())
    ]
    return TableData(["effective lr", *others], rows, caption=_caption(study, others))


def _comparator(results: StudyResults, variant: Variant, cells: Rows) -> str:
    """Return what a variant is compared with that shares most of its effective lrs. "": nothing does."""
    compared = [results.study.compared_with(variant), *variant.against]
    related = [name for name in compared if name and results.are_related(variant.name, name)]
    shared = {name: sum({name, variant.name} <= row.keys() for row in cells.values()) for name in related}
    best = max(shared, key=shared.__getitem__, default="")
    return best if best and shared[best] else ""


def _cell(results: StudyResults, variant: Variant, lr: float) -> Cell:
    plan = results.plan
    by_seed = {k: v for k, v in plan.tuning_outcomes(variant, lr).items() if math.isfinite(v)}
    finished = sum(plan.record(trial) is not None for trial in plan.tuning_trials(variant, [lr]))
    lost = finished - len(by_seed)
    if not by_seed:
        return Cell(by_seed, "diverged" if lost else "not run")
    mean = stats.summarise([*by_seed.values()]).format(plan.study.digits)
    return Cell(by_seed, f"{mean}, {lost} diverged" if lost else mean)


def _format(row: Mapping[str, Cell], name: str, other: str, digits: int) -> str:
    """Return the text of a cell, with the difference to another one in brackets."""
    if name not in row:
        return ""
    found = stats.estimate(row[name].by_seed, row[other].by_seed, lower=False) if other in row else None
    return row[name].text + (f" ({found.format(digits)})" if found else "")


def _caption(study: Study, others: Mapping[str, str]) -> str:
    seeds: Sequence[int] = study.tuning_seeds
    which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    compared = [f'"{name}" minus "{other}"' for name, other in others.items() if other]
    brackets = f" In brackets: {'; '.join(compared)}." if compared else ""
    return f"Every lr of the grids: {study.label}, tuning {which}.{brackets}"
