"""The step cycle that trials share: a control's s is used, every step is recorded, checkpoints hold it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import tam
from tam.lab.core.alignment import read_alignment
from tam.lab.core.errors import LabError
from tam.lab.core.store import ALIGNMENT_FILE, TrialFolder
from tam.lab.experiments.images import trial as images
from tam.lab.training.loop import StepRecorder
from tests.lab.experiments.test_images import config

CPU = torch.device("cpu")


def make_params(count: int = 2) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, generator=generator)) for _ in range(count)]


def take_steps(recorder: StepRecorder, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Take steps on a quadratic. Return the alignment that the optimizer shows after each of them."""
    shown = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum((p.square().sum() for group in optimizer.param_groups for p in group["params"]), start=0.0)
        assert isinstance(loss, torch.Tensor)
        loss.backward()  # type: ignore[no-untyped-call]
        recorder.step(optimizer, *([loss] if recorder.values.shape[1] == 2 else []))
        shown.append(float(optimizer.alignment.mean()) if isinstance(optimizer, tam.TAM) else math.nan)
    return shown


@pytest.mark.parametrize("scope", ["global", "tensor"])
def test_every_step_is_recorded(scope: Any) -> None:
    recorder = StepRecorder(5, CPU, measurements=1)
    shown = take_steps(recorder, tam.TAM(make_params(), lr=0.1, scope=scope), 3)
    assert recorder.alignment[:3].tolist() == pytest.approx(shown) and recorder.alignment[3:].isnan().all()
    losses = recorder.values[:3, 0].tolist()
    assert losses == sorted(losses, reverse=True) and int(recorder.steps_taken) == 3


def test_a_control_uses_the_alignment_of_its_source() -> None:
    source = torch.tensor([0.5, -0.25, 0.75])
    optimizer = tam.TAM(make_params(), lr=0.1, smoothing=1.0)
    shown = take_steps(StepRecorder(3, CPU, source), optimizer, 3)
    assert shown == source.tolist()
    with pytest.raises(LabError, match="the trial 0123 whose damping this control uses has 3 steps, not 4"):
        StepRecorder(4, CPU, source, source_name="0123")


def test_a_checkpoint_holds_the_steps_so_far() -> None:
    params = make_params()
    optimizer, source = tam.TAM(params, lr=0.1, smoothing=1.0), torch.linspace(-0.5, 0.5, 4)
    first, second = (StepRecorder(4, CPU, source, measurements=1) for _ in range(2))
    take_steps(first, optimizer, 2)
    second.load_state_dict(first.state_dict())
    take_steps(second, optimizer, 2)
    assert torch.equal(second.alignment, source) and torch.equal(second.values[:2], first.values[:2])


def test_a_warm_up_has_an_alignment_until_its_switch(tmp_path: Path) -> None:
    recorder = StepRecorder(5, CPU, aligned_steps=2)
    optimizer = tam.Warmup(tam.TAM(make_params(), lr=0.1), torch.optim.SGD, 2)
    take_steps(recorder, optimizer, 5)
    assert recorder.alignment.isnan().tolist() == [False, False, True, True, True]
    folder = TrialFolder(tmp_path, config())
    with folder.at_work():
        recorder.write_alignment(folder)
    assert torch.equal(read_alignment(folder.path / ALIGNMENT_FILE), recorder.alignment[:2])


def test_an_optimizer_without_alignment_leaves_no_file(tmp_path: Path) -> None:
    recorder = StepRecorder(2, CPU)
    take_steps(recorder, torch.optim.SGD(make_params(), lr=0.1), 2)
    folder = TrialFolder(tmp_path, config())
    with folder.at_work():
        recorder.write_alignment(folder)
    assert recorder.alignment.isnan().all() and not (folder.path / ALIGNMENT_FILE).exists()


def test_a_checkpoint_of_an_older_version_is_named(tmp_path: Path) -> None:
    folder = TrialFolder(tmp_path, config())
    with folder.at_work():
        folder.save(1, {"learner": {"network": {}}, "seconds": 1.0})
        with pytest.raises(LabError, match=f"{folder.key} is of an older version: remove the folder"):
            list(images.run(config(), folder, tmp_path, CPU))
