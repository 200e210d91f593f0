"""The learning rate transfer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tam
from tam.switching import transfer
from tests.helpers import parameters


def test_it_is_the_papers_equation() -> None:
    assert tam.transfer_lr(0.1) == 0.2
    assert tam.transfer_lr(0.1, alignment=0.25) == pytest.approx(0.16)
    # 2 (1 - 0.8) / ((1 + 0.6) (1 - 0.95)) = 0.4 / 0.08 = 5
    assert tam.transfer_lr(0.1, momentum=0.95, to_momentum=0.8, alignment=0.6) == pytest.approx(0.5)
    assert tam.transfer_lr(0.3, momentum=0.0) == 0.6
    assert torch.equal(tam.transfer_lr(torch.tensor(0.1)), torch.tensor(0.2))


def test_a_recorded_alignment_can_be_given() -> None:
    assert tam.transfer_lr(0.1, alignment=torch.tensor(0.25)) == pytest.approx(0.16)
    with pytest.raises(ValueError, match=r"alignment must be .* a CPU tensor of one, got"):
        tam.transfer_lr(0.1, alignment=torch.zeros(2))


def test_adams_rule_is_that_of_a_momentum_of_zero() -> None:
    # 2 (1 - beta1) / (1 + s*)
    assert tam.transfer_lr(1e-3, momentum=0.0, to_momentum=0.9) == pytest.approx(2e-4)
    assert tam.transfer_lr(1e-3, momentum=0.0, to_momentum=0.9, alignment=0.25) == pytest.approx(1.6e-4)


@pytest.mark.parametrize(
    "options, name",
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"momentum": 1.0}, "momentum"),
        ({"to_momentum": 1.5}, "to_momentum"),
        ({"alignment": -1.0}, "alignment"),
        ({"alignment": 1.1}, "alignment"),
        ({"alignment": "0"}, "alignment"),
    ],
)
def test_bad_input(options: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        tam.transfer_lr(**{"lr": 0.1, **options})


@pytest.mark.parametrize(
    "cls, options, expected",
    [
        (torch.optim.SGD, {}, 1.0),
        (torch.optim.SGD, {"momentum": 0.9}, 10.0),
        (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.75}, 2.5),
        (torch.optim.SGD, {"dampening": 0.75}, 1.0),
        (tam.TAM, {}, 6.0),
        (tam.TAM, {"momentum": 0.0}, 0.6),
        (tam.TAM, {"gain": 3.0}, 8.0),
        (tam.TAM, {"floor": 0.5, "momentum": 0.5}, 2.2),
        (torch.optim.Adam, {}, 1.0),
        (torch.optim.AdamW, {"betas": (0.5, 0.9)}, 1.0),
        (tam.AdaTAM, {}, 6.0),
        (tam.AdaTAMW, {"betas": (0.8, 0.999)}, 3.0),
        (tam.AdaTAM, {"ema": True}, 1.0),
    ],
)
def test_a_steady_gradients_step_is_lr_times_the_settled_step(
    cls: type[torch.optim.Optimizer], options: dict[str, Any], expected: float
) -> None:
    """With s held at 0.2, the step the optimizer really takes after 300 steps on one gradient."""
    lr = 1e-3
    (p,) = parameters([(4,)], torch.float64)
    held = {"smoothing": 1.0} if issubclass(cls, (tam.TAM, tam.AdaTAM)) else {}
    optimizer = cls([p], lr=lr, **({"weight_decay": 0.0} | options | held))
    adaptive = "betas" in optimizer.defaults
    for _ in range(6000 if adaptive else 300):  # v needs longer
        p.grad = torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=torch.float64)
        before = p.detach().clone()
        optimizer.step()
        if held:
            optimizer.state[p]["alignment"].fill_(0.2)
    direction = p.grad.sign() if adaptive else p.grad
    moved = float(((before - p.detach()) / (lr * direction)).mean())
    found = transfer.settled_step(cls, optimizer.param_groups[0], 0.2)
    assert found == pytest.approx(expected)
    assert moved == pytest.approx(found, rel=4e-3 if adaptive else 1e-6)


@pytest.mark.parametrize("gain, s, d", [(1.0, 0.2, 0.6), (3.0, 0.2, 0.8), (10.0, 0.2, 1.0), (3.0, -0.5, 0.0)])
def test_the_settled_step_goes_by_the_gain(gain: float, s: float, d: float) -> None:
    tam_group = {"momentum": 0.9, "floor": 0.0, "gain": gain}
    assert transfer.settled_step(tam.TAM, tam_group, s) == pytest.approx(10 * d)
    group = {"betas": (0.8, 0.999), "floor": 0.0, "ema": False, "gain": gain}
    assert transfer.settled_step(tam.AdaTAMW, group, s) == pytest.approx(5 * d)
    assert transfer.settled_step(tam.AdaTAM, group | {"ema": True}, s) == 1
    assert float(transfer.settled_step(tam.TAM, tam_group, torch.tensor(s))) == pytest.approx(10 * d)
