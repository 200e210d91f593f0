"""What the commands say of a ladder."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tam.lab.commands.list import describe
from tam.lab.commands.results import show_status
from tam.lab.commands.run import describe_run
from tam.lab.core.registry import get_experiment
from tam.lab.core.results import load_results
from tam.lab.core.selection import Selection, remember_selection, select_plans
from tam.lab.core.store import TrialFolder
from tam.lab.core.study import Ladder, Variant, rungs
from tam.lab.engines.events import RunLocation

SELECTION = Selection("toy", "smoke")


@pytest.fixture(autouse=True)
def ladder(monkeypatch: pytest.MonkeyPatch) -> Ladder:
    """The preset smoke of `toy` is one ladder."""
    experiment = get_experiment("toy")
    variants = (
        Variant("SGDM", "sgdm", rungs(0.05, 5)),
        Variant("TAM", "tam", rungs(0.1, 5)),
        Variant("TAM, shuffled damping", "tam", control_of="TAM", damping="shuffled"),
    )
    study = Ladder(
        name="rungs", title="A ladder", workload=experiment.presets["smoke"][0].workload, variants=variants,
        baseline="SGDM", seeds=(0, 1, 2, 3), outcome="final", cap=10.0,
    )  # fmt: skip
    changed = replace(experiment, presets={"smoke": (study,)})
    for module in ("core.selection", "core.runner"):
        monkeypatch.setattr(f"tam.lab.{module}.get_experiment", lambda _: changed)
    return study


def finish(root: Path, diverges: Any) -> None:
    (plan,) = select_plans(SELECTION, load_results(root))
    for _, trial in plan.to_run():
        folder, loss = TrialFolder(root, trial), math.nan if diverges(trial) else 1.0
        with folder.at_work():
            folder.finish({"diverged": math.isnan(loss), "final": loss}, 1.0, torch.device("cpu"))


def test_list_names_rungs_and_seeds() -> None:
    (plan,) = select_plans(SELECTION, load_results(Path("nowhere")))
    (study,) = describe(plan.experiment)["presets"]["smoke"]
    assert study["trials"] == 60 and study["ladder"] == "a ladder: 5 rungs x 4 seeds per variant"


def test_a_dry_run_has_one_line_per_variant(tmp_path: Path) -> None:
    plans = select_plans(SELECTION, load_results(tmp_path))
    lines = describe_run(plans, RunLocation(tmp_path, tmp_path), 1)
    assert lines[:3] == [
        "rungs: 40 trials now, about 20 in 1 later stage (a ladder: 5 rungs x 4 seeds per variant)",
        "  SGDM: 5 rungs, lr 0.05 to 0.2, seeds 0, 1, 2, 3 (20 trials)",
        "  TAM: 5 rungs, lr 0.1 to 0.4, seeds 0, 1, 2, 3 (20 trials)",
    ]


def test_status_counts_trials_and_says_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    remember_selection(SELECTION, tmp_path)
    for _ in range(2):
        finish(tmp_path, lambda trial: trial.optimizer == "tam" and trial.lr == 0.4 and trial.seed == 2)
    show_status(tmp_path)
    why = "1 trial cannot run: the source of the damping diverged or was not run"
    assert capsys.readouterr().out.splitlines() == [
        f"toy smoke rungs: done; {why}",
        "  SGDM: 20 of 20 trials (5 rungs)",
        "  TAM: 20 of 20 trials (5 rungs)",
        f"  TAM, shuffled damping: 19 of 20 trials (5 rungs); {why}",
    ]


def test_status_names_the_rungs_above_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remember_selection(SELECTION, tmp_path)
    (plan,) = select_plans(SELECTION, load_results(tmp_path))
    low = {trial.key for _, trial in plan.to_run() if trial.lr < 0.15}
    for _, trial in plan.to_run():
        if trial.key in low:
            folder = TrialFolder(tmp_path, trial)
            with folder.at_work():
                folder.finish({"diverged": True, "final": math.nan}, 1.0, torch.device("cpu"))
    show_status(tmp_path, as_json=True)
    (study,) = json.loads(capsys.readouterr().out)
    sgdm, tam, control = study["variants"]
    assert study["to_run"] == 0 and (sgdm["finished"], sgdm["planned"]) == (16, 16)
    assert sgdm["note"] == "left out: lr 0.2, above two rungs where every seed failed"
    assert tam["note"].startswith("left out: lr 0.2, 0.283, 0.4") and control["blocked"] == 20
