"""What a folder remembers of its runs: above all, how many tuning seeds they had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tam.lab.core import presets
from tam.lab.core.errors import LabError
from tam.lab.core.registry import experiment_names, get_experiment
from tam.lab.core.results import Results, load_existing_results
from tam.lab.core.selection import Selection, load_groups, remember_selection, select_plans, selections_of
from tam.lab.core.study import Ladder

RESULTS = Path(__file__).parents[3] / "results"
OLD: dict[str, Any] = {"experiment": "graph", "preset": "paper", "studies": ["sw50"], "arms": []}


def write_runs(folder: Path, *stored: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "runs.json").write_text(json.dumps(stored))


def tuning_seeds(folder: Path) -> list[tuple[int, ...]]:
    return [plan.study.tuning_seeds for group in load_groups(folder) for plan in group.plans]


def test_every_grid_has_three_tuning_seeds() -> None:
    """A registered study may state others, and more of them, apart from the seeds it compares with."""
    assert presets.TUNING_SEEDS == (100, 101, 102)
    for experiment in map(get_experiment, experiment_names()):
        for name, studies in experiment.presets.items():
            for study in studies:
                is_tuned = any(len(variant.lrs) > 1 for variant in study.variants)
                if not is_tuned or study.small or isinstance(study, Ladder):
                    continue
                seeds = set(study.tuning_seeds)
                assert len(seeds) >= 3 and seeds.isdisjoint(study.seeds)
                assert name == "registered" or study.tuning_seeds[:3] == presets.TUNING_SEEDS


@pytest.mark.parametrize(
    "experiment, preset, former",
    [("graph", "paper", 1), ("graph", "fair", 2), ("online", "paper", 2), ("online", "tasks40", 1),
     ("images", "paper", 1), ("images", "smoke", 1), ("toy", "fair", 10), ("llm", "encoder", 1)],
)  # fmt: skip
def test_a_stored_selection_without_the_number_had_fewer(
    experiment: str, preset: str, former: int, tmp_path: Path
) -> None:
    write_runs(tmp_path, {"experiment": experiment, "preset": preset})
    assert {len(seeds) for seeds in tuning_seeds(tmp_path)} == {former}
    (selection,) = selections_of(load_existing_results(tmp_path))
    plans = select_plans(selection, Results())
    assert {plan.study.tuning_seeds for plan in plans} == {tuple(range(100, 100 + former))}


def test_a_new_run_stores_the_number(tmp_path: Path) -> None:
    remember_selection(Selection("graph", "paper", studies=("sw50",)), tmp_path)
    (stored,) = json.loads((tmp_path / "runs.json").read_text())
    assert stored["tuning_seeds"] == 3 and tuning_seeds(tmp_path) == [(100, 101, 102)]
    remember_selection(Selection("graph", "registered"), tmp_path)  # has no grid
    assert "tuning_seeds" not in json.loads((tmp_path / "runs.json").read_text())[1]


@pytest.mark.parametrize("is_old_first", [True, False])
def test_the_selection_with_more_tuning_seeds_wins(is_old_first: bool, tmp_path: Path) -> None:
    """A study that the new run did not have keeps its number; controls of either run are there."""
    old = {**OLD, "studies": ["sw50", "sw10"], "controls": True}
    new = {**OLD, "tuning_seeds": 3, "controls": False}
    write_runs(tmp_path, *((old, new) if is_old_first else (new, old)))
    (group,) = load_groups(tmp_path)
    seeds = {plan.study.name: plan.study.tuning_seeds for plan in group.plans}
    assert seeds == {"sw10": (100,), "sw50": (100, 101, 102)}
    names = {variant.name for plan in group.plans for variant in plan.study.variants}
    assert "TAM warm-up, the paper's lr, shuffled damping" in names


def test_an_old_selection_stays_without_the_number_when_a_run_is_added(tmp_path: Path) -> None:
    write_runs(tmp_path, OLD)
    remember_selection(Selection("graph", "paper", studies=("sw50",)), tmp_path)
    old, new = json.loads((tmp_path / "runs.json").read_text())
    assert "tuning_seeds" not in old and new["tuning_seeds"] == 3
    remember_selection(Selection("graph", "paper", studies=("sw50",)), tmp_path)
    assert len(json.loads((tmp_path / "runs.json").read_text())) == 2


@pytest.mark.parametrize("number", [-1, "3", 2.5, None])
def test_a_number_that_is_none_is_refused(number: Any, tmp_path: Path) -> None:
    write_runs(tmp_path, {**OLD, "tuning_seeds": number})
    with pytest.raises(LabError, match=r"runs.json is damaged: 'tuning_seeds'"):
        load_groups(tmp_path)


def test_stored_results_keep_their_learning_rates() -> None:
    """Those of the published reports, which one tuning seed (fair: two) selected."""
    found = {}
    for group in load_groups(RESULTS / "graph"):
        for plan in group.plans:
            for outcome in plan.outcomes():
                if len(outcome.variant.lrs) > 1:
                    found[plan.preset, plan.study.name, outcome.variant.name] = outcome.lr
    assert all(found.values())
    text = (RESULTS / "graph" / "report.md").read_text()
    for (preset, study, variant), lr in found.items():
        rows = [line.split("|") for line in text.splitlines() if line.startswith(f"| {variant} |")]
        assert any(row[2].split()[0] == f"{lr:.3g}" for row in rows), (preset, study, variant, lr)
