"""The experiment in CONTRIBUTING.md runs, and needs nothing but its own folder."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.lab.commands.helpers import SOURCE, run_process

CONTRIBUTING = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_example_runs_and_is_listed_and_reported(tmp_path: Path) -> None:
    checkout, out = tmp_path / "checkout", tmp_path / "out"
    shutil.copytree(SOURCE / "tam", checkout / "tam", ignore=shutil.ignore_patterns("__pycache__"))
    (code,) = re.findall(r"```python\n(.*?)```", CONTRIBUTING, re.DOTALL)
    folder = checkout / "tam" / "lab" / "experiments" / "regression"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "studies.py").write_text(code, encoding="utf-8")
    environment = {"PYTHONPATH": str(checkout)}
    listed = run_process("lab", "list", "regression", **environment).stdout
    assert listed.startswith("regression: Linear regression\n") and "--preset smoke" in listed
    done = run_process("lab", "run", "regression", "--preset", "smoke", "--out", out, **environment)
    assert done.returncode == 0, done.stderr
    assert "linear: done\n" in run_process("lab", "status", out, **environment).stdout
    assert run_process("lab", "report", out, "-o", tmp_path / "report.md", **environment).returncode == 0
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "Linear regression" in report and re.search(r"\| TAM \| .* \| 3 of 3 \|", report)
