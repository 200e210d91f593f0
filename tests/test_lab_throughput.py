"""The benchmark of how many trials train per hour."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import median

import pytest

FILE = Path(__file__).parents[1] / "benchmarks" / "lab_throughput.py"
spec = importlib.util.spec_from_file_location("lab_throughput", FILE)
assert spec is not None and spec.loader is not None
lab_throughput = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lab_throughput)


@pytest.mark.parametrize(
    ("study", "epochs"),
    [("sgd_ladder/smoke/smoke", 3), ("pretrain/smoke/smoke", 4)],
    ids=["alone", "stacked"],
)
def test_trials_per_hour_follow_from_the_time_of_an_epoch(study: str, epochs: int, tmp_path: Path) -> None:
    row = lab_throughput.measure(study, 2, tmp_path, "cpu", epochs=1)
    assert row["epoch_s"] and min(row["epoch_s"]) > 0 and row["startup_s"] > 0
    assert row["trials_per_hour"] == pytest.approx(2 * 3600 / (median(row["epoch_s"]) * epochs))


@pytest.mark.parametrize(
    ("study", "count", "message"),
    [
        ("pretrain", 1, "give EXPERIMENT/PRESET/STUDY"),
        ("pretrain/smoke/none", 1, "none"),
        ("sgd_ladder/smoke/smoke", 10_000, "has only"),
    ],
)
def test_what_cannot_be_measured_is_said(study: str, count: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        lab_throughput.measure(study, count, tmp_path, "cpu", epochs=1)
