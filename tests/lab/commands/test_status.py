"""`tam lab status`: what it says, and that it writes nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tam.lab.core.registry import get_experiment
from tam.lab.core.results import load_results
from tam.lab.core.selection import Selection, load_groups, remember_selection, select_plans
from tam.lab.core.store import TrialFolder
from tests.lab.commands.helpers import tam_lab
from tests.lab.core.helpers import save_checkpoints


def snapshot(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def change_result(folder: Path, variant: str, seed: int, **changes: object) -> None:
    """Change the stored result of a comparison trial."""
    (plan,) = select_plans(Selection("images", "smoke"), load_results(folder))
    (outcome,) = (outcome for outcome in plan.outcomes() if outcome.variant.name == variant)
    path = folder / "trials" / outcome.records[seed].key / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def remove_trials(folder: Path, variant: str, *seeds: int) -> None:
    (plan,) = select_plans(Selection("images", "smoke"), load_results(folder))
    (outcome,) = (outcome for outcome in plan.outcomes() if outcome.variant.name == variant)
    for seed in seeds:
        shutil.rmtree(folder / "trials" / outcome.records[seed].key)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_a_finished_run(folder: Path) -> None:
    before = snapshot(folder)
    code, output = tam_lab("status", folder)
    assert code == 0 and "images smoke digits-tiny: done\n" in output
    assert "TAM, shuffled damping: 2 of 2 seeds\n" in output
    (study,) = json.loads(tam_lab("status", folder, "--json")[1])
    assert (study["study"], study["to_run"], study["running"]) == ("digits-tiny", 0, 0)
    assert all(variant["finished"] == variant["planned"] == 2 for variant in study["variants"])
    assert snapshot(folder) == before


def test_status_of_an_unfinished_run_writes_nothing(copy: Path) -> None:
    remove_trials(copy, "SGDM", 0)
    (copy / "trials").chmod(0o755)
    before = snapshot(copy)
    code, output = tam_lab("status", copy)
    assert code == 0 and "digits-tiny: 1 trial can run now\n" in output and "SGDM: 1 of 2 seeds\n" in output
    assert snapshot(copy) == before


def test_a_control_whose_source_diverged_is_blocked_in_the_study_and_in_the_variant(copy: Path) -> None:
    control = "TAM, shuffled damping"
    remove_trials(copy, control, 1)
    change_result(copy, "TAM", 1, diverged=True)
    blocked = "1 trial cannot run: the source of the damping diverged\n"
    output = tam_lab("status", copy)[1]
    assert f"digits-tiny: done; {blocked}" in output and f"{control}: 1 of 2 seeds; {blocked}" in output
    (study,) = json.loads(tam_lab("status", copy, "--json")[1])
    (variant,) = (variant for variant in study["variants"] if variant["name"] == control)
    assert (study["to_run"], variant["finished"], variant["planned"], variant["blocked"]) == (0, 1, 2, 1)


def test_constant_damping_that_is_the_baseline_is_left_out(copy: Path, tmp_path: Path) -> None:
    """Status, dry run, run and report agree on it, and the study is done."""
    (plan,) = select_plans(Selection("images", "smoke"), load_results(copy))
    outcomes = {outcome.variant.name: outcome for outcome in plan.outcomes()}
    remove_trials(copy, "TAM, constant damping", 1)
    for record in outcomes["TAM"].records.values():
        rows = [{**row, "alignment": 0.004} for row in record.metrics]
        path = copy / "trials" / record.key / "metrics.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = tam_lab("status", copy)[1]
    assert "images smoke digits-tiny: done\n" in output
    assert "  TAM, constant damping: left out: 2 x mean(d) is 1.004, so it is the baseline" in output
    (study,) = json.loads(tam_lab("status", copy, "--json")[1])
    counts = {one["name"]: (one["finished"], one["planned"], one["blocked"]) for one in study["variants"]}
    assert counts.pop("TAM, constant damping") == (0, 0, 0) and set(counts.values()) == {(2, 2, 0)}
    arguments = ("run", "images", "--preset", "smoke", "--out", copy, "--device", "cpu")
    assert "digits-tiny: nothing left to run\n" in tam_lab(*arguments, "--dry-run")[1]
    before = {path.parent for path in copy.glob("trials/*/result.json")}
    assert tam_lab(*arguments)[0] == 0
    assert {path.parent for path in copy.glob("trials/*/result.json")} == before
    assert tam_lab("report", copy, "-o", tmp_path / "report.md")[0] == 0


def test_a_variant_all_of_whose_lrs_diverged_is_blocked(copy: Path) -> None:
    (plan,) = select_plans(Selection("images", "smoke"), load_results(copy))
    tam = plan.study.variant("TAM")
    for trial in plan.tuning_trials(tam, plan.grid(tam)):
        path = copy / "trials" / trial.key / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"diverged": True}))
    output = tam_lab("status", copy)[1]
    assert "digits-tiny: done; 10 trials cannot run: every lr of TAM diverged\n" in output
    assert "  TAM: 0 of 2 seeds; 2 trials cannot run: every lr of TAM diverged\n" in output


@pytest.mark.parametrize("is_tuned", [True, False])
def test_a_variant_whose_package_is_missing_is_blocked(
    is_tuned: bool, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its controls, if its lr cannot be selected. What needs no package still runs."""
    (plan,) = select_plans(Selection("images", "smoke"), load_results(copy))
    if not is_tuned:
        tam = plan.study.variant("TAM")
        for trial in plan.tuning_trials(tam, plan.grid(tam)):
            shutil.rmtree(copy / "trials" / trial.key)
    remove_trials(copy, "SGDM", 0)
    if is_tuned:
        remove_trials(copy, "TAM", 0, 1)
    needs_package = replace(
        get_experiment("images"),
        missing=lambda trial: "a package is missing" if trial.optimizer == "tam" else "",
    )
    monkeypatch.setattr("tam.lab.core.selection.get_experiment", lambda _: needs_package)
    (study,) = json.loads(tam_lab("status", copy, "--json")[1])
    variants = {one["name"]: one for one in study["variants"]}
    sgdm, tam = variants["SGDM"], variants["TAM"]
    assert (tam["blocked"], tam["note"]) == (2, "a package is missing")
    assert study["to_run"] == is_tuned  # tuning comes first
    assert (sgdm["blocked"], sgdm["note"]) == (
        (0, "") if is_tuned else (1, "a trial that it waits for was not run")
    )
    assert "a package is missing" in study["state"]


