"""The table of a tuned grid: every lr, and differences where effective learning rates are equal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from markupsafe import escape

from tam.lab.core.plan import Plan
from tam.lab.core.selection import PresetGroup
from tam.lab.core.study import Variant
from tam.lab.report import build_report, render_html, render_markdown
from tam.lab.report.comparisons import StudyResults
from tam.lab.report.grids import grid_table
from tam.lab.report.model import TableData
from tests.lab.report.results import finish, plan_for

GRIDS = (
    Variant("SGDM", "sgdm", (0.05, 0.1)),
    Variant("TAM", "tam", (0.1, 0.2, 0.4)),
    Variant("Adam", "adam", (0.1,)),
    Variant("TAM, constant damping", "tam", control_of="TAM", damping="mean"),
)
SEEDS = (100, 101, 102)
SCORES = {
    ("SGDM", 0.05): (88.0, 89.0, 90.0), ("SGDM", 0.1): (90.0, 90.5, 91.0),
    ("TAM", 0.1): (88.5, 89.5, 90.5), ("TAM", 0.2): (91.0, 92.5, 94.0), ("TAM", 0.4): (50.0, 60.0, 70.0),
}  # fmt: skip


def tuned_plan(scores: Mapping[tuple[str, float], Sequence[float]], variants: Sequence[Variant]) -> Plan:
    """Return a plan with these tuning runs. A NaN is a run that diverged."""
    plan = plan_for(2, variants=tuple(variants), tuning_seeds=SEEDS)
    for (name, lr), values in scores.items():
        trials = plan.tuning_trials(plan.study.variant(name), [lr])
        for trial, value in zip(trials, values, strict=False):
            finish(plan, trial, value, diverged=math.isnan(value))
    return plan


def table_of(
    scores: Mapping[tuple[str, float], Sequence[float]] = SCORES, variants: Sequence[Variant] = GRIDS
) -> TableData:
    table = grid_table(StudyResults(tuned_plan(scores, variants)))
    assert table is not None
    return table


def test_every_lr_and_the_differences_at_equal_effective_lrs() -> None:
    table = table_of()
    assert table.header == ["effective lr", "SGDM", "TAM"]  # Adam has one lr, and a control has TAM's
    assert table.rows == [
        ["0.05", "89.00 ± 1.00", "89.50 ± 1.00 (+0.50)"],  # equal differences: no interval
        # Differences 1, 2, 3: 2 ± 4.30265 / sqrt(3).
        ["0.1", "90.50 ± 0.50", "92.50 ± 1.50 (+2.00 [-0.48, +4.48])"],
        ["0.2", "", "60.00 ± 10.00"],
    ]
    assert table.caption == (
        'Every lr of the grids: validation %, tuning seeds 100, 101, 102. In brackets: "TAM" minus "SGDM".'
    )


def test_the_table_follows_that_of_the_variants() -> None:
    plan = tuned_plan(SCORES, GRIDS)
    report = build_report([PresetGroup([plan], ())])
    (section,) = report.sections
    assert section.tables[1] == table_of()
    cell = "92.50 ± 1.50 (+2.00 [-0.48, +4.48])"
    assert f"<td>{cell}</td>" in render_html(report)
    assert r"| 92.50 ± 1.50 (+2.00 \[-0.48, +4.48\]) |" in render_markdown(report)
    assert f"<caption>{escape(table_of().caption)}</caption>" in render_html(report)
    assert f"\n\n{table_of().caption}\n\n| effective lr |" in render_markdown(report)


def test_lrs_that_diverged_or_were_not_run_are_shown() -> None:
    nan = math.nan
    scores = {**SCORES, ("TAM", 0.2): (91.0, nan, 94.0), ("TAM", 0.4): (nan, nan, nan)}
    del scores["SGDM", 0.05]
    assert table_of(scores).rows == [
        ["0.05", "not run", "89.50 ± 1.00"],
        # Differences 1 and 3 of the seeds that both have: 2 ± 12.7062.
        ["0.1", "90.50 ± 0.50", "92.50 ± 2.12, 1 diverged (+2.00 [-10.71, +14.71])"],
        ["0.2", "", "diverged"],
    ]


def test_no_difference_across_families() -> None:
    variants = (Variant("SGDM", "sgdm", (0.05, 0.1)), Variant("AdaTAM", "adatam", (0.01, 0.02)))
    scores = {
        **{key: SCORES[key] for key in SCORES if key[0] == "SGDM"},
        ("AdaTAM", 0.02): (91.0, 92.0, 93.5),
    }
    table = table_of(scores, variants)
    assert table.rows == [
        ["0.05", "89.00 ± 1.00", "not run"],
        ["0.1", "90.50 ± 0.50", "92.17 ± 1.26"],  # AdaTAM's effective lr is five times its lr
    ]
    assert "In brackets" not in table.caption


def test_the_comparator_is_the_one_that_shares_most_lrs() -> None:
    wide = Variant("SGDM, wide", "sgdm", (0.05, 0.1, 0.2))
    variants = (GRIDS[0], Variant("TAM", "tam", (0.1, 0.2, 0.4), against=("SGDM, wide",)), wide)
    scores = {**SCORES, **{("SGDM, wide", lr): (90.0, 91.0, 93.0) for lr in wide.lrs}}
    assert table_of(scores, variants).caption.endswith('In brackets: "TAM" minus "SGDM, wide".')
    # TAM(0.4): -40, -31, -23: mean -31.33, standard deviation 8.505.
    assert table_of(scores, variants).rows[2][2].startswith("60.00 ± 10.00 (-31.33 [-52.46, -10.21])")


def test_without_a_grid_or_tuning_runs_there_is_no_table() -> None:
    assert grid_table(StudyResults(plan_for(2))) is None
    assert grid_table(StudyResults(tuned_plan({}, GRIDS))) is None
