"""A trial of the ladder of SGD against loops that are written out, its controls and its figures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from tam.lab.core.errors import LabError
from tam.lab.core.ladder_plan import LadderPlan
from tam.lab.core.registry import get_experiment
from tam.lab.core.results import Results
from tam.lab.core.store import ALIGNMENT_FILE, TrialFolder
from tam.lab.core.study import Ladder
from tam.lab.data import load
from tam.lab.experiments.images import trial as images
from tam.lab.experiments.sgd_ladder import trial as sgd_ladder
from tam.lab.models import get_model
from tam.lab.optimizers.variants import TAMVariant
from tests.lab.experiments.test_images import outcome
from tests.lab.training.test_damping_control import ReadsOfDevice

CPU = torch.device("cpu")
BETA = 0.99
RESTLESS_LR = 1.0
MOMENTUM: dict[str, Any] = {"momentum": BETA}
SOFT: dict[str, Any] = {
    "optimizer": "tam-variant", "lr": 0.1, "options": {**MOMENTUM, "smoothing": 0.99, "soft_restart": True},
}  # fmt: skip
# A short memory and a large lr, so d moves to both sides of 1/2 in a few steps.
RESTLESS: dict[str, Any] = {**SOFT, "lr": RESTLESS_LR, "options": {**SOFT["options"], "smoothing": 0.5}}


def config(**more: Any) -> sgd_ladder.Config:
    given = {
        "data": "digits", "model": "tiny-mlp", "optimizer": "sgdm", "lr": 0.05, "seed": 0, "epochs": 3,
        "batch": 64, "held_out": 300, "limit": 320, "augment": False, "options": MOMENTUM,
    }  # fmt: skip
    return sgd_ladder.Config(**{**given, **more})


def run(root: Path, steps: int | None = None, **more: Any) -> TrialFolder:
    """Run a trial, or its first steps."""
    torch.set_num_threads(1)
    trial = config(**more)
    folder = TrialFolder(root, trial)
    with folder.at_work():
        for _ in itertools.islice(sgd_ladder.run(trial, folder, root, CPU, 0.0), steps):
            pass
    return folder


def result_of(folder: TrialFolder) -> dict[str, Any]:
    result = folder.read_result()
    assert result is not None
    return result


def make_training(root: Path, **more: Any) -> sgd_ladder.Training:
    trial = config(**more)
    return sgd_ladder.Training(trial, TrialFolder(root, trial), root, CPU)


def batches(epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of seed 0, written out."""
    data = load("digits", Path())
    mean, std = (torch.tensor(v)[:, None, None] for v in (data.mean, data.std))
    order = torch.randperm(len(data.train[1]), generator=torch.Generator().manual_seed(0))[:-300][:320]
    for epoch in range(epochs):
        seen = order[torch.randperm(320, generator=torch.Generator().manual_seed(epoch))]
        for rows in seen.reshape(5, 64):
            yield (data.train[0][rows].float() / 255 - mean) / std, data.train[1][rows]


def plain_loop(clip: float, make_step: Callable[[list[Any]], Callable[[], None]]) -> list[Tensor]:
    """Return the parameters after two epochs of a loop without the lab."""
    torch.manual_seed(0)
    model = get_model("tiny-mlp").make(10)
    params = list(model.parameters())
    step = make_step(params)
    for x, y in batches(2):
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        if clip:
            clip_grad_norm_(params, clip)
        step()
    return params


def trained_params(root: Path, **more: Any) -> list[Tensor]:
    """Return the parameters of a trial after two epochs."""
    training = make_training(root, **more)
    for epoch in range(2):
        for _ in training.epoch(epoch):
            pass
    return list(training.model.parameters())


@pytest.mark.parametrize("clip", [0.1, 0.0])
def test_sgdm_is_a_plain_loop(clip: float, tmp_path: Path) -> None:
    def make_step(params: list[Any]) -> Callable[[], None]:
        return torch.optim.SGD(params, lr=0.05, momentum=BETA).step

    torch.testing.assert_close(trained_params(tmp_path, clip=clip), plain_loop(clip, make_step))


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_soft_restart_is_a_plain_loop(clip: float, tmp_path: Path) -> None:
    def make_step(params: list[Any]) -> Callable[[], None]:
        momentum, s = [torch.zeros_like(p) for p in params], [0.0]

        @torch.no_grad()
        def step() -> None:
            m, g = (torch.cat([x.flatten() for x in xs]) for xs in (momentum, [p.grad for p in params]))
            cosine = float(m @ g / (m.norm() * g.norm())) if m.any() else 0.0
            s[0] = 0.5 * s[0] + 0.5 * cosine
            d = (1 + s[0]) / 2
            dampings.append(d)
            for p, buffer in zip(params, momentum, strict=True):
                buffer.mul_(BETA * min(1.0, 2 * d)).add_(p.grad, alpha=d)
                p.sub_(buffer, alpha=RESTLESS_LR)

        return step

    dampings: list[float] = []
    expected = plain_loop(clip, make_step)
    assert min(dampings) < 0.45 and max(dampings) > 0.55
    torch.testing.assert_close(
        trained_params(tmp_path, clip=clip, **RESTLESS), expected, atol=1e-4, rtol=1e-3
    )


