"""`tam lab`: the smoke preset from end to end, its report, and messages for mistakes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tam
from tam.cli import build
from tam.lab import runner
from tam.lab.engines.work import Place
from tam.lab.experiment import Plan
from tam.lab.report import compare
from tam.lab.runner import Selection, plans, remember, remembered, shown
from tam.lab.store import TrialFolder


def tam_lab(*args: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(build(), ["lab", *map(str, args)])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lab")
    code, output = tam_lab("run", "images", "--preset", "smoke", "--out", path, "--device", "cpu")
    assert code == 0, output
    return path


def test_a_run_is_done_once(folder: Path) -> None:
    (plan,) = plans(Selection("images", "smoke"), folder)
    assert plan.to_run() == []
    stamps = {path: path.stat().st_mtime_ns for path in folder.glob("trials/*/result.json")}
    code, output = tam_lab("run", "images", "--preset", "smoke", "--out", folder, "--device", "cpu")
    assert code == 0 and "trials to run" not in output
    assert {path: path.stat().st_mtime_ns for path in folder.glob("trials/*/result.json")} == stamps
    assert remembered(folder) == [Selection("images", "smoke")]


def test_status_and_list(folder: Path) -> None:
    code, output = tam_lab("status", folder)
    assert code == 0 and "images smoke digits-tiny: done" in output
    assert "TAM, d shuffled: 2 of 2 seeds" in output
    code, output = tam_lab("list")
    assert code == 0 and "images: Image classification" in output and "--study" not in output
    code, output = tam_lab("list", "images")
    assert code == 0 and "--study cifar10-resnet18: " in output and "online" not in output
    code, output = tam_lab("list", "picture")
    assert code == 1 and "no experiment 'picture'; there are ablations" in output


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
    assert html.count("<svg ") == html.count("</svg>") == 7  # loss, accuracy, s, |g|, d in three parts
    assert not re.search(r'https?:|src=|href="[^#]|url\(|@import', html)
    parser = Tags()
    parser.feed(html.replace("<!doctype html>", ""))
    markdown = text.read_text(encoding="utf-8")
    (plan,) = plans(Selection("images", "smoke"), folder)
    for arm in plan.study.arms:
        mean = shown_mean(plan, arm.name)
        assert f"<td>{arm.name.replace(chr(39), '&#x27;')}</td>" in html
        assert re.search(rf"\| {re.escape(arm.name)} \| .* \| 2 of 2 \| {mean}", markdown)
        assert not arm.control_of or f"{arm.control_of} minus {arm.name}: " in markdown
    assert "in small, its figures mean nothing" in markdown and "torch" in markdown


def shown_mean(plan: Plan, name: str) -> str:
    trials = plan.reported(plan.study.arm(name))
    assert trials is not None
    values = [result["validation"] for trial in trials if (result := plan.result(trial)) is not None]
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
    assert done.stdout.count("<svg") == 7 and "difference to SGDM" in done.stdout
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
        (["run", "images", "--preset", "quick", "--data", "X", "--out", "X"], "data_batch_1.bin is missing"),
        (
            ["run", "images", "--preset", "smoke", "--out", "X", "--device", "tpu"],
            "--device tpu: must be cpu or cuda",
        ),
        (
            ["run", "images", "--preset", "smoke", "--out", "X", "--device", "cuda:9"],
            "--device cuda:9: must be",
        ),
        (
            ["run", "images", "--preset", "smoke", "--out", "X", "--engine", "dask"],
            "must be one of local, ray",
        ),
        (["run", "images", "--preset", "smoke", "--out", "/proc/x"], "/proc/x cannot be written"),
        (
            ["run", "images", "--preset", "smoke", "--arm", "TAN", "--out", "X"],
            'no arm "TAN"; it has "SGDM", "TAM"',
        ),
        (["run", "imagenet", "--preset", "paper", "--data", "X", "--out", "X"], "imagenet/train is missing"),
        (
            ["run", "runtime", "--preset", "smoke", "--controls", "--out", "X"],
            "runtime has no controls of TAM",
        ),
        (
            ["run", "graph", "--preset", "smoke", "--engine", "ray", "--device", "cuda:9", "--out", "X"],
            "--device cuda:9: must be cpu or cuda; there are",
        ),
        (["run", "graph", "--out", "X", "--encoder", "./nowhere"], "--encoder ./nowhere: no such folder"),
        (["mteb", "X", "--device", "cuda:9"], "--device cuda:9: must be cpu or cuda; there are"),
        (["mteb", "X", "--data", "nowhere"], "--data nowhere: no such folder"),
        (["mteb", "X", "--tasks", "BIOSSES, Nonsense"], "task 'Nonsense': MTEB has none of that name"),
        (["status", "X"], "has no runs.json: nothing was run there"),
        (["report", "X", "-o", "X.html"], "has no runs.json: nothing was run there"),
        (["data", "check", "cifar10", "--data", "X"], "data_batch_1.bin is missing"),
        (["data", "get", "mnist", "--data", "X"], "data set 'mnist': must be one of cifar10"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path) -> None:
    paths = [str(tmp_path / a) if a.startswith("X") else a for a in arguments]
    code, output = tam_lab(*paths)
    assert code != 0
    assert message in output or message in str(CliRunner().invoke(build(), ["lab", *paths]).exception)
    assert not (tmp_path / "X").exists()  # nothing is noted as run that could not be


def test_a_damaged_list_of_runs(tmp_path: Path) -> None:
    for content in ("[", '[{"experiment": "images"}]', '[{"nonsense": 1}]', "{}x"):
        (tmp_path / "runs.json").write_text(content)
        assert f"{tmp_path}/runs.json is damaged" in complaint("status", tmp_path)
    (tmp_path / "runs.json").write_text('[{"experiment": "gone", "preset": "paper"}]')
    assert "no experiment 'gone'" in complaint("report", tmp_path, "-o", tmp_path / "report.md")


def complaint(*args: str | Path) -> str:
    done = CliRunner().invoke(build(), ["lab", *map(str, args)])
    assert done.exit_code != 0
    return done.output + str(done.exception)


def test_parts_of_a_study_that_were_run_one_by_one_are_one_in_the_report(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "lab")
    runs = [
        Selection("images", "smoke", arms=("TAM",), seeds=1),
        Selection("images", "smoke", arms=("TAM, d its mean",)),
    ]
    (tmp_path / "lab" / "runs.json").unlink()
    for selection in runs:
        remember(selection, tmp_path / "lab")
    (part,) = shown(tmp_path / "lab")
    # What was not asked for is there, too: nobody is said to be better for what was left out.
    (whole,) = shown(folder)
    assert compare(part) == compare(whole) and part.planned == whole.planned


def test_parts_that_were_asked_for_again_are_told_once(tmp_path: Path) -> None:
    """And studies are in a preset's order, whichever was run first."""
    for studies, arms in (
        (("copies-tail",), ()),
        (("tam0.2",), ("SGDM",)),
        ((), ()),
        (("tam0.2",), ("TAM",)),
    ):
        remember(Selection("warmup", "smoke", studies, arms), tmp_path)
    lines = [line for line in tam_lab("status", tmp_path)[1].splitlines() if line.startswith("warmup")]
    assert [line.split(":")[0] for line in lines] == ["warmup smoke copies-tail", "warmup smoke tam0.2"]
    (group,) = shown(tmp_path)
    assert [plan.study.name for plan in group.plans] == ["tam0.2", "copies-tail"]


