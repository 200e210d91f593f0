"""timm makes the optimizers by name, and its wrappers, schedules and checkpoints work with them."""

from __future__ import annotations

import doctest
import importlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tam
from tests.helpers import assert_same, params_of, train

NAMES = {"tam": tam.TAM, "adatam": tam.AdaTAM, "adatamw": tam.AdaTAMW}


@pytest.fixture
def timm() -> Any:
    """timm, with the optimizers registered."""
    found = pytest.importorskip("timm")
    for part in ("tam.integrations.timm", "timm.scheduler", "timm.utils"):
        importlib.import_module(part)
    return found


def vit(timm: Any) -> nn.Module:
    """A small ViT: a model of timm that says which of its layers are how deep."""
    torch.manual_seed(0)
    return timm.create_model(  # type: ignore[no-any-return]
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=8,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=4,
    )


@pytest.mark.parametrize("name, cls", NAMES.items())
def test_a_name_alone_gives_the_defaults_of_the_class(timm: Any, name: str, cls: Any) -> None:
    """Without weight decay: timm's default is 0."""
    made = timm.optim.create_optimizer_v2(vit(timm), name)
    assert_same(train(made, 2), train(cls(vit(timm).parameters(), weight_decay=0.0), 2))
    assert timm.optim.get_optimizer_class(name, bind_defaults=False) is cls
    assert name in timm.optim.list_optimizers()


@pytest.mark.parametrize("name, cls", NAMES.items())
def test_weight_decay_leaves_out_biases_and_norms(timm: Any, name: str, cls: Any) -> None:
    made = timm.optim.create_optimizer_v2(vit(timm), name, lr=0.02, weight_decay=0.1, scope="tensor")
    assert type(made) is cls
    model = vit(timm)
    no_decay = model.no_weight_decay()
    plain = [p for n, p in model.named_parameters() if p.ndim <= 1 or n in no_decay]
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and n not in no_decay]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    assert_same(train(made, 3), train(cls(groups, lr=0.02, scope="tensor"), 3))


def test_options_of_timms_scripts_that_a_class_does_not_have_are_dropped(timm: Any) -> None:
    model, given = vit(timm), {"lr": 0.1, "momentum": 0.8, "eps": 1e-6, "betas": (0.8, 0.99)}
    group = timm.optim.create_optimizer_v2(model, "tam", **given).param_groups[0]
    assert group["momentum"] == 0.8 and not {"eps", "betas"} & set(group)
    group = timm.optim.create_optimizer_v2(model, "adatamw", **given).param_groups[0]
    assert group["eps"] == 1e-6 and group["betas"] == (0.8, 0.99) and "momentum" not in group


@pytest.mark.parametrize("name, cls", NAMES.items())
def test_layer_decay_under_a_schedule(timm: Any, name: str, cls: Any) -> None:
    made = timm.optim.create_optimizer_v2(vit(timm), name, lr=0.02, weight_decay=0.1, layer_decay=0.5)
    scales = [group["lr_scale"] for group in made.param_groups]
    assert min(scales) < 0.5 < max(scales) == 1
    groups = [
        {"params": [nn.Parameter(p.detach().clone()) for p in g["params"]], "weight_decay": g["weight_decay"]}
        for g in made.param_groups
    ]
    by_hand = cls(groups)
    schedule = timm.scheduler.CosineLRScheduler(made, t_initial=4, lr_min=0.002)
    for epoch in range(4):
        schedule.step(epoch)
        lr = 0.002 + (0.02 - 0.002) * (1 + math.cos(math.pi * epoch / 4)) / 2
        for group, scale in zip(by_hand.param_groups, scales, strict=True):
            group["lr"] = lr * scale
        train(made, 1, start=epoch)
        train(by_hand, 1, start=epoch)
    assert_same(made, by_hand)


@pytest.mark.parametrize("name, cls", NAMES.items())
def test_lookahead(timm: Any, name: str, cls: Any) -> None:
    made = timm.optim.create_optimizer_v2(vit(timm).parameters(), f"lookahead_{name}", lr=0.02)
    by_hand = cls(vit(timm).parameters(), lr=0.02, weight_decay=0.0)  # 0 is timm's default
    train(made, 12)
    train(by_hand, 6)
    slow = [p.detach().clone() for p in params_of(by_hand)]
    train(by_hand, 6, start=6)
    for p, q, start in zip(params_of(made), params_of(by_hand), slow, strict=True):
        torch.testing.assert_close(p.detach(), torch.lerp(start, q.detach(), 0.5))


class Job:
    """A training as timm's script does it: a schedule, an average of the weights, a checkpoint per epoch."""

    def __init__(self, timm: Any, name: str) -> None:
        self.timm, self.model = timm, vit(timm)
        self.optimizer = timm.optim.create_optimizer_v2(self.model, name, lr=0.02, layer_decay=0.7)
        self.schedule, _ = timm.scheduler.create_scheduler_v2(self.optimizer, "cosine", 4, warmup_epochs=1)
        self.ema = timm.utils.ModelEmaV2(self.model, decay=0.9)

    def epochs(self, first: int, last: int) -> None:
        for epoch in range(first, last):
            self.schedule.step(epoch)
            for step in range(4):
                generator = torch.Generator().manual_seed(4 * epoch + step)
                images = torch.randn(8, 3, 16, 16, generator=generator)
                self.optimizer.zero_grad()
                loss = nn.functional.cross_entropy(self.model(images), torch.arange(8) % 4)
                loss.backward()
                self.optimizer.step()
                self.ema.update(self.model)


@pytest.mark.parametrize("name", [*NAMES, "lookahead_tam"])
def test_a_resumed_training_is_the_whole_one(timm: Any, name: str, tmp_path: Path) -> None:
    whole, half, resumed = (Job(timm, name) for _ in range(3))
    whole.epochs(0, 4)
    half.epochs(0, 2)
    saver = timm.utils.CheckpointSaver(
        half.model, half.optimizer, model_ema=half.ema, checkpoint_dir=str(tmp_path)
    )
    saver.save_checkpoint(epoch=1)
    saved = str(tmp_path / "last.pth.tar")
    epoch = timm.models.resume_checkpoint(resumed.model, saved, resumed.optimizer)
    timm.models.load_checkpoint(resumed.ema.module, saved, use_ema=True)
    resumed.epochs(epoch, 4)
    assert_same(*(getattr(job.optimizer, "_base_optimizer", job.optimizer) for job in (whole, resumed)))
    for a, b in zip(whole.ema.module.parameters(), resumed.ema.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_example_of_the_docstring_runs(timm: Any) -> None:
    results = doctest.testmod(sys.modules["tam.integrations.timm"])
    assert results.attempted > 0 and results.failed == 0


def test_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.split(".")[0] == "timm" or name == "tam.integrations.timm":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match=r"needs timm.*'\.\[timm\]'"):
        importlib.import_module("tam.integrations.timm")