def test_tam_is_clipped_like_its_own_option_does(tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": "tam", "lr": 0.1, "options": {**MOMENTUM, "smoothing": 0.9}}
    inside = {**options, "options": {**options["options"], "max_grad_norm": 0.1}}
    clipped = trained_params(tmp_path, clip=0.1, **options)
    torch.testing.assert_close(clipped, trained_params(tmp_path, clip=0.0, **inside))


@pytest.mark.parametrize("variant", [{}, {"optimizer": "tam", "lr": 0.1}, SOFT])
def test_a_killed_trial_ends_with_the_same_bits(variant: dict[str, Any], tmp_path: Path) -> None:
    whole = outcome(run(tmp_path / "whole", **variant))
    for steps in (2, 8, 13):  # in the first, second and third epoch of 5 steps
        run(tmp_path / str(steps), steps, **variant)
        assert outcome(run(tmp_path / str(steps), **variant)) == whole


def test_a_killed_control_ends_with_the_same_bits(tmp_path: Path) -> None:
    source = run(tmp_path, **RESTLESS)
    control = {**RESTLESS, "damping": "mean", "damping_of": source.key}
    folder = run(tmp_path, 8, **control)
    assert folder.read_result() is None
    parts = outcome(run(tmp_path, **control))
    other = tmp_path / "other"
    run(other, **RESTLESS)
    assert outcome(run(other, **control)) == parts


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("model", ["tiny-mlp", "tiny"])
def test_d_replaced_by_its_own_sequence_is_the_same_run(scope: str, model: str, tmp_path: Path) -> None:
    variant = {**SOFT, "model": model, "options": {**RESTLESS["options"], "scope": scope}}
    source = run(tmp_path, **variant)
    again = run(tmp_path, damping="same", damping_of=source.key, **variant)
    if scope == "global":
        assert outcome(again) == outcome(source)
    else:  # the s of several segments is stored in 16 bits
        s, used = (torch.load(one.path / ALIGNMENT_FILE, weights_only=True) for one in (source, again))
        assert torch.equal(s, used) and s.shape[1] > 1
        assert result_of(again)["loss"] == pytest.approx(result_of(source)["loss"], rel=1e-3)


def test_the_control_has_the_mean_momentum_of_its_source(tmp_path: Path) -> None:
    """The mean of min(1, 2 d) is below min(1, 2 mean d) if d moves around 1/2."""
    source = run(tmp_path, **RESTLESS)
    s = torch.load(source.path / ALIGNMENT_FILE, weights_only=True)
    d = (1 + s) / 2
    expected = float((2 * d).clamp(max=1).mean())
    assert expected < min(1.0, 2 * float(d.mean())) - 1e-3
    control = {**RESTLESS, "damping": "mean", "damping_of": source.key}
    optimizer = make_training(tmp_path, **control).optimizer
    assert isinstance(optimizer, TAMVariant)
    factors = optimizer._stack.momentum_factor
    torch.testing.assert_close(factors, torch.full_like(factors, expected))

    def make_step(params: list[Any]) -> Callable[[], None]:
        momentum = [torch.zeros_like(p) for p in params]

        @torch.no_grad()
        def step() -> None:
            for p, buffer in zip(params, momentum, strict=True):
                buffer.mul_(BETA * expected).add_(p.grad, alpha=float(d.mean()))
                p.sub_(buffer, alpha=RESTLESS_LR)

        return step

    torch.testing.assert_close(
        trained_params(tmp_path, **control), plain_loop(1.0, make_step), atol=1e-4, rtol=1e-3
    )


def test_a_source_of_another_length_is_named(tmp_path: Path) -> None:
    source = run(tmp_path, epochs=2, **SOFT)
    longer = {**SOFT, "damping": "mean", "damping_of": source.key}
    with pytest.raises(LabError, match=f"the trial {source.key} whose damping .* has 10 steps, not 15"):
        run(tmp_path, **longer)


def test_without_soft_restarts_no_momentum_is_held(tmp_path: Path) -> None:
    plain = {**RESTLESS, "options": {**RESTLESS["options"], "soft_restart": False}}
    source = run(tmp_path, **plain)
    optimizer = make_training(tmp_path, damping="mean", damping_of=source.key, **plain).optimizer
    assert isinstance(optimizer, TAMVariant) and optimizer._stack.momentum_factor.isnan().all()


@pytest.mark.parametrize("clip", [1.0, 0.0])
def test_a_step_can_be_captured(clip: float, tmp_path: Path) -> None:
    """A CUDA graph can hold no step that reads a value of the device."""
    source = run(tmp_path, clip=clip, **SOFT)
    for variant in (SOFT, {**SOFT, "damping": "mean", "damping_of": source.key}):
        training = make_training(tmp_path, clip=clip, **variant)
        training.begin(0)
        training.step()
        with ReadsOfDevice() as reads:
            training.step()
        assert reads.count == 0


def test_figures_of_s(tmp_path: Path) -> None:
    variant = {"optimizer": "tam", "lr": 0.1, "options": {**MOMENTUM, "smoothing": 0.5, "gain": 40.0}}
    folder = run(tmp_path, clip=0.0, **variant)
    result = result_of(folder)
    s = torch.load(folder.path / ALIGNMENT_FILE, weights_only=True)
    d = (1 + (40 * s).clamp(-1, 1)) / 2
    frozen = [len([*group]) for is_frozen, group in itertools.groupby((d < 0.02).tolist()) if is_frozen]
    assert result["frozen_steps"] == max(frozen, default=0)
    assert result["settled_alignment"] == pytest.approx(float(s[3:12].mean()))
    rows = folder.metrics()
    assert [row["damping"] for row in rows] == pytest.approx(d.reshape(3, 5).mean(1).tolist())
    assert not {"frozen_steps", "settled_alignment"} & result_of(run(tmp_path)).keys()  # SGDM has no s


@pytest.mark.parametrize("flags, longest", [("0", 0), ("1", 1), ("0110111", 3), ("1101", 2)])
def test_longest_run(flags: str, longest: int) -> None:
    assert sgd_ladder.longest_run(torch.tensor([flag == "1" for flag in flags], dtype=torch.bool)) == longest


def test_the_outcome_is_the_validation_loss(tmp_path: Path) -> None:
    training, folder = make_training(tmp_path), run(tmp_path)
    for epoch in range(3):
        for _ in training.epoch(epoch):
            pass
    training.model.eval()
    data, rows = load("digits", Path()), training.validation
    x = (data.train[0][rows].float() / 255 - training.mean) / training.std
    expected = cross_entropy(training.model(x), data.train[1][rows]).item()
    result = result_of(folder)
    assert result["validation_loss"] == pytest.approx(expected, rel=1e-5)
    assert folder.metrics()[-1]["validation_loss"] == result["validation_loss"]
    assert not result["failed"] and not result["diverged"] and result["settings"]["schedule"] == "constant"


def test_a_trial_above_chance_or_without_a_finite_loss_has_failed(tmp_path: Path) -> None:
    worse = result_of(run(tmp_path, lr=3.0))
    assert worse["failed"] and not worse["diverged"] and worse["validation_loss"] > math.log(10)
    lost = result_of(run(tmp_path, lr=1e30, clip=0.0))
    assert lost["failed"] and lost["diverged"] and math.isnan(lost["validation_loss"])


def test_keys_are_not_those_of_images() -> None:
    own = config()
    assert own.canonical["clip"] == 1.0 and config(clip=0.0).key != own.key
    given = {k: v for k, v in own.canonical.items() if k != "clip"}
    assert images.Config(**given).key != own.key
    for wrong in ({"clip": -1.0}, {"clip": math.inf}, {"sgdm_from": 1, "optimizer": "tam"}):
        with pytest.raises(ValueError, match=r"clip|sgdm_from"):
            config(**wrong)


def test_pilots_have_other_seeds_and_no_torque() -> None:
    presets = get_experiment("sgd_ladder").presets
    (pilot,) = presets["pilot"]
    assert {variant.optimizer for variant in pilot.variants} == {"sgdm"} and pilot.trials() == 2 * 9
    registered = {seed for study in presets["registered"] for seed in study.seeds}
    for name in ("pilot", "quick", "default-momentum"):
        assert all(registered.isdisjoint(study.seeds) for study in presets[name])


@pytest.mark.parametrize("name, trials", [("resnet", 6 * 8 * 4), ("mlp", 9 * 10 * 4)])
def test_the_registered_ladders(name: str, trials: int) -> None:
    experiment = get_experiment("sgd_ladder")
    study = next(one for one in experiment.presets["registered"] if one.name == name)
    assert isinstance(study, Ladder) and study.trials() == trials and study.cap == math.log(10)
    plan = LadderPlan(experiment, study, Results())
    lrs = study.grid(study.variant(study.baseline))
    for variant in study.variants:
        assert [plan.effective_lr(variant, lr) for lr in plan.grid(variant)] == pytest.approx(lrs)
        assert variant.options["momentum"] == 0.99
        assert ("no clipping" in variant.name) == (variant.settings.get("clip") == 0.0)
    # The controls wait for their sources.
    waiting = {variant.name for variant in study.variants} - {variant.name for variant, _ in plan.to_run()}
    assert waiting == {"soft restart, constant momentum and damping"}
