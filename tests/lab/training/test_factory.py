"""What `--checkpoint` gives, and optimizers that can be captured."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import tam
from tam.lab.core.errors import LabError
from tam.lab.training.factory import CHECKPOINT_OPTION, make_optimizer
from tests.lab.experiments.test_images import config


def test_a_checkpoint_is_told_by_its_content(tmp_path: Path) -> None:
    resolve, path = CHECKPOINT_OPTION.resolve, tmp_path / "net.pt"
    path.write_bytes(b"one")
    first = resolve(str(path), tmp_path, tmp_path)["checkpoint"]
    path.write_bytes(b"other")
    second = resolve(str(path), tmp_path, tmp_path)["checkpoint"]
    assert first.startswith(f"{path}#") and first != second
    assert resolve("timm:vit", tmp_path, tmp_path) == {"checkpoint": "timm:vit"}
    with pytest.raises(LabError, match=r"the checkpoint .*gone.pt cannot be read: No such file"):
        resolve(str(tmp_path / "gone.pt"), tmp_path, tmp_path)


def test_options_of_a_captured_step_and_of_a_control() -> None:
    params = [torch.nn.Parameter(torch.ones(2))]
    captured = make_optimizer(config(optimizer="adam", lr=1e-3), params, 1e-3, captured=True)
    assert captured.param_groups[0]["capturable"]
    control = make_optimizer(config(damping="mean", damping_of="0" * 12), params, 0.2, weight_decay=0.1)
    assert isinstance(control, tam.TAM)
    assert control.param_groups[0]["smoothing"] == 1.0 and control.param_groups[0]["weight_decay"] == 0.1


def test_a_short_average_of_the_cosine_warns_once_per_process() -> None:
    """The ablation of claim 8 has smoothing 0, in many trials."""
    params = [torch.nn.Parameter(torch.ones(2))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # Python's own for a UserWarning
        for _ in range(3):
            make_optimizer(config(optimizer="tam", options={"smoothing": 0.0}), params, 0.2)
        make_optimizer(config(damping="mean", damping_of="0" * 12), params, 0.2)
    assert ["averages the cosine" in str(warning.message) for warning in caught] == [True]
