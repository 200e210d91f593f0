"""The command line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tam
from tam.cli import build
from tam.lab import demo
from tam.registry import OPTIMIZERS

SOURCE = Path(tam.__file__).parents[1]


def tam_command(*args: str, cwd: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """`tam` in a process of its own, after the statements of `before`."""
    code = f"import sys\n{before}\nfrom tam.cli import main\nmain()"
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-c", code, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=240
    )


def test_demo(tmp_path: Path) -> None:
    done = tam_command("demo", "--seeds", "1", "--epochs", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "tam-demo.html"
    assert os.listdir(tmp_path) == ["tam-demo.html"]
    html = (tmp_path / "tam-demo.html").read_text(encoding="utf-8")
    assert html.count("<svg ") == html.count("</svg>") == 4
    for name in demo.NAMES:
        assert f"<td>{OPTIMIZERS[name].title}</td>" in html
        assert OPTIMIZERS[name].title in done.stdout
        assert OPTIMIZERS[name].title in done.stderr  # the progress
    assert not re.search(r"https?:|src=|href=|url\(|@import", html)
    assert "noise" in html and "noise" in done.stdout
    assert "has the highest mean test accuracy over 1 seed" in html
    assert done.stdout.split()[2:5] == ["the", "highest", "mean"]  # the answer comes first


def test_page_path_is_the_last_line_however_long(tmp_path: Path) -> None:
    out = tmp_path / ("long " * 30) / "page.html"
    out.parent.mkdir()
    done = CliRunner().invoke(build(), ["demo", "--seeds", "2", "--epochs", "1", "--out", str(out)])
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == str(out)
    assert "2 seeds" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "args, message",
    [
        (["--seeds", "0"], "--seeds"),
        (["--epochs", "0"], "--epochs"),
        (["--out", "missing/page.html"], "cannot write"),
        (["--out", "."], "cannot write"),
    ],
)
def test_mistakes_end_before_training(
    args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "run", lambda *_: pytest.fail("trained"))
    done = CliRunner().invoke(build(), ["demo", *args])
    assert done.exit_code != 0
    assert message in re.sub(r"\x1b\[[0-9;]*m", "", done.output + str(done.exception))
    assert not os.listdir(tmp_path)


def test_existing_page_is_kept_until_there_is_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    monkeypatch.setattr(demo, "run", lambda *_: None)
    assert CliRunner().invoke(build(), ["demo", "--out", str(page)]).exit_code == 0
    assert page.read_text() == "old"


def test_version() -> None:
    done = CliRunner().invoke(build(), ["--version"])
    assert (done.exit_code, done.stdout) == (0, tam.__version__ + "\n")


def test_help_names_the_options() -> None:
    done = CliRunner().invoke(build(), ["demo", "--help"], env={"COLUMNS": "100"})
    assert done.exit_code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.output)
    for word in ("--seeds", "--epochs", "--out", "tam-demo.html", "stdout"):
        assert word in plain


@pytest.mark.parametrize("missing", ["typer", "sklearn"])
def test_without_the_extra_says_what_to_install(missing: str, tmp_path: Path) -> None:
    done = tam_command("demo", cwd=tmp_path, before=f"sys.modules[{missing!r}] = None")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "pip install '.[demo]'" in done.stderr
