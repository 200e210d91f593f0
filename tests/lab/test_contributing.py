"""The experiment in CONTRIBUTING.md runs, and needs nothing but its own folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.lab.commands.helpers import SOURCE, run_process

ROOT = Path(__file__).parents[2]
PLAN_CHECKS = """if True:
    from tam.lab.core.registry import experiment_names
    from tests.lab.core import test_plan

    assert "regression" in experiment_names()
    test_plan.test_every_file_of_experiments_is_found_and_its_configs_are_valid()
    test_plan.test_controls_can_be_had_for_every_variant_of_tam()"""
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


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
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    assert "linear: done\n" in run_process("lab", "status", out, **environment).stdout
    assert run_process("lab", "report", out, "-o", tmp_path / "report.md", **environment).returncode == 0
    report = (tmp_path / "report.md").read_text(encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)])}
    subprocess.run([sys.executable, "-c", PLAN_CHECKS], env=environment, check=True, timeout=240)
    assert "Linear regression" in report and re.search(r"\| TAM \| .* \| 3 of 3 \|", report)
