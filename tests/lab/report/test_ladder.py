"""The section of a ladder: tables, charts and JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from tam.lab.core.config import TrialConfig
from tam.lab.core.ladder_plan import LadderPlan, make_plan
from tam.lab.core.registry import Experiment
from tam.lab.core.results import Results
from tam.lab.core.selection import PresetGroup
from tam.lab.core.study import Curve, Ladder, Variant
from tam.lab.experiments.images.trial import Config
from tam.lab.report import build_report, render_html, render_json, render_markdown
from tam.lab.report.charts import Series, line_chart
from tam.lab.report.ladders import common_window, summarise_ladder
from tam.lab.report.model import LadderSection, Report
from tests.lab.report.results import WORKLOAD, finish, group_with, looks_of

LRS = (0.1, 0.2, 0.4, 0.8, 1.6)
TAM = Variant("TAM", "tam", tuple(2 * lr for lr in LRS))
SHUFFLED = Variant("TAM, shuffled damping", "tam", control_of="TAM", damping="shuffled")
VARIANTS = (Variant("SGDM", "sgdm", LRS), TAM, SHUFFLED)
# Means by effective lr. TAM's best is one rung higher, and its last rung diverges for one seed.
SGDM_LOSSES = (1.1, 1.0, 1.04, 1.5, 9.0)
TAM_LOSSES = (1.3, 1.1, 0.9, 0.94, 1.0)


def make_ladder_plan(**more: Any) -> LadderPlan:
    fields: dict[str, Any] = {
        "name": "digits", "title": "Digits", "workload": WORKLOAD, "variants": VARIANTS, "baseline": "SGDM",
        "seeds": (0, 1), "cap": 5.0, "outcome": "validation",
    }  # fmt: skip
    study = Ladder(**{**fields, **more})
    curves = (Curve("loss", "Loss", "loss"), Curve("damping", "Twice", "d"))
    experiment = Experiment(
        name="images", title="", run=lambda *_: iter(()), config=Config, presets={"paper": (study,)},
        choices={}, curves=curves,
    )  # fmt: skip
    plan = make_plan(experiment, study, Results(), "paper")
    assert isinstance(plan, LadderPlan)
    return plan


def loss_of(trial: TrialConfig) -> float:
    """Return a loss that differs by 0.02 between the seeds."""
    if trial.optimizer == "tam":
        if trial.lr == 3.2 and trial.seed == 1 and not trial.damping:
            return math.nan
        return TAM_LOSSES[TAM.lrs.index(trial.lr)] + (0.01 if trial.seed else -0.01)
    return SGDM_LOSSES[LRS.index(trial.lr)] + (0.01 if trial.seed else -0.01)


def finished_plan(**more: Any) -> LadderPlan:
    plan = make_ladder_plan(**more)
    while trials := plan.to_run():
        for _, trial in trials:
            loss = loss_of(trial)
            finish(plan, trial, loss, diverged=math.isnan(loss))
            if trial.optimizer == "tam":
                for row in plan.results.records[trial.key].metrics:
                    row.update(damping=0.5 + 0.1 * trial.seed, damping_attention=0.6, damping_norm=0.4)
    return plan


@pytest.fixture(scope="module")
def plan() -> LadderPlan:
    return finished_plan()


@pytest.fixture(scope="module")
def report(plan: LadderPlan) -> Report:
    return build_report([PresetGroup([plan], ())])


def section_of(report: Report) -> LadderSection:
    (section,) = report.sections
    assert isinstance(section, LadderSection)
    return section


def test_the_summary_table(report: Report) -> None:
    table, *_ = section_of(report).tables
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    sgdm, tam, control = (rows[variant.name] for variant in VARIANTS)
    assert table.caption.endswith("The window of the sensitivity is 0.1 to 1.6.")
    assert (sgdm["best lr"], sgdm["validation loss there (lower is better)"]) == ("0.2", "1.000 ± 0.014")
    assert sgdm["lower knee"] == f"{0.2 * 0.5**0.2:.3g}" and sgdm["upper knee"] == f"{0.2 * 2**0.5:.3g}"
    assert sgdm["width (octaves)"] == "0.70"
    # The last rung is capped at 5.
    assert float(sgdm["sensitivity"]) == pytest.approx((0.1 + 0 + 0.04 + 0.5 + 4.0) / 5, abs=1e-4)
    assert sgdm["after the best shift"] == sgdm["sensitivity"]
    assert tam["best lr"] == "0.4" and tam["missing trials"] == "0 of 10"
    at_cap = (1.0 - 0.01 + 5.0) / 2 - 0.9
    assert float(tam["sensitivity"]) == pytest.approx((0.4 + 0.2 + 0 + 0.04 + at_cap) / 5, abs=1e-4)
    shifted = (0.2 + 0 + 0.04 + at_cap) / 4  # of 0.2 to 3.2, which has four of its rungs
    assert tam["after the best shift"] == f"{shifted:.4f} (4 of 5 rungs)"
    assert control["missing trials"] == "1 of 10" and control["upper knee"] == f"{0.4 * 2**0.5:.3g}"


def test_failures_and_means_by_rung(report: Report) -> None:
    _, failures, losses = section_of(report).tables
    assert failures.header == losses.header == ["variant", "0.1", "0.2", "0.4", "0.8", "1.6"]
    assert failures.rows[1] == ["TAM", "0/2", "0/2", "0/2", "0/2", "1/2"]
    assert failures.rows[2] == ["TAM, shuffled damping", "0/2", "0/2", "0/2", "0/2", "0/1"]
    assert losses.rows[0] == ["SGDM", "1.100", "1.000", "1.040", "1.500", "5.000"]
    assert losses.rows[2][-1] == "0.990 (n = 1)"
    text = '"TAM, shuffled damping": 1 run missing, where "TAM" diverged and left no d.'
    assert text in section_of(report).paragraphs


def test_a_censored_knee_and_an_edge_are_said() -> None:
    plan = make_ladder_plan(variants=VARIANTS[:1])
    for _, trial in plan.to_run():
        finish(plan, trial, trial.lr)
    (row,) = section_of(build_report([PresetGroup([plan], ())])).tables[0].rows
    assert row[1] == "0.1 (edge of its ladder)" and row[3] == "below 0.1" and row[5] == "over 0.20"


def test_a_ladder_without_results_has_tables_and_no_charts() -> None:
    section = section_of(build_report([PresetGroup([make_ladder_plan()], ())]))
    assert section.tables[0].rows[0] == ["SGDM", "", "not run", "", "", "", "", "", "10 of 10"]
    assert section.tables[2].rows[0][1] == "not run" and not section.charts


def test_rungs_above_failures_count_as_the_cap() -> None:
    plan = make_ladder_plan(variants=VARIANTS[:1], seeds=(0, 1, 2, 3))
    for _, trial in plan.to_run():
        if trial.lr < 0.8:
            finish(plan, trial, 1.0 if trial.lr == 0.1 else 2.0, failed=trial.lr > 0.1)
    assert not plan.to_run()
    section = section_of(build_report([PresetGroup([plan], ())]))
    assert section.tables[1].rows[0] == ["SGDM", "0/4", "4/4", "4/4", "left out", "left out"]
    assert '"SGDM": not run at 0.8, 1.6, above two rungs where every seed failed.' in section.paragraphs
    (row,) = section.ladder
    assert row.sensitivity is not None and row.sensitivity.value == pytest.approx((1 + 1 + 4 + 4) / 5)
    assert (row.missing, row.planned) == (0, 12)


def test_the_window_is_what_all_variants_have() -> None:
    tam = replace(TAM, lrs=tuple(4 * lr for lr in TAM.lrs))
    plan = make_ladder_plan(variants=(VARIANTS[0], tam))
    assert common_window(plan, plan.study.variants) == (0.4, 1.6)
    apart = make_ladder_plan(variants=(VARIANTS[0], replace(TAM, lrs=tuple(100 * lr for lr in TAM.lrs))))
    assert common_window(apart, apart.study.variants) is None
    for _, trial in apart.to_run():
        finish(apart, trial, 1.0)
    assert all(row.sensitivity is None for row in summarise_ladder(apart))


def test_nothing_is_compared_and_no_verdict_is_given(report: Report) -> None:
    assert report.tally.total == 0 and not report.forest
    assert report.answer[0].startswith("This report shows the validation loss at every learning rate")
    assert any("A ladder runs every variant" in note for note in report.notes)
    section = section_of(report)
    assert all(one.difference is None for one in section.variants)
    assert section.facts["cap"] == "5" and section.facts["tolerance"] == "0.02"
    assert section.facts["learning rates"].startswith("SGDM: 0.1, 0.2, 0.4, 0.8, 1.6 (a ladder)")


def test_a_study_next_to_a_ladder_is_compared_as_before(plan: LadderPlan) -> None:
    (other,) = group_with({"SGDM": [90.0, 90.2], "TAM": [92.0, 92.3]}, seeds=2).plans
    alone = build_report([PresetGroup([other], ())])
    both = build_report([PresetGroup([other, plan], ())])
    assert both.tally == alone.tally and both.answer == alone.answer
    assert both.sections[0] == alone.sections[0]
    assert not any("ladder" in note for note in alone.notes)


def test_markdown_html_and_json_have_the_ladder(report: Report) -> None:
    markdown, page = render_markdown(report), render_html(report)
    for text in ("after the best shift", "Failed trials per finished trials, by effective lr."):
        assert text in markdown and text in page
    (section,) = json.loads(render_json(report))["presets"][0]["studies"]
    sgdm, tam, _ = section["ladder"]
    assert sgdm["best_lr"] == 0.2 and tam["octaves"] == pytest.approx(
        math.log2(tam["upper_knee"] / tam["lower_knee"])
    )
    assert tam["rungs"][-1]["failed"] == 1 and tam["sensitivity"]["window"] == [0.1, 1.6]
    assert "charts" not in section


def test_charts(report: Report) -> None:
    charts = section_of(report).charts
    titles = [chart.partition("<title>")[2].partition("</title>")[0] for chart in charts]
    assert titles == [
        "validation loss by lr (dots: seeds; triangles: above the axis)",
        "d over the run, at the best rung",
        "d by type of layer: TAM, at the best rung",
        "d by type of layer: TAM, shuffled damping, at the best rung",
        "Loss, at the best rung",
    ]
    loss, damping, layers = charts[:3]
    assert set(looks_of(loss)) == {variant.name for variant in VARIANTS}
    assert looks_of(damping).items() <= looks_of(loss).items() and "SGDM" not in looks_of(damping)
    assert set(looks_of(layers)) == {"attention", "norm"}
    assert "SGDM, effective lr 1.6: 5; dots above the axis: 2" in loss
    assert "TAM, effective lr 1.6: 2.995; dots above the axis: 1" in loss


def test_lines_end_where_they_cross_the_limit() -> None:
    line = Series("a", [1.0, 4.0, 16.0], [0.0, 2.0, 0.0], points=[(1.0, 0.5), (4.0, 9.0)])
    chart = line_chart([line], "t", "x", "y", log_x=True, limit=1.0)
    assert chart.count("<polyline") == 2 and chart.count('r="2.2"') == 1
    assert "a, x 4: 2; dots above the axis: 1" in chart
    without = line_chart([replace(line, points=())], "t", "x", "y", log_x=True)
    assert without.count("<polyline") == 1 and "above the axis" not in without


def test_at_most_four_charts_of_layers() -> None:
    more = [replace(TAM, name=f"TAM {i}", options={"momentum": 0.8 + 0.01 * i}) for i in range(6)]
    plan = finished_plan(variants=(VARIANTS[0], *more))
    charts = section_of(build_report([PresetGroup([plan], ())])).charts
    assert sum("d by type of layer" in chart for chart in charts) == 4
