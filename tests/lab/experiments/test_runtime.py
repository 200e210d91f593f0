"""Timing a step next to AdamW's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tam.lab.core.results import load_results
from tam.lab.core.runner import run
from tam.lab.core.selection import Selection
from tam.lab.core.store import TrialFolder
from tam.lab.experiments.runtime import trial as runtime
from tests.lab.engines.test_engines import RunLocation

pytest.importorskip("transformers")


def test_both_train_the_same_network_in_turns() -> None:
    model = runtime.make_model("tiny-bert", torch.device("cpu"))
    taken: list[str] = []

    class Counted(torch.optim.SGD):
        def __init__(self, name: str) -> None:
            super().__init__(model.parameters(), lr=0.0)
            self.name = name

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            assert all(p.grad is not None for p in model.parameters())
            taken.append(self.name)

    both = {"a": Counted("a"), "b": Counted("b")}
    tokens = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(0))
    found = list(runtime.time_rounds(model, tokens, both, count=2, steps=3))
    assert "".join(taken) == "a" * 4 + "b" * 4 + ("aaa" + "bbb") * 2
    assert [sorted(one) for one in found] == [["a", "b"]] * 2 and min(min(one.values()) for one in found) > 0


def test_a_trial_gives_ratio_and_speed(tmp_path: Path) -> None:
    given = {"model": "tiny-bert", "lr": 1e-5, "seed": 0, "epochs": 3, "batch": 2, "length": 16, "steps": 2}
    one = runtime.Config(**given, optimizer="adatamw", options={"weight_decay": 0.0})
    folder = TrialFolder(tmp_path, one)
    with folder.at_work():
        assert len(list(runtime.run(one, folder, tmp_path, torch.device("cpu")))) == 3
    result = folder.read_result()
    assert result is not None
    ratios = sorted(row["own"] / row["beside"] for row in folder.metrics())
    assert result["ratio"] == pytest.approx(ratios[1])
    assert result["tokens_per_second"] == pytest.approx(32 / result["step_ms"] * 1e3)
    with pytest.raises(ValueError, match="must be one of BERT-large"):
        runtime.Config(**{**given, "model": "GPT"}, optimizer="adamw")


def test_trials_run_alone(tmp_path: Path) -> None:
    run(Selection("runtime", "smoke"), RunLocation(tmp_path, tmp_path, trials_per_process=4), 2, print)
    found = [record.result for record in load_results(tmp_path)]
    assert len(found) == 4 and all(one["timing"]["together"] == 1 for one in found)
