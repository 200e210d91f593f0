"""The lab's trials on a GPU: several at once, as CUDA graphs, against the same on the CPU."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tam.lab import images
from tam.lab.engines.work import Event, Job, Place, work
from tam.lab.store import TrialFolder

CUDA = torch.device("cuda")


def config(**more: Any) -> dict[str, Any]:
    given = {
        "data": "digits", "model": "tiny", "optimizer": "tam", "lr": 0.1, "seed": 0, "epochs": 4, "batch": 64,
        "held_out": 300, "test": True,
    }  # fmt: skip
    return images.config_of(**{**given, **more})


def run(root: Path, device: str, configs: list[dict[str, Any]]) -> list[TrialFolder]:
    """All of them side by side."""
    waiting: list[Job | None] = [*(Job("images", one) for one in configs), None]
    events: list[Event] = []
    work(Place(root, root, device, together=8), lambda _: waiting.pop(0), events.append)
    assert [event.detail for event in events if event.kind == "failed"] == []
    return [TrialFolder(root, one) for one in configs]


def test_trials_side_by_side_learn_what_they_learn_on_a_cpu(tmp_path: Path) -> None:
    arms = [
        ("sgd", 0.5),
        ("sgdm", 0.05),
        ("tam", 0.1),
        ("adam", 1e-3),
        ("adatam", 2e-4),
        ("angulargrad", 1e-3),
    ]
    configs = [config(optimizer=name, lr=lr) for name, lr in arms]
    found, expected = run(tmp_path / "gpu", "cuda", configs), run(tmp_path / "cpu", "cpu", configs)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.result is not None and theirs.result is not None
        first, last = ours.metrics()[0], ours.metrics()[-1]
        # bfloat16 and float32: the same draws and weights, so that the first epoch hardly differs.
        assert first["loss"] == pytest.approx(theirs.metrics()[0]["loss"], rel=0.02)
        assert first["grad_norm"] == pytest.approx(theirs.metrics()[0]["grad_norm"], rel=0.05)
        assert last["loss"] == pytest.approx(theirs.metrics()[-1]["loss"], rel=0.1)
        assert [row["lr"] for row in ours.metrics()] == [row["lr"] for row in theirs.metrics()]
        assert ours.result["test"] == pytest.approx(theirs.result["test"], abs=5)


def test_given_d_reaches_every_replay_of_the_graph(tmp_path: Path) -> None:
    (source,) = run(tmp_path, "cuda", [config()])
    s = torch.load(source.path / "alignment.pt", weights_only=True)
    assert len(s.unique()) > len(s) // 2
    for how in ("same", "mean", "shuffled"):
        (folder,) = run(tmp_path, "cuda", [config(damping=how, damping_of=source.key)])
        used = torch.load(folder.path / "alignment.pt", weights_only=True)
        if how == "same":
            assert torch.equal(used, s)
            assert folder.metrics()[0]["loss"] == pytest.approx(source.metrics()[0]["loss"], rel=0.01)
        elif how == "mean":
            torch.testing.assert_close(used, torch.full_like(s, float(s.double().mean())))
        else:
            assert torch.equal(used.sort().values, s.sort().values) and not torch.equal(used, s)


def test_a_trial_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    (whole,) = run(tmp_path / "whole", "cuda", [config()])
    folder = TrialFolder(tmp_path / "parts", config())
    steps = len(torch.load(whole.path / "alignment.pt", weights_only=True)) // 4
    with folder.at_work():
        for _ in itertools.islice(images.run(folder.config, folder, tmp_path, CUDA, 0.0), 2 * steps + 9):
            pass
    before = folder.metrics()
    (again,) = run(tmp_path / "parts", "cuda", [config()])
    assert again.metrics()[: len(before)] == before and len(again.metrics()) == 4
    assert again.metrics()[-1]["loss"] == pytest.approx(whole.metrics()[-1]["loss"], rel=0.1)
    assert len(torch.load(again.path / "alignment.pt", weights_only=True)) == 4 * steps
