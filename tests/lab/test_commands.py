"""`tam lab`: the smoke preset from end to end, its report, and messages for mistakes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tam
from tam.cli import build
from tam.lab.experiment import Plan
from tam.lab.runner import Selection, plans, remembered


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
    assert code == 0 and "images smoke digits-tiny: no trials to run" in output
    assert "TAM, d shuffled: 2 of 2 seeds" in output
    code, output = tam_lab("list")
    assert (
        code == 0 and "images: Image classification" in output and "--preset fair: cifar10-resnet18" in output
    )


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
    assert html.count("<svg ") == html.count("</svg>") == 4  # loss, accuracy, s, gradient norm
    assert not re.search(r"https?:|src=|href=|url\(|@import", html)
    parser = Tags()
    parser.feed(html.replace("<!doctype html>", ""))
    markdown = text.read_text(encoding="utf-8")
    (plan,) = plans(Selection("images", "smoke"), folder)
    for arm in plan.study.arms:
        mean = shown_mean(plan, arm.name)
        assert f"<td>{arm.name.replace(chr(39), '&#x27;')}</td>" in html
        assert re.search(rf"\| {re.escape(arm.name)} \| .* \| 2 of 2 \| {mean}", markdown)
    assert "weight decay" in markdown and "torch" in markdown


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
    assert done.stdout.count("<svg") == 4 and "difference to SGDM" in done.stdout
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


def test_data_check_of_embedded_data(tmp_path: Path) -> None:
    code, output = tam_lab("data", "check", "digits", "--data", tmp_path)
    assert code == 0 and "all of it is there" in output


def test_ctrl_c_ends_cleanly_and_says_how_to_go_on(tmp_path: Path) -> None:
    # A job in the background, as CI may be, starts with SIGINT ignored.
    handler = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code = handler + "from tam.cli import main\nmain()"
    arguments = ["lab", "run", "images", "--preset", "smoke", "--out", str(tmp_path), "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": str(Path(tam.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "start" in line:
            process.send_signal(signal.SIGINT)
            break
    _, rest = process.communicate(timeout=60)
    assert process.returncode != 0 and "stopped; the same command goes on from the last checkpoints" in rest
    assert "Traceback" not in rest
    assert tam_lab(*arguments[1:])[0] == 0  # and it does
