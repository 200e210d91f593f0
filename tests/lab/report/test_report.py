"""The report: what it says about comparisons, and the stored reports match the stored results."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tam.lab.core.presets import without
from tam.lab.core.selection import PresetGroup, load_groups
from tam.lab.core.study import Variant
from tam.lab.report import build_report, render_html, render_json, render_markdown
from tam.lab.report.comparisons import compare_studies, compare_with_controls, compare_with_paper
from tam.lab.report.model import StudySection, VariantSummary
from tests.lab.report.results import ALL, LESS, SGDM, TAM, VARIANTS, WORKLOAD, finish, group_with, plan_for

RESULTS = Path(__file__).parents[3] / "results"
STORED = [path.parent for path in sorted(RESULTS.rglob("report.md"))]


@pytest.mark.parametrize("folder", STORED, ids=lambda folder: folder.name)
def test_stored_reports_are_of_the_stored_results(folder: Path) -> None:
    report = build_report(load_groups(folder))
    assert len(render_html(report).encode()) <= 1_500_000
    assert (folder / "report.md").read_text(encoding="utf-8") == render_markdown(report)


def section_of(group: PresetGroup) -> StudySection:
    (preset,) = build_report([group]).presets
    return preset.studies[0]


def rows_of(group: PresetGroup) -> dict[str, list[str]]:
    return {row[0]: list(row) for row in section_of(group).tables[0].rows}


def variants_of(group: PresetGroup) -> dict[str, VariantSummary]:
    return {variant.name: variant for variant in section_of(group).variants}


def about_controls(group: PresetGroup) -> list[str]:
    (results,) = compare_studies(group)
    return compare_with_controls(results)


def test_differences_are_paired_by_seed() -> None:
    plan = plan_for(seeds=4, variants=VARIANTS[:2])
    outcomes = {"SGDM": {0: 90.0, 1: 91.0, 2: 95.0, 3: 94.0}, "TAM": {2: 95.5, 0: 90.2, 1: 91.9}}
    for name, values in outcomes.items():
        for trial in plan.comparison_trials(plan.study.variant(name)) or []:
            if trial.seed in values:
                finish(plan, trial, values[trial.seed])
    (results,) = compare_studies(PresetGroup([plan], ()))
    difference = results.difference("TAM", "SGDM")
    assert difference is not None and difference.n == 3
    assert difference.mean == pytest.approx((0.2 + 0.9 + 0.5) / 3)


def test_a_variant_with_the_runs_of_another() -> None:
    again = replace(VARIANTS[0], name="SGDM, more lrs")
    group = group_with(ALL, variants=(*VARIANTS, again))
    paragraphs = section_of(group).paragraphs
    assert "SGDM, more lrs: the same runs as SGDM, at the same lr." in paragraphs
    assert sum("the same runs as" in line for line in section_of(group_with({})).paragraphs) == 0


def test_the_overview_has_the_best_mean_first() -> None:
    group = group_with(ALL)
    (preset,) = build_report([group]).presets
    ranking = "TAM 92.18 ± 0.13 (better); SGDM 90.20 ± 0.16"
    assert preset.overview.tables[0].rows == [["Digits: validation %", ranking]]
    assert f"| {ranking} |" in render_markdown(build_report([group]))
    assert f"<td>{ranking}</td>" in render_html(build_report([group]))


def test_tam_helps_only_if_it_beats_all_controls_with_all_seeds() -> None:
    def conclusion(outcomes: dict[str, list[float]], seeds: int = 5) -> str:
        outcomes = {**outcomes, "SGDM at TAM's effective lr": SGDM}
        return about_controls(group_with(outcomes, seeds))[-1]

    assert conclusion(ALL).startswith("TAM helps")
    some = {name: values for name, values in ALL.items() if name != "TAM, constant damping"}
    assert conclusion(some).startswith("TAM is not shown to help (not all of its controls were run)")
    assert conclusion(ALL, seeds=6).startswith("TAM is not shown")
    close = [x - 0.01 * i for i, x in enumerate(TAM)]
    assert conclusion({**ALL, "TAM, shuffled damping": close}).startswith("TAM is not shown")


def test_one_comparison_has_one_verdict_and_the_papers_difference() -> None:
    group = group_with(ALL, paper={"SGDM": (93.6, 0.3), "TAM": (94.2, None)})
    (results,) = compare_studies(group)
    table, control = (results.difference("TAM", name) for name in ("SGDM", "SGDM at TAM's effective lr"))
    assert table is not None and table == control and table.verdict == "better"  # they are the same trials
    (line,) = compare_with_paper(results)
    assert "+1.98" in line and "The paper's +0.60 lies outside the interval" in line
    text = render_markdown(build_report([group]))
    assert "for all 4 comparisons that the preset paper plans" in text  # SGDM's, and three controls
    rows = rows_of(group)
    assert rows["TAM, shuffled damping"][:4] == ["TAM, shuffled damping", "0.2", "5 of 5", "91.12 ± 0.13"]
    assert rows["TAM, shuffled damping"][-2:] == ["control of TAM", ""]
    assert rows["SGDM"][-1] == "93.6 ± 0.3" and rows["TAM"][-1] == "94.2"


def test_what_a_preset_plans_and_was_not_run_is_counted_and_named() -> None:
    group = group_with(ALL)
    other = replace(group.planned[0], name="other", title="What nobody ran")
    text = render_markdown(build_report([PresetGroup(group.plans, (other,))]))
    assert "for all 8 comparisons" in text and "not run: What nobody ran." in text
    assert "not run:" not in render_markdown(build_report([group]))


def test_without_controls_of_d_no_variant_helps() -> None:
    (plan,) = group_with(ALL).plans
    study = without(plan.study, "TAM, shuffled damping", "TAM, constant damping")
    less = plan_for(variants=study.variants, results=plan.results)
    (_, line) = about_controls(PresetGroup([less], ()))
    assert line.startswith("TAM is not shown to help (not all of its controls are planned)")


def test_studies_of_one_name_have_their_own_differences() -> None:
    """Such as those of two models."""
    first = group_with(ALL)
    second = group_with({**ALL, "TAM": LESS, "SGDM": TAM}, workload={**WORKLOAD, "epochs": 77})
    report = build_report([PresetGroup([*first.plans, *second.plans], ())])
    sections = report.presets[0].studies
    means = [{one.name: one for one in section.variants}["TAM"].difference for section in sections]
    assert [round(one.mean, 2) for one in means if one is not None] == [1.98, -1.06]
    assert len({section.anchor for section in report.sections}) == 3


def test_seeds_that_were_not_run_are_counted() -> None:
    rows = rows_of(group_with(ALL, seeds=6))
    assert rows["TAM"][2] == "5 of 6" and rows["TAM"][-1] == "so far better"


def test_a_winner_at_the_edge_of_its_grid_is_marked() -> None:
    variants = (Variant("SGDM", "sgdm", (0.1, 0.01)), *VARIANTS[1:])
    plan = plan_for(variants=variants, tuning_seeds=(100,))
    for _, trial in plan.to_run():
        finish(plan, trial, 90 + trial.lr)
    group = PresetGroup([plan], ())
    assert rows_of(group)["SGDM"][1] == "0.1 (at the edge of its grid)"
    assert "0.01: 90.01, 0.1: 90.10" in section_of(group).facts["learning rates"]


def test_what_cannot_be_averaged_is_counted_as_diverged() -> None:
    """The remaining seeds must not decide."""
    group = group_with({**ALL, "TAM": [92.0, math.nan, 92.2, 92.3, 92.1]})
    row = rows_of(group)["TAM"]
    assert row[2] == "4 of 5" and row[3].startswith("92.15") and row[-1] == "1 diverged: no verdict"
    assert about_controls(group)[-1].startswith("TAM is not shown to help")


def test_a_study_without_results_has_a_report() -> None:
    group = PresetGroup([plan_for(seeds=2)], ())
    assert "| TAM | 0.2 | 0 of 2 | not run |" in render_markdown(build_report([group]))
    assert "no trial of the comparison was run" in render_html(build_report([group]))
    assert variants_of(group)["TAM"].outcome is None


def test_curves_are_means_with_a_band_and_duplicates_have_none() -> None:
    again = replace(VARIANTS[0], name="SGDM, more lrs")
    (chart,) = section_of(group_with(ALL, variants=(*VARIANTS, again))).charts
    assert "TAM, epoch 2: 0.5 (0.5 to 0.5)" in chart
    assert "SGDM, epoch 3: 0.3333 (0.3333 to 0.3333)" in chart and "SGDM, more lrs" not in chart


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_epoch_at_which_a_seed_is_not_finite_is_a_gap(value: float) -> None:
    """Whatever the order of the seeds: a packed file keeps no infinities."""
    group = group_with({"SGDM": SGDM})
    last = [*group.plans[0].results][-1]
    last.metrics = [{"epoch": epoch, "loss": value if epoch == 3 else 1.0} for epoch in (1, 2, 3)]
    (chart,) = section_of(group).charts
    assert "SGDM, epoch 2" in chart and "SGDM, epoch 3" not in chart


def test_settings_of_results_are_not_shown() -> None:
    """Some are unreliable."""
    (plan,) = group_with(ALL).plans
    for record in plan.results:
        record.result["settings"] = {"options": {"momentum": 0.123}, "note": "unreliable"}
    report = build_report([PresetGroup([plan], ())])
    for text in (render_html(report), render_markdown(report), render_json(report)):
        assert "0.123" not in text and "unreliable" not in text


def test_outcomes_are_computed_once_per_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_with(ALL)
    (plan,) = group.plans
    duplicates, outcomes, calls = plan.duplicates(), plan.outcomes(), []
    monkeypatch.setattr(plan, "duplicates", lambda: duplicates)
    monkeypatch.setattr(plan, "outcomes", lambda: calls.append(1) or outcomes)
    build_report([group])
    assert len(calls) == 1


def test_json_has_the_figures_and_no_nan() -> None:
    report = build_report([group_with({**ALL, "TAM": [92.0, math.nan]}, seeds=2)])
    (preset,) = json.loads(render_json(report))["presets"]
    assert (preset["experiment"], preset["preset"]) == ("images", "paper")
    (study,) = preset["studies"]
    variants = {variant["name"]: variant for variant in study["variants"]}
    assert variants["SGDM"]["outcome"]["mean"] == pytest.approx(90.1) and variants["SGDM"]["n"] == 2
    assert variants["TAM"]["outcome"] == {"mean": 92.0, "spread": None}
    assert variants["TAM"]["difference"]["low"] is None and variants["TAM"]["difference"]["lost"] == 1
    assert study["facts"]["seeds"] == "0, 1" and "charts" not in study
