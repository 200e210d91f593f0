"""The report: what is said of comparisons, and the stored ones are of the stored results."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tam.lab import report, variants
from tam.lab.experiment import Experiment, Plan, Study
from tam.lab.images import config_of
from tam.lab.runner import Group
from tam.lab.store import TrialFolder
from tests.lab.test_experiment import plan

RESULTS = Path(__file__).parents[2] / "results"


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("*/runs.json")), ids=lambda path: path.parent.name)
def test_stored_reports_are_of_the_stored_results(folder: Path) -> None:
    root = folder.parent
    assert (root / "report.md").read_text(encoding="utf-8") == report.markdown(report.shown(root))


def given(root: Path, outcomes: dict[str, list[float]], seeds: int = 5, **more: object) -> Group:
    """A study with these outcomes, seed by seed."""
    made = plan(root, seeds=tuple(range(seeds)))
    arms = tuple(replace(arm, lrs=arm.lrs[:1]) for arm in made.study.arms)
    mean = replace(arms[2], name="TAM, d its mean", damping="mean")
    study: Study = replace(made.study, arms=(*arms, mean), tuning_seeds=(), **more)
    found = Plan(made.experiment, study, root, "paper")
    for name, values in outcomes.items():
        trials = found.reported(study.arm(name))
        assert trials is not None
        for trial, value in zip(trials, values, strict=False):
            folder = TrialFolder(root, trial)
            if folder.result is None:
                with folder.at_work():
                    folder.finish({"validation": value, "diverged": False}, 1.0, torch.device("cpu"))
    return Group([found], ())


SGDM, TAM, LESS = (
    [90.0, 90.2, 90.1, 90.4, 90.3],
    [92.0, 92.3, 92.2, 92.3, 92.1],
    [91.0, 91.1, 91.3, 91.2, 91.0],
)
ALL = {"SGDM": SGDM, "TAM": TAM, "TAM, d shuffled": LESS, "TAM, d its mean": LESS}


def test_an_arm_with_the_runs_of_another(tmp_path: Path) -> None:
    group = given(tmp_path, ALL)
    made = group.plans[0]
    again = replace(made.study.arm("SGDM"), name="SGDM, more lrs")
    study = replace(made.study, arms=(*made.study.arms, again))
    with_it = Plan(made.experiment, study, tmp_path, "paper")
    found = report.markdown([Group([with_it], ())])
    assert "\n\nSGDM, more lrs: the same runs as SGDM, at the same lr.\n\n" in found
    assert found.count("the same runs as") == 2  # the control at TAM's effective lr is SGDM, too
    assert report.markdown([given(tmp_path / "none", {})]).count("the same runs as") == 0


def test_the_overview_has_the_best_mean_first(tmp_path: Path) -> None:
    group = given(tmp_path, ALL)
    found = report.overview(group, report.compare(group))[1]
    assert found == [
        [f"{group.planned[0].title}: validation %", "TAM 92.18 ± 0.13 (better); SGDM 90.20 ± 0.16"]
    ]
    assert "| TAM 92.18 ± 0.13 (better); SGDM 90.20 ± 0.16 |" in report.markdown([group])
    assert "TAM 92.18 ± 0.13 (better); SGDM" in report.html([group])


def test_tam_helps_only_where_it_beats_all_controls_with_all_seeds(tmp_path: Path) -> None:
    def said(name: str, outcomes: dict[str, list[float]], seeds: int = 5) -> str:
        group = given(tmp_path / name, outcomes, seeds)
        return report.against_controls(group.plans[0], report.compare(group))[-1]

    assert said("all", ALL).startswith("TAM helps")
    assert said("some", {k: v for k, v in ALL.items() if k != "TAM, d its mean"}).startswith(
        "TAM is not shown"
    )
    assert said("early", ALL, seeds=6).startswith("TAM is not shown")
    assert said("equal", {**ALL, "TAM, d shuffled": [x - 0.01 * i for i, x in enumerate(TAM)]}).startswith(
        "TAM is not"
    )


def test_one_comparison_has_one_verdict_and_the_paper_is_beside_it(tmp_path: Path) -> None:
    group = given(tmp_path, ALL, paper={"SGDM": (93.6, 0.3), "TAM": (94.2, 0.2)})
    (made,) = group.plans
    differences = report.compare(group)
    table, control = (
        differences[made.study.identity, "TAM", "SGDM"],
        differences[made.study.identity, "TAM", "SGDM at TAM's effective lr"],
    )
    assert table == control and table.verdict == "better"  # they are the same trials
    (line,) = report.beside_the_paper(made, differences)
    assert (
        "TAM minus SGDM: better here: +1.98" in line and "the paper's +0.60 lies outside the interval" in line
    )
    text = report.markdown([group])
    assert "for all comparisons the preset paper plans, 4, run" in text  # SGDM's, and three controls
    assert "| TAM, d shuffled | 0.2 | 5 of 5 | 91.12 ± 0.13 |  |  |  | control of TAM |" in text


def test_what_a_preset_plans_besides_is_counted_and_named(tmp_path: Path) -> None:
    group = given(tmp_path, ALL)
    other = replace(group.planned[0], name="other", title="What nobody ran")
    text = report.markdown([Group(group.plans, (other,))])
    assert "the preset paper plans, 8, run or not" in text
    assert "Planned, too, and not run: What nobody ran." in text
    assert "not run" not in report.markdown([group]).replace("run or not", "")


def test_without_controls_of_d_nothing_is_said_to_help(tmp_path: Path) -> None:
    (made,) = given(tmp_path, ALL).plans
    study = variants.without(made.study, "TAM, d shuffled", "TAM, d its mean")
    group = Group([Plan(made.experiment, study, tmp_path, "paper")], ())
    (_, line) = report.against_controls(group.plans[0], report.compare(group))
    assert line.startswith("TAM is not shown to help (not all of its controls are planned)")


def test_studies_of_one_name_have_their_own_differences(tmp_path: Path) -> None:
    """As those of two models, or with and without a file that was given."""
    (first,) = given(tmp_path, ALL).plans
    other = replace(first.study, workload={**first.study.workload, "epochs": 77})
    second = Plan(first.experiment, other, tmp_path, "paper")
    for name, values in {**ALL, "TAM": LESS, "SGDM": TAM}.items():
        trials = second.reported(second.study.arm(name))
        for trial, value in zip(trials or [], values, strict=True):
            folder = TrialFolder(tmp_path, trial)
            with folder.at_work():
                folder.finish({"validation": value, "diverged": False}, 1.0, torch.device("cpu"))
    group = Group([first, second], ())
    differences = report.compare(group)
    found = [{row[0]: row for row in report.table(one, differences)[1]}["TAM"][4] for one in group.plans]
    assert found == ["+1.98", "-1.06"]
    anchors = re.findall(r'<h2 id="([^"]*)"', report.html([group]))
    assert len(set(anchors)) == 2


def test_seeds_that_were_not_run_are_counted(tmp_path: Path) -> None:
    group = given(tmp_path, ALL, seeds=6)
    rows = {row[0]: row for row in report.table(group.plans[0], report.compare(group))[1]}
    assert rows["TAM"][2] == "5 of 6" and rows["TAM"][-1] == "so far better"


def test_a_winner_at_the_edge_of_its_grid_is_marked(tmp_path: Path) -> None:
    made = plan(tmp_path)
    for _, trial in made.to_run():
        with TrialFolder(tmp_path, trial).at_work():
            result = {"validation": 90 + trial["lr"], "diverged": False}
            TrialFolder(tmp_path, trial).finish(result, 1.0, torch.device("cpu"))
    group = Group([made], (made.study,))
    rows = {row[0]: row for row in report.table(made, report.compare(group))[1]}
    assert rows["SGDM"][1] == "0.1 (at the edge of its grid)"
    assert "SGDM by seeds 100 of 0.01: 90.01, 0.1: 90.10" in report.facts(made)["learning rates"]


def test_what_cannot_be_averaged_is_counted_as_diverged(tmp_path: Path) -> None:
    """What is left of an arm must not win by its losses."""
    group = given(tmp_path, {**ALL, "TAM": [92.0, float("nan"), 92.2, 92.3, 92.1]})
    (made,) = group.plans
    rows = {row[0]: row for row in report.table(made, report.compare(group))[1]}
    assert rows["TAM"][2] == "4 of 5" and rows["TAM"][3].startswith("92.15")
    assert rows["TAM"][-1] == "1 diverged: no verdict"
    assert report.against_controls(made, report.compare(group))[-1].startswith("TAM is not shown to help")


def test_an_experiment_without_results_has_a_report(tmp_path: Path) -> None:
    workload = {"data": "digits", "model": "tiny", "epochs": 1}
    study = Study("digits", "digits", workload, plan(tmp_path).study.arms, "SGDM", (0, 1), (100,))
    experiment = Experiment("images", "", lambda *_: iter(()), config_of, {"paper": (study,)}, {}, ())
    group = Group([Plan(experiment, study, tmp_path, "paper")], (study,))
    assert "| TAM |  | 0 of 2 | not run |" in report.markdown([group])
    assert "no trial of the comparison was run" in report.html([group])