def test_a_run_that_has_just_begun(copy: Path) -> None:
    shutil.rmtree(copy / "trials")
    output = tam_lab("status", copy)[1]
    assert "digits-tiny: 2 trials can run now\n" in output
    assert "TAM: 0 of 2 seeds; lr not selected yet, 0 of 2 tried\n" in output
    assert "TAM, constant damping: 0 of 2 seeds; waits for the lr of TAM\n" in output


def test_parts_that_were_asked_for_again_are_told_once(tmp_path: Path) -> None:
    """And studies are in a preset's order, whichever was run first."""
    for studies, variants in (
        (("copies-tail",), ()),
        (("tam0.2",), ("SGDM",)),
        ((), ()),
        (("tam0.2",), ("TAM",)),
    ):
        remember_selection(Selection("warmup", "smoke", studies, variants), tmp_path)
    lines = [line for line in tam_lab("status", tmp_path)[1].splitlines() if line.startswith("warmup")]
    assert [line.split(":")[0] for line in lines] == ["warmup smoke copies-tail", "warmup smoke tam0.2"]
    (group,) = load_groups(tmp_path)
    assert [plan.study.name for plan in group.plans] == ["tam0.2", "copies-tail"]


def test_runs_of_different_variants_are_one_study(copy: Path) -> None:
    (copy / "runs.json").unlink()
    remember_selection(Selection("images", "smoke", variants=("TAM",)), copy)
    remember_selection(Selection("images", "smoke", variants=("TAM, constant damping",), seeds=1), copy)
    lines = tam_lab("status", copy)[1].splitlines()
    assert lines == [
        "images smoke digits-tiny: done (3 of 6 variants were asked for)",
        "  SGDM: 2 of 2 seeds", "  TAM: 2 of 2 seeds", "  TAM, constant damping: 1 of 1 seeds",
    ]  # fmt: skip
    (copy / "runs.json").unlink()
    remember_selection(Selection("images", "smoke", seeds=1), copy)
    assert "digits-tiny: done (1 of 2 seeds were asked for)\n" in tam_lab("status", copy)[1]


def test_interrupted_trials_are_counted(copy: Path) -> None:
    remove_trials(copy, "SGDM", 0, 1)
    (plan,) = select_plans(Selection("images", "smoke"), load_results(copy))
    folder, *_ = (TrialFolder(copy, trial) for _, trial in plan.to_run())
    with folder.at_work():
        save_checkpoints(folder, 1)
        assert "2 trials can run now, 1 of them running\n" in tam_lab("status", copy)[1]
    before = snapshot(copy)
    assert "digits-tiny: 2 trials can run now, 1 interrupted\n" in tam_lab("status", copy)[1]
    assert json.loads(tam_lab("status", copy, "--json")[1])[0]["interrupted"] == 1
    assert snapshot(copy) == before


def test_a_damaged_list_of_runs(tmp_path: Path) -> None:
    for content in ("[", '[{"experiment": "images"}]', '[{"nonsense": 1}]', "{}x"):
        (tmp_path / "runs.json").write_text(content)
        code, output = tam_lab("status", tmp_path)
        assert code == 1 and f"{tmp_path}/runs.json is damaged" in output
    (tmp_path / "runs.json").write_text('[{"experiment": "gone", "preset": "paper"}]')
    assert "no experiment 'gone'" in tam_lab("report", tmp_path, "-o", tmp_path / "report.md")[1]


def test_packed_results_have_the_same_status_and_report(folder: Path, tmp_path: Path) -> None:
    packed, unpacked = tmp_path / "trials.jsonl.xz", tmp_path / "unpacked"
    code, output = tam_lab("pack", folder, "-o", packed)
    assert code == 0 and "12 trials" in output  # two variants share two
    assert tam_lab("unpack", packed, "-o", unpacked)[0] == 0
    code, output = tam_lab("unpack", packed, "-o", unpacked)
    assert code == 1 and "unpacked cannot be written: Directory not empty. Unpack into a new" in output
    expected = tam_lab("status", folder)
    assert all(tam_lab("status", path) == expected for path in (packed, tmp_path, unpacked))
    report = tam_lab("report", folder, "--json")
    assert report[0] == 0 and all(tam_lab("report", path, "--json") == report for path in (packed, unpacked))
    code, output = tam_lab("pack", tmp_path / "nowhere", "-o", packed)
    assert code == 1 and "No such folder" in output
