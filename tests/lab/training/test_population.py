"""Trials that train together: checkpoints, catching up and progress, with networks of one number."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tam.lab.core.config import TrialConfig
from tam.lab.core.store import TrialFolder
from tam.lab.training.loop import Progress
from tam.lab.training.population import run_together

CPU = torch.device("cpu")
EPOCHS, STEPS = 5, 3


class Numbers:
    """Each member adds its lr at every step. `made` lists the seeds of all populations."""

    made: list[list[int]]

    def __init__(
        self, configs: Sequence[TrialConfig], folders: Sequence[TrialFolder], data_folder: Path,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.configs, self.x = configs, torch.zeros(len(configs))
        self.made.append([config.seed for config in configs])

    def epoch(self, epoch: int) -> Generator[None, None, list[dict[str, Any]]]:
        for _ in range(STEPS):
            self.x += torch.tensor([config.lr for config in self.configs])
            yield None
        rows: list[dict[str, Any]] = [{"epoch": epoch + 1, "x": x} for x in self.x.tolist()]
        rows[0]["only"] = 1.0
        return rows

    def member_state(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index].clone()}

    def load_member_state(self, index: int, state: dict[str, Any]) -> None:
        self.x[index] = state["x"]

    def finish(self, index: int, folder: TrialFolder) -> dict[str, Any]:
        return {"x": float(self.x[index]), "diverged": False, "epochs": EPOCHS}


CONFIGS = [TrialConfig(optimizer="tam", lr=0.5 * seed, seed=seed, epochs=EPOCHS) for seed in (1, 2, 3)]


def train(
    root: Path, configs: Sequence[TrialConfig], count: int | None = None, save_every: float = -1.0
) -> tuple[list[TrialFolder], list[Progress]]:
    """Train until so many values were yielded. Each epoch yields one more than it has steps."""
    Numbers.made = []
    folders = [TrialFolder(root, config) for config in configs]
    for folder in folders:
        folder.path.mkdir(parents=True, exist_ok=True)
    events = list(itertools.islice(run_together(Numbers, configs, folders, root, CPU, save_every), count))
    return folders, [event for event in events if event is not None]


def check_finished(folders: Sequence[TrialFolder]) -> None:
    for folder in folders:
        result, lr = folder.read_result(), float(folder.config["lr"])
        assert result is not None and result["x"] == pytest.approx(EPOCHS * STEPS * lr)
        expected = [STEPS * lr * epoch for epoch in range(1, EPOCHS + 1)]
        assert [row["x"] for row in folder.metrics()] == pytest.approx(expected)
        assert not list(folder.path.glob("checkpoint-*"))


def test_progress_is_the_mean_of_what_all_members_have(tmp_path: Path) -> None:
    folders, events = train(tmp_path, CONFIGS)
    check_finished(folders)
    assert [event.epoch for event in events] == [1, 2, 3, 4, 5] and events[0].epochs == EPOCHS
    assert events[1].metrics == {"epoch": 2, "x": pytest.approx(2 * STEPS * 1.0)}
    results = [folder.read_result() for folder in folders]
    assert all(result and result["timing"]["together"] == 3 for result in results)


def test_those_behind_catch_up(tmp_path: Path) -> None:
    train(tmp_path, CONFIGS[:2], 2 * (STEPS + 1) + 1)  # one step into the third epoch
    train(tmp_path, CONFIGS[1:2], STEPS + 2)
    folders, events = train(tmp_path, CONFIGS)
    assert Numbers.made == [[3], [1, 3], [1, 2, 3]]
    assert [event.epoch for event in events] == [1, 2, 3, 4, 5]
    check_finished(folders)


def test_checkpoints_are_some_seconds_apart_and_hold_the_time(tmp_path: Path) -> None:
    (folder,), _ = train(tmp_path, CONFIGS[:1], 2 * (STEPS + 1) + 1, save_every=3600.0)
    assert not list(folder.path.glob("checkpoint-*"))
    (folder,), _ = train(tmp_path, CONFIGS[:1], 2 * (STEPS + 1) + 1)
    epoch, state = folder.load(CPU) or (0, {})
    assert epoch == 2 and state.keys() == {"x", "seconds"}
    folder.save(3, {**state, "seconds": 1000.0})  # as if it had taken so long
    (folder,), _ = train(tmp_path, CONFIGS[:1])
    result = folder.read_result()
    assert result is not None and 1000 < result["timing"]["seconds"] < 1060


def test_finished_members_are_left_alone(tmp_path: Path) -> None:
    folders, events = train(tmp_path, [], 0)
    assert folders == [] == events