def test_torchrun_is_for_experiments_whose_trials_run_on_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    arguments = ("--preset", "smoke", "--out", tmp_path / "X")
    assert "each trial of images has one process" in complaint("run", "images", *arguments)
    assert "--engine ray: start it without torchrun" in complaint(
        "run", "imagenet", "--engine", "ray", *arguments
    )
    assert not (tmp_path / "X").exists()


@contextmanager
def started(arguments: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A process, and the lines of its stderr. However this ends, it is gone then, and after minutes."""
    environment = {**os.environ, "PYTHONPATH": str(Path(tam.__file__).parents[1])}
    # A job in the background, as CI may be, starts with SIGINT ignored.
    code = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    command = [sys.executable, "-c", code + "from tam.cli import main\nmain()", "lab", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        timer = threading.Timer(300, process.kill)
        timer.start()
        try:
            yield process, iter(process.stderr)
        finally:
            timer.cancel()
            process.kill()


def test_a_second_run_waits_for_the_first(tmp_path: Path) -> None:
    """It does not run the trials the first works on, and goes on when they are done."""
    arguments = ["run", "toy", "--preset", "smoke", "--out", str(tmp_path), "--device", "cpu"]
    (plan,) = plans(Selection("toy", "smoke"), tmp_path)
    found = [TrialFolder(tmp_path, trial) for _, trial in plan.to_run()]
    folders = list({folder.key: folder for folder in found}.values())
    with ExitStack() as held:
        for folder in folders:
            held.enter_context(folder.at_work())
        with started(arguments) as (process, lines):
            waits = f"another run works on the {len(folders)} trials that are left"
            assert any(waits in line for line in lines)
            held.close()
            rest = "".join(lines)
            assert process.wait() == 0, rest
    assert all(folder.result for folder in folders)


def test_the_time_between_checkpoints_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[Place] = []
    monkeypatch.setattr(runner, "run", lambda selection, place, *rest: places.append(place))
    arguments = ("run", "images", "--preset", "smoke", "--out", tmp_path, "--device", "cpu")
    for more in ((), ("--save-every", "7.5")):
        assert tam_lab(*arguments, *more)[0] == 0
    assert [place.save_every for place in places] == [60, 7.5]


def test_data_check_of_embedded_data(tmp_path: Path) -> None:
    code, output = tam_lab("data", "check", "digits", "--data", tmp_path)
    assert code == 0 and "all of it is there" in output


@pytest.mark.parametrize(
    ("how", "engine"), [(signal.SIGINT, "local"), (signal.SIGTERM, "local"), (signal.SIGTERM, "ray")]
)
def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(how: signal.Signals, engine: str, tmp_path: Path) -> None:
    if engine == "ray":
        pytest.importorskip("ray")
    arguments = ["run", "images", "--preset", "smoke", "--out", str(tmp_path), "--device", "cpu"]
    (plan,) = plans(Selection("images", "smoke"), tmp_path)
    with (
        # Of a trial that is at work elsewhere: the run cannot be over before the signal reaches it.
        TrialFolder(tmp_path, plan.to_run()[0][1]).at_work(),
        started([*arguments, "--engine", engine]) as (process, lines),
    ):
        begins = ": start" if engine == "local" else "to run"  # Ray's tasks tell of epochs alone
        assert any(begins in line for line in lines)
        process.send_signal(how)
        rest = "".join(lines)
        assert process.wait() == 1 and "stopped; the same command goes on from the last checkpoints" in rest
    assert "Traceback" not in rest
    assert tam_lab(*arguments)[0] == 0  # and it does
