"""`tam lab run` and `tam lab report`: the smoke preset from end to end, and messages for mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from contextlib import ExitStack
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tam.lab.core import runner
from tam.lab.core.plan import Plan
from tam.lab.core.registry import get_experiment
from tam.lab.core.results import load_existing_results, load_results
from tam.lab.core.selection import Selection, load_groups, remember_selection, select_plans, selections_of
from tam.lab.core.store import TrialFolder
from tam.lab.engines.events import RunLocation
from tam.lab.report import build_report, render_json
from tests.lab.commands.helpers import run_process, start_process, tam_lab


def test_a_run_is_done_once(folder: Path) -> None:
    (plan,) = select_plans(Selection("images", "smoke"), load_results(folder))
    assert plan.to_run() == []
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("trials/*/result.json")}
    code, output = tam_lab("run", "images", "--preset", "smoke", "--out", folder, "--device", "cpu")
    assert code == 0 and "trials to run" not in output
    assert "all 12 trials are finished: nothing to run\n" in output and ": done. Write a report" in output
    assert {path: path.stat().st_mtime_ns for path in folder.glob("trials/*/result.json")} == stamps
    assert selections_of(load_existing_results(folder)) == [Selection("images", "smoke", tuning_seeds=1)]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_report_has_tables_and_curves_and_needs_no_network(folder: Path, tmp_path: Path) -> None:
    page, text = tmp_path / "report.html", tmp_path / "report.md"
    for target in (page, text):
        code, output = tam_lab("report", folder, "-o", target)
        assert code == 0 and output.strip().endswith(target.name)
    html = page.read_text(encoding="utf-8")
    charts = 8  # the forest plot, loss, accuracy, s, |g|, and d in three parts
    assert html.count("<svg ") == html.count("</svg>") == html.count("<desc") == charts
    assert not re.search(r'https?:|src=|href="[^#]|url\((?!#)|@import', html)
    parser = Tags()
    parser.feed(html.replace("<!doctype html>", ""))
    markdown = text.read_text(encoding="utf-8")
    (plan,) = select_plans(Selection("images", "smoke"), load_results(folder))
    for variant in plan.study.variants:
        mean = shown_mean(plan, variant.name)
        assert f"<td>{variant.name.replace(chr(39), '&#39;')}</td>" in html
        assert re.search(rf"\| {re.escape(variant.name)} \| .* \| 2 of 2 \| {mean}", markdown)
        other = plan.study.compared_with(variant) or variant.control_of
        assert not other or re.search(rf"\| {re.escape(variant.name)} \| .* \| {other} \| [+-]\d", markdown)
    assert "its figures mean nothing" in markdown and "torch" in markdown


def shown_mean(plan: Plan, name: str) -> str:
    trials = plan.comparison_trials(plan.study.variant(name))
    assert trials is not None
    values = [record.result["validation"] for trial in trials if (record := plan.record(trial)) is not None]
    return f"{sum(values) / len(values):.2f}"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_the_report_in_a_browser(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert tam_lab("report", folder, "-o", page)[0] == 0
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}/profile",
    ]
    done = subprocess.run(
        [*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<svg") == 8 and "difference [95 % interval]" in done.stdout
    shot = tmp_path / "shot.png"
    size = ["--window-size=1200,2400", f"--screenshot={shot}"]
    done = subprocess.run([*command, *size, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert shot.stat().st_size > 20000, done.stderr  # a blank page is smaller


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "image", "--out", "X"], "no experiment 'image'; there are ablations, beyond"),
        (["run", "images", "--preset", "full", "--out", "X"], "has no preset 'full'; it has paper, "),
        (
            ["run", "images", "--preset", "smoke", "--study", "cifar", "--out", "X"],
            "no study 'cifar'; it has digits",
        ),
        (
            ["run", "images", "--preset", "quick", "--data", "X", "--out", "X"],
            "cifar10 is incomplete: 6 of 6 files missing",
        ),
        (
            ["run", "images", "--preset", "smoke", "--out", "X", "--device", "tpu"],
            "--device must be auto, cpu, cuda or cuda:N, got 'tpu'",
        ),
        (
            ["run", "images", "--preset", "smoke", "--out", "X", "--device", "cuda:9"],
            "--device cuda:9: no such GPU",
        ),
        (
            ["run", "images", "--preset", "smoke", "--out", "X", "--engine", "dask"],
            "must be one of local, ray",
        ),
        (["run", "images", "--preset", "smoke", "--out", "/proc/x"], "/proc/x cannot be written"),
        (
            ["run", "images", "--preset", "smoke", "--variant", "TAN", "--out", "X"],
            'no variant "TAN"; it has "SGDM", "TAM"',
        ),
        (["run", "imagenet", "--preset", "paper", "--data", "X", "--out", "X"], "imagenet is incomplete"),
        (
            ["run", "runtime", "--preset", "smoke", "--controls", "--out", "X"],
            "runtime has no controls of TAM",
        ),
        (
            ["run", "graph", "--preset", "smoke", "--engine", "ray", "--device", "cuda:9", "--out", "X"],
            "--device cuda:9: no such GPU",
        ),
        (["run", "graph", "--out", "X", "--encoder", "./nowhere"], "--encoder: no such folder: ./nowhere"),
        (["score", "X", "--device", "cuda:9"], "--device cuda:9: no such GPU"),
        (["score", "X", "--data", "nowhere"], "No such folder: nowhere"),
        (["score", "X", "--tasks", "BIOSSES, Nonsense"], "MTEB has no task 'Nonsense'"),
        (["status", "X"], "No such folder: "),
        (["report", "X", "-o", "X.html"], "No such folder: "),
        (["pack", "X", "-o", "X.zip"], "--out must end in .xz, got "),
        (["run", "toy", "--dry-run", "--engine", "dask", "--out", "X"], "must be one of local, ray"),
        (["run", "toy", "--dry-run", "--device", "cuda:9", "--out", "X"], "--device cuda:9: no such GPU"),
        (["data", "check", "cifar10", "--data", "X"], "cifar10 is incomplete: 6 of 6 files missing"),
        (["data", "get", "mnist", "--data", "X"], "no data set 'mnist'; there are cifar10"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / a) if a.startswith("X") else a for a in arguments]
    code, output = tam_lab(*paths)
    assert code != 0
    assert message in output
    assert not (tmp_path / "X").exists()  # nothing is noted as run that could not be


def test_parts_of_a_study_that_were_run_one_by_one_are_one_in_the_report(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "lab")
    runs = [
        Selection("images", "smoke", variants=("TAM",), seeds=1),
        Selection("images", "smoke", variants=("TAM, constant damping",)),
    ]
    (tmp_path / "lab" / "runs.json").unlink()
    for selection in runs:
        remember_selection(selection, tmp_path / "lab")
    (part,) = load_groups(tmp_path / "lab")
    # What was not asked for is there, too: nobody is said to be better for what was left out.
    (whole,) = load_groups(folder)
    assert render_json(build_report([part])) == render_json(build_report([whole]))


def mistake(*args: str | Path) -> str:
    code, output = tam_lab(*args)
    assert code != 0
    return output


def test_torchrun_is_for_experiments_whose_trials_run_on_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    arguments = ("--preset", "smoke", "--out", tmp_path / "X")
    assert "each trial of images has one process" in mistake("run", "images", *arguments)
    assert "--engine ray: start it without torchrun" in mistake(
        "run", "imagenet", "--engine", "ray", *arguments
    )
    assert not (tmp_path / "X").exists()


def test_a_second_run_waits_for_the_first(tmp_path: Path) -> None:
    """It does not run the trials the first works on, and goes on when they are done."""
    arguments = ["run", "toy", "--preset", "smoke", "--out", str(tmp_path), "--device", "cpu"]
    (plan,) = select_plans(Selection("toy", "smoke"), load_results(tmp_path))
    found = [TrialFolder(tmp_path, trial) for _, trial in plan.to_run()]
    folders = list({folder.key: folder for folder in found}.values())
    with ExitStack() as held:
        for folder in folders:
            held.enter_context(folder.at_work())
        with start_process(arguments) as (process, lines):
            waits = f"waiting: another run works on the {len(folders)} trials that are left"
            assert any(waits in line for line in lines)
            held.close()
            rest = "".join(lines)
            assert process.wait() == 0, rest
    assert all(folder.read_result() for folder in folders)


def test_the_time_between_checkpoints_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locations: list[RunLocation] = []
    monkeypatch.setattr(runner, "run", lambda selection, location, *rest: locations.append(location))
    arguments = ("run", "images", "--preset", "smoke", "--out", tmp_path, "--device", "cpu")
    for more in ((), ("--save-every", "7.5")):
        assert tam_lab(*arguments, *more)[0] == 0
    assert [location.save_every for location in locations] == [60, 7.5]


@pytest.mark.parametrize(
    ("how", "engine"), [(signal.SIGINT, "local"), (signal.SIGTERM, "local"), (signal.SIGTERM, "ray")]
)
def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(how: signal.Signals, engine: str, tmp_path: Path) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    arguments = ["run", "images", "--preset", "smoke", "--out", str(tmp_path), "--device", "cpu"]
    (plan,) = select_plans(Selection("images", "smoke"), load_results(tmp_path))
    with (
        # Of a trial that is at work elsewhere: the run cannot be over before the signal reaches it.
        TrialFolder(tmp_path, plan.to_run()[0][1]).at_work(),
        start_process([*arguments, "--engine", engine]) as (process, lines),
    ):
        begins = ": start" if engine == "local" else "to run"  # Ray's tasks tell of epochs alone
        assert any(begins in line for line in lines)
        process.send_signal(how)
        rest = "".join(lines)
        assert (
            process.wait() == 130 and "stopped. The same command continues from the last checkpoints" in rest
        )
    assert "Traceback" not in rest
    code, output = tam_lab(*arguments)
    assert code == 0, output  # and it does


def test_the_former_name_of_variant_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    selections: list[Selection] = []
    monkeypatch.setattr(runner, "run", lambda selection, *rest: selections.append(selection))
    for option in ("--variant", "--arm"):
        assert tam_lab("run", "images", "--out", tmp_path, option, "TAM", option, "SGDM")[0] == 0
    assert [selection.variants for selection in selections] == [("TAM", "SGDM")] * 2
    assert "--arm" not in tam_lab("run", "images", "--help")[1]


def test_options_of_an_experiment_exist_only_there() -> None:
    for name in ("images", "graph", "llm", "toy"):
        help_text = re.sub(r"\x1b\[[0-9;]*m", "", tam_lab("run", name, "--help")[1])
        own = {option.name for option in get_experiment(name).options}
        assert {
            option for option in ("checkpoint", "encoder", "model", "tasks") if f"--{option}" in help_text
        } == own
    assert "No such option" in tam_lab("run", "toy", "--encoder", "X")[1]


def test_a_rank_without_torchrun_silences_nothing(folder: Path) -> None:
    done = run_process(
        "lab", "run", "images", "--preset", "smoke", "--out", folder, "--device", "cpu", RANK="1"
    )
    assert done.returncode == 0 and "done" in done.stdout


def test_paths_in_hints_are_quoted(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a folder; ls"
    shutil.copytree(folder, path)
    output = tam_lab("run", "images", "--preset", "smoke", "--out", path, "--device", "cpu")[1]
    assert f"tam lab report '{path}' -o report.html" in output


# ---------------------------------------------------------------------- --dry-run


def dry_run(out: Path, *more: str | Path) -> str:
    code, output = tam_lab("run", "images", "--preset", "smoke", "--out", out, "--dry-run", *more)
    assert code == 0, output
    return output


def test_a_dry_run_shows_trials_and_data_and_writes_nothing(tmp_path: Path) -> None:
    output = dry_run(tmp_path / "X")
    assert "digits-tiny: 2 trials now, about 12 in 2 later stages\n" in output
    assert "  TAM: lr 0.02, tuning seed 100\n  TAM: lr 0.2, tuning seed 100\n" in output
    assert "digits is present" in output and "time: unknown" in output
    missing = tam_lab("run", "images", "--dry-run", "--device", "cpu", "--data", tmp_path / "Y")[1]
    assert "data: cifar10 is incomplete: 6 of 6 files missing" in missing
    assert f"Run: tam lab data get cifar10 --data {tmp_path / 'Y'}\n" in missing
    assert not os.listdir(tmp_path)


def test_a_dry_run_estimates_from_finished_trials(folder: Path, tmp_path: Path) -> None:
    assert "digits-tiny: nothing left to run\n" in dry_run(folder)
    shutil.copytree(folder, tmp_path / "copy")
    seconds = 7200.0
    for path in (tmp_path / "copy").glob("trials/*/result.json"):
        result = json.loads(path.read_text())
        result["timing"] |= {"seconds": seconds, "together": 2}
        path.write_text(json.dumps(result))
    (plan,) = select_plans(Selection("images", "smoke"), load_results(tmp_path / "copy"))
    for outcome in plan.outcomes():
        if outcome.variant.name in ("SGDM", "TAM, constant damping"):
            for record in outcome.records.values():
                shutil.rmtree(tmp_path / "copy" / "trials" / record.key, ignore_errors=True)
    output = dry_run(tmp_path / "copy", "--workers", "2")
    assert "  SGDM at TAM's effective lr: lr 0.1, seeds 0, 1 (the same trials as SGDM)\n" in output
    assert "4 trials now" in output and "about 120 min with 2 processes" in output
