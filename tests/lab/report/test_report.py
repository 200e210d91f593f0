"""The report: the answer first, then tables, curves and settings."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import torch
from markupsafe import escape

from tam.lab.core.registry import ReportExtras
from tam.lab.core.selection import PresetGroup
from tam.lab.core.study import Curve, Variant
from tam.lab.report import build_report, damping_charts, render_html, render_json, render_markdown
from tam.lab.report.charts import Series, line_chart
from tam.lab.report.model import StudySection, VariantSummary
from tests.lab.report.results import (
    ALL,
    LESS,
    SGDM,
    TAM,
    VARIANTS,
    WORKLOAD,
    finish,
    group_with,
    looks_of,
    plan_for,
)


def section_of(group: PresetGroup) -> StudySection:
    (preset,) = build_report([group]).presets
    return preset.studies[0]


def rows_of(group: PresetGroup) -> dict[str, dict[str, str]]:
    """Return the cells of the first table, by variant and column."""
    table = section_of(group).tables[0]
    return {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}


def variants_of(group: PresetGroup) -> dict[str, VariantSummary]:
    return {variant.name: variant for variant in section_of(group).variants}


def test_the_table_of_a_study() -> None:
    group = group_with(ALL, paper={"SGDM": (93.6, 0.3), "TAM": (94.2, None)})
    assert section_of(group).tables[0].header == [
        "variant", "lr", "effective lr", "n", "validation %", "compared with", "difference [95 % interval]",
        "paper",
    ]  # fmt: skip
    rows = {name: list(row.values()) for name, row in rows_of(group).items()}
    # TAM minus SGDM: 2.0, 2.1, 2.1, 1.9, 1.8, so 1.98 ± 2.77645 * 0.13038 / sqrt(5).
    assert rows["TAM"] == [
        "TAM",
        "0.2",
        "0.1",
        "5 of 5",
        "92.18 ± 0.13",
        "SGDM",
        "+1.98 [+1.82, +2.14]",
        "94.2",
    ]
    assert rows["SGDM"] == ["SGDM", "0.1", "0.1", "5 of 5", "90.20 ± 0.16", "", "", "93.6 ± 0.3"]
    # A control is compared with its variant: LESS minus TAM is -1.0, -1.2, -0.9, -1.1, -1.1.
    control = rows["TAM, shuffled damping"]
    assert control[4:7] == ["91.12 ± 0.13", "TAM", "-1.06 [-1.20, -0.92]"]
    assert rows["SGDM at TAM's effective lr"][5:7] == ["TAM", "-1.98 [-2.14, -1.82]"]


def test_lower_is_better_is_in_the_header() -> None:
    header = section_of(group_with(ALL, higher=False, label="loss")).tables[0].header
    assert "loss (lower is better)" in header


def test_reports_have_no_verdicts() -> None:
    """Neither their words, nor a correction for many comparisons."""
    report = build_report(
        [group_with(ALL), group_with(ALL, name="other", workload={**WORKLOAD, "epochs": 2})]
    )
    for text in (render_html(report), render_markdown(report), render_json(report)):
        words = re.sub(r"lower is better|<style>.*?</style>", "", text, flags=re.DOTALL)
        assert not re.search(r"\b(better|worse|equivalent|undecided|holm|helps?)\b", words, re.IGNORECASE)


def test_a_variant_with_the_runs_of_another() -> None:
    again = replace(VARIANTS[0], name="SGDM, more lrs")
    group = group_with(ALL, variants=(*VARIANTS, again))
    assert '"SGDM, more lrs" has the same lr and runs as "SGDM".' in section_of(group).paragraphs
    assert sum("runs as" in line for line in section_of(group_with({})).paragraphs) == 0


def test_further_comparisons_are_below_the_table() -> None:
    sgd = Variant("SGD", "sgd", (1.0,))
    tam = replace(VARIANTS[1], against=("SGD",))
    group = group_with({"SGDM": SGDM, "TAM": TAM, "SGD": LESS}, variants=(VARIANTS[0], tam, sgd))
    further = section_of(group).tables[1]
    assert further.rows == [["TAM", "SGD", "+1.06 [+0.92, +1.20]", "5"]]


def test_the_mean_s_and_d_are_below_the_table() -> None:
    group = group_with({"SGDM": SGDM, "TAM": TAM}, variants=VARIANTS[:2])
    (plan,) = group.plans
    for seed, trial in enumerate(plan.comparison_trials(VARIANTS[1]) or []):
        plan.results.records[trial.key].metrics = [{"epoch": 1, "alignment": 0.1 * seed}]  # mean 0.2
    _, damping = section_of(group).tables
    assert (damping.header, damping.rows) == (["variant", "mean s", "mean d"], [["TAM", "+0.200", "0.600"]])


def test_what_a_preset_plans_and_was_not_run_is_named() -> None:
    group = group_with(ALL)
    other = replace(group.plans[0].study, name="other", title="What nobody ran")
    text = render_markdown(build_report([PresetGroup(group.plans, (other,))]))
    assert "- Planned in the preset paper, but not run: What nobody ran.\n" in text
    assert "not run:" not in render_markdown(build_report([group]))


def test_studies_of_one_name_have_their_own_differences_and_anchors() -> None:
    """Such as those of two models."""
    first = group_with(ALL)
    second = group_with({**ALL, "TAM": LESS, "SGDM": TAM}, workload={**WORKLOAD, "epochs": 77})
    report = build_report([PresetGroup([*first.plans, *second.plans], ())])
    means = [{one.name: one for one in section.variants}["TAM"].difference for section in report.sections]
    assert [round(one.mean, 2) for one in means if one is not None] == [1.98, -1.06]
    anchors = [section.anchor for section in report.sections]
    assert anchors == ["images-paper-digits", "images-paper-digits-2"]
    assert re.findall(r'<a id="([^"]*)"></a>', render_markdown(report)) == anchors
    page = render_html(report)
    assert re.findall(r'href="#([^"]*)"', page) == re.findall(r'<h2 id="([^"]*)"', page) == anchors


def test_seeds_that_were_not_run_are_counted() -> None:
    row = rows_of(group_with(ALL, seeds=6))["TAM"]
    assert row["n"] == "5 of 6" and row["difference [95 % interval]"].startswith("+1.98")


def test_a_winner_at_the_edge_of_its_grid_is_marked() -> None:
    variants = (Variant("SGDM", "sgdm", (0.1, 0.01)), *VARIANTS[1:])
    plan = plan_for(variants=variants, tuning_seeds=(100,))
    for _, trial in plan.to_run():
        finish(plan, trial, 90 + trial.lr)
    group = PresetGroup([plan], ())
    assert rows_of(group)["SGDM"]["lr"] == "0.1 (edge of its grid)"
    facts = section_of(group).facts
    assert facts["learning rates"] == "SGDM: 0.01, 0.1 (tuned, seeds 100); TAM: 0.2 (fixed)"


def test_what_cannot_be_averaged_is_counted_as_diverged() -> None:
    row = rows_of(group_with({**ALL, "TAM": [92.0, math.nan, 92.2, 92.3, 92.1]}))["TAM"]
    assert row["n"] == "4 of 5, 1 diverged" and row["validation %"].startswith("92.15")


def test_it_says_why_controls_have_fewer_seeds() -> None:
    group = group_with({"SGDM": SGDM, "TAM": [92.0, math.nan, 92.2, 92.3, 92.1]})
    (plan,) = group.plans
    names = ["TAM, shuffled damping", "TAM, constant damping"]
    trials = [one for name in names for one in plan.comparison_trials(plan.study.variant(name)) or []]
    for trial in trials:
        if trial.seed != 1:
            finish(plan, trial, 91.0)
    quoted = " and ".join(f'"{name}"' for name in names)
    explained = f'{quoted}: no run with seed 1, where "TAM" diverged and left no d.'
    assert explained in section_of(group).paragraphs
    for trial in trials:
        finish(plan, trial, 91.0)
    assert explained not in section_of(group).paragraphs


def test_a_study_without_results_has_a_report() -> None:
    group = PresetGroup([plan_for(seeds=2)], ())
    assert "| TAM | 0.2 | 0.1 | 0 of 2 | not run |" in render_markdown(build_report([group]))
    assert "no trial of the comparison was run" in render_html(build_report([group]))
    assert variants_of(group)["TAM"].outcome is None


def test_curves_are_means_with_a_band_and_duplicates_have_none() -> None:
    again = replace(VARIANTS[0], name="SGDM, more lrs")
    (chart,) = section_of(group_with(ALL, variants=(*VARIANTS, again))).charts
    assert "TAM, epoch 2: 0.5 (0.5 to 0.5)" in chart
    assert "SGDM, epoch 3: 0.3333 (0.3333 to 0.3333)" in chart and "SGDM, more lrs" not in chart


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_epoch_at_which_a_seed_is_not_finite_is_a_gap(value: float) -> None:
    """In any order of the seeds: a packed file keeps no infinities."""
    group = group_with({"SGDM": SGDM})
    last = [*group.plans[0].results][-1]
    last.metrics = [{"epoch": epoch, "loss": value if epoch == 3 else 1.0} for epoch in (1, 2, 3)]
    (chart,) = section_of(group).charts
    assert "SGDM, epoch 2" in chart and "SGDM, epoch 3" not in chart


def test_a_diverged_run_does_not_flatten_the_curves() -> None:
    group = group_with({"SGDM": SGDM})
    first, *others = group.plans[0].results
    first.metrics = [{"epoch": epoch, "loss": 10.0 ** (4 * epoch)} for epoch in (1, 2, 3)]
    first.stored_result["diverged"] = True
    section = section_of(group)
    assert "SGDM, epoch 3: 0.3333 (0.3333 to 0.3333)" in section.charts[0]
    assert section.undrawn == ['"SGDM" without seed 0 (diverged, loss 1e+12).']
    for record in others:  # if all diverged, they are what there is to show
        record.stored_result["diverged"] = True
    section = section_of(group)
    assert "SGDM, epoch 3: 2e+11 (0.3333 to 1e+12)" in section.charts[0] and not section.undrawn


@pytest.mark.parametrize("diverged", [True, False])
def test_a_variant_whose_runs_all_exploded_does_not_flatten_the_others(diverged: bool) -> None:
    group = group_with({"SGDM": SGDM, "TAM": TAM}, variants=VARIANTS[:2])
    (plan,) = group.plans
    for trial in plan.comparison_trials(VARIANTS[1]) or []:
        record = plan.results.records[trial.key]
        record.metrics = [{"epoch": epoch, "loss": 10.0**epoch} for epoch in (1, 2, 3, 4)]
        record.stored_result["diverged"] = diverged
    section = section_of(group)
    assert [*looks_of(section.charts[0])] == ["SGDM"]
    (undrawn,) = section.undrawn
    end = "diverged, loss 1e+04" if diverged else "loss 1e+04"
    assert undrawn.startswith('No curve of "TAM": ') and undrawn.count(end) == len(TAM)
    assert escape(undrawn) in render_html(build_report([group]))
    for trial in plan.comparison_trials(VARIANTS[1]) or []:
        plan.results.records[trial.key].metrics[-1]["loss"] = 1000.0  # exactly 100 times the first one
    (chart,) = section_of(group).charts
    assert [*looks_of(chart)] == (["SGDM"] if diverged else ["SGDM", "TAM"])


def test_a_variant_has_one_look_in_all_charts_of_a_page() -> None:
    def figures(plan: object, styles: dict[str, int]) -> list[str]:
        names = ["the paper", "TAM", "SGD"]
        return [line_chart([Series(n, [1, 2], [1, 2], style=styles.get(n)) for n in names], "t", "x", "y")]

    experiment = {
        "curves": (Curve("loss", "Loss", "loss"), Curve("loss", "Again", "loss")),
        "extras": ReportExtras(figures=figures),
    }
    sgd = Variant("SGD", "sgd", (1.0,))
    outcomes = {"SGDM": SGDM, "TAM": TAM, "SGD": LESS}
    first = group_with({"SGDM": SGDM, "TAM": TAM}, variants=VARIANTS[:2], experiment=experiment)
    second = group_with(
        outcomes, variants=(sgd, VARIANTS[1], VARIANTS[0]), experiment=experiment, name="other",
        workload={**WORKLOAD, "epochs": 2},
    )  # fmt: skip
    charts = [
        looks_of(chart) for section in build_report([first, second]).sections for chart in section.charts
    ]
    assert [set(chart) for chart in charts] == [
        {"SGDM", "TAM"}, {"SGDM", "TAM"}, {"the paper", "TAM", "SGD"},
        {"SGDM", "TAM", "SGD"}, {"SGDM", "TAM", "SGD"}, {"the paper", "TAM", "SGD"},
    ]  # fmt: skip
    for name in ("SGDM", "TAM", "SGD"):
        assert len({chart[name] for chart in charts if name in chart}) == 1
    assert all(len(set(chart.values())) == len(chart) for chart in charts)


def test_the_distribution_of_d_has_the_look_of_its_variant() -> None:
    experiment = {"extras": ReportExtras(figures=damping_charts.distribution)}
    group = group_with({"SGDM": SGDM, "TAM": TAM}, variants=VARIANTS[:2], experiment=experiment)
    (plan,) = group.plans
    for trial in plan.comparison_trials(VARIANTS[1]) or []:
        plan.results.records[trial.key].alignment = torch.linspace(-1, 1, 101)  # d from 0 to 1
    curve, *distributions = section_of(group).charts
    assert len(distributions) == 3
    for chart in distributions:
        ((name, look),) = looks_of(chart).items()
        assert name.startswith("TAM: ") and look == looks_of(curve)["TAM"]
    assert "TAM: 5, 50, 95% at 0.050, 0.500, 0.950" in distributions[0]


def test_the_page_is_the_answer_then_tables_curves_and_folded_settings() -> None:
    choices = {"schedule": "cosine"}
    report = build_report([group_with(ALL, experiment={"choices": choices}, choices={"lr": "by the paper"})])
    page = render_html(report)
    answer = f'<p class="answer">{report.answer[0]}'
    parts = [
        answer,
        '<svg class="chart forest"',
        "<h2 id=",
        "<table>",
        "<h2>Curves of",
        "<h2>Settings",
        "<dl>",
    ]
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    folded = re.findall(r"<details>(.*?)</details>", page, re.DOTALL)
    for text in ("cosine", "by the paper", "hardware CPU", "0, 1, 2, 3, 4", report.notes[0]):
        assert any(text in part for part in folded) and page.count(text) == 1
    assert all(part.startswith("<summary>") for part in folded) and "<details open" not in page
    assert "<dl>" not in re.sub(r"<details>.*?</details>", "", page, flags=re.DOTALL)


def test_choices_of_an_experiment_are_shown_once() -> None:
    groups = [group_with(ALL, experiment={"choices": {"schedule": "cosine"}}) for _ in range(2)]
    groups[1].plans[0].preset = "quick"
    report = build_report(groups)
    assert render_markdown(report).count("cosine") == render_html(report).count("cosine") == 1


def test_a_study_that_two_presets_share_is_shown_once() -> None:
    """The preset with more of its trials is kept."""
    part, whole = group_with({"SGDM": SGDM, "TAM": TAM}), group_with(ALL)
    whole.plans[0].preset = "controls"
    (section,) = build_report([part, whole]).sections
    assert "preset controls" in section.title and len(section.variants) == len(VARIANTS)


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


def test_json_has_the_estimates_and_no_charts() -> None:
    report = build_report([group_with({**ALL, "TAM": [92.0, 92.3, math.nan]}, seeds=3)])
    model = json.loads(render_json(report))
    assert model["answer"] == list(report.answer) and "forest" not in model
    assert model["tally"] == {"ahead": 0, "behind": 0, "unclear": 0}
    (preset,) = model["presets"]
    assert (preset["experiment"], preset["preset"]) == ("images", "paper")
    (study,) = preset["studies"]
    variants = {variant["name"]: variant for variant in study["variants"]}
    assert variants["SGDM"]["outcome"]["mean"] == pytest.approx(90.1) and variants["SGDM"]["n"] == 3
    assert variants["TAM"]["effective_lr"] == pytest.approx(0.1)
    difference = variants["TAM"]["difference"]  # 2.0 and 2.1: 2.05 ± 12.7062 * 0.05
    assert difference["mean"] == pytest.approx(2.05) and difference["n"] == 2
    assert (difference["low"], difference["high"]) == pytest.approx((2.05 - 0.63531, 2.05 + 0.63531))
    assert study["facts"]["seeds"] == "0, 1, 2" and "charts" not in study
    assert "<svg" not in render_json(report)


def test_json_has_null_for_what_is_not_known() -> None:
    report = build_report([group_with({"SGDM": SGDM[:1], "TAM": TAM[:1]}, seeds=1)])
    (variants,) = (study["variants"] for study in json.loads(render_json(report))["presets"][0]["studies"])
    tam = {variant["name"]: variant for variant in variants}["TAM"]
    assert tam["outcome"] == {"mean": 92.0, "spread": None}
    assert tam["difference"]["mean"] == pytest.approx(2.0) and tam["difference"]["low"] is None
