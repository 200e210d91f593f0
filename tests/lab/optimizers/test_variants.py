"""TAMVariant: the stack's rule on one network, whatever the layout of its tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tam.lab.core.errors import LabError
from tam.lab.optimizers import ONLY_IN_POPULATIONS, rule_of
from tam.lab.optimizers.rule import RuleStack
from tam.lab.optimizers.variants import TAMVariant
from tam.lab.training.factory import make_optimizer
from tests.helpers import gradients, parameters
from tests.lab.experiments.test_images import config

SHAPES = [(4, 3, 3, 3), (5,), (6, 2)]
OPTIONS: dict[str, Any] = {"soft_restart": True, "scope": "tensor", "weight_decay": 0.1, "max_damping": 0.6}


def make_params(is_channels_last: bool = False) -> list[torch.nn.Parameter]:
    params = parameters(SHAPES)
    if is_channels_last:
        first = params[0].detach().to(memory_format=torch.channels_last)
        params[0] = torch.nn.Parameter(first)
    return params


def take_steps(optimizer: TAMVariant, first: int, last: int, is_strided: bool = False) -> list[Tensor]:
    """Take steps. `is_strided`: with gradients that have other strides than their parameters."""
    params = optimizer.param_groups[0]["params"]
    for step in range(first, last):
        for p, g in zip(params, gradients(params, step), strict=True):
            grad = torch.empty_like(p).copy_(g)
            if is_strided:
                grad = g.t().contiguous().t() if g.ndim == 2 else g.contiguous()
            p.grad = grad
        optimizer.step()
    return [p.detach().contiguous() for p in params]


def test_it_is_the_stack_of_one_run() -> None:
    params = [p.detach()[None].clone() for p in make_params()]
    stack = RuleStack(params, [rule_of("tam-variant", OPTIONS)])
    for step in range(10):
        grads = gradients([p[0] for p in params], step)
        stack.step([g[None] for g in grads], torch.tensor([0.05]))
    optimizer = TAMVariant(make_params(), lr=0.05, **OPTIONS)
    for own, other in zip(take_steps(optimizer, 0, 10), params, strict=True):
        assert torch.equal(own, other[0])
    assert torch.equal(optimizer.alignment, stack.s[0])
    assert TAMVariant(make_params()).alignment.shape == ()


@pytest.mark.parametrize("is_channels_last", [False, True])
@pytest.mark.parametrize("is_strided", [False, True])
def test_layouts_do_not_matter(is_channels_last: bool, is_strided: bool) -> None:
    expected = take_steps(TAMVariant(make_params(), lr=0.05, **OPTIONS), 0, 8)
    params = make_params(is_channels_last)
    assert params[0].is_contiguous() != is_channels_last
    found = take_steps(TAMVariant(params, lr=0.05, **OPTIONS), 0, 8, is_strided)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-5)  # sums have another order


@pytest.mark.parametrize("is_channels_last", [False, True])
def test_a_checkpoint_continues_with_the_same_bits(is_channels_last: bool) -> None:
    whole = take_steps(TAMVariant(make_params(is_channels_last), lr=0.05, **OPTIONS), 0, 9)
    params = make_params(is_channels_last)
    first = TAMVariant(params, lr=0.05, **OPTIONS)
    take_steps(first, 0, 4)
    state = copy.deepcopy(first.state_dict())
    second = TAMVariant(params, lr=0.2, **OPTIONS)
    second.load_state_dict(state)
    for own, other in zip(take_steps(second, 4, 9), whole, strict=True):
        assert torch.equal(own, other)


def test_a_missing_gradient_is_zero_and_a_closure_is_called() -> None:
    params = make_params()
    optimizer = TAMVariant(params, lr=0.05)
    start = [p.detach().clone() for p in params]

    def closure() -> float:
        loss = params[1].square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    assert optimizer.step(closure) == pytest.approx(float(start[1].square().sum()))
    moved = [not torch.equal(p, q) for p, q in zip(params, start, strict=True)]
    assert moved == [False, True, False]


def test_mistakes() -> None:
    params = make_params()
    with pytest.raises(TypeError, match="TAMVariant has no option 'nesterov'"):
        TAMVariant(params, nesterov=True)
    with pytest.raises(ValueError, match="min_damping <= max_damping"):
        TAMVariant(params, min_damping=0.7, max_damping=0.6)
    with pytest.raises(ValueError, match="takes one group"):
        TAMVariant([{"params": params[:1]}, {"params": params[1:]}])
    with pytest.raises(ValueError, match="takes one group"):
        TAMVariant(params[:1]).add_param_group({"params": params[1:]})
    gaps = torch.nn.Parameter(torch.zeros(4, 4)[:, ::2])
    with pytest.raises(ValueError, match=r"shape \(4, 2\) is not dense in memory"):
        TAMVariant([gaps])


@pytest.mark.parametrize("name", sorted(ONLY_IN_POPULATIONS))
def test_optimizers_of_populations_do_not_train_alone(name: str) -> None:
    """Their classes compute another rule."""
    with pytest.raises(LabError, match=f"{name} is an optimizer of populations"):
        make_optimizer(config(optimizer=name), make_params(), 0.1)
    assert isinstance(make_optimizer(config(optimizer="tam-variant"), make_params(), 0.1), TAMVariant)
