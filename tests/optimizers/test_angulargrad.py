"""AngularGrad against its own small reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tam
from tam.reference import angular_grad
from tests.helpers import TOLERANCE, assert_close, gradients, parameters, params_of, train

SHAPES = [(3, 5), (130,), (1,)]
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["cos", "tan"])
@pytest.mark.parametrize("vote", [False, True])
@pytest.mark.parametrize(
    "more", [{}, {"weight_decay": 0.1}, {"betas": (0.5, 0.8), "eps": 0.1}], ids=["plain", "decay", "betas"]
)
def test_fifty_steps_match_the_reference(
    way: str, dtype: torch.dtype, method: str, vote: bool, more: dict[str, Any]
) -> None:
    options = {"lr": 0.01, "method": method, "vote": vote, **more}
    optimizer = tam.AngularGrad(parameters(SHAPES, dtype), **options, **WAYS[way])  # type: ignore[arg-type]
    starts = [p.detach().to(torch.float64, copy=True) for p in params_of(optimizer)]
    streams = [[g.double() for g in gradients(params_of(optimizer), k)] for k in range(50)]
    train(optimizer, 50)
    for i, p in enumerate(params_of(optimizer)):
        expected = angular_grad(starts[i], [grads[i] for grads in streams], **options)  # type: ignore[arg-type]
        assert_close(p, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("way", WAYS)
def test_state_keys(way: str) -> None:
    keys = {"step", "exp_avg", "exp_avg_sq", "previous_grad", "angle"}
    for vote in (False, True):
        optimizer = train(tam.AngularGrad(parameters(SHAPES), vote=vote, **WAYS[way]), 1)
        expected = keys | ({"coefficient"} if vote else set())
        assert all(set(optimizer.state[p]) == expected for p in params_of(optimizer))


@pytest.mark.parametrize("way", WAYS)
def test_vote_replaces_when_few_angles_exceed(way: str) -> None:
    # Equal gradients do not turn: from the second step on the coefficient is cos 0 = 1.
    p = torch.nn.Parameter(torch.zeros(4))
    optimizer = tam.AngularGrad([p], vote=True, **WAYS[way])
    for expected in (0.0, 1.0):
        p.grad = torch.ones(4)
        optimizer.step()
        assert optimizer.state[p]["coefficient"].tolist() == [expected] * 4


@pytest.mark.parametrize("way", WAYS)
def test_a_tied_vote_replaces_nothing(way: str) -> None:
    # Of two coordinates one turns and one does not: as many exceed the stored 0 as do not.
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = tam.AngularGrad([p], vote=True, **WAYS[way])
    for g in ([1.0, 0.0], [3.0, 0.0]):
        p.grad = torch.tensor(g)
        optimizer.step()
    assert optimizer.state[p]["coefficient"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("way", WAYS)
def test_gradients_at_a_right_angle(way: str) -> None:
    # 1 + g' g = 0: tan A is infinite, A is pi / 2.
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = tam.AngularGrad([p], **WAYS[way])
    for g in (1.0, -1.0):
        p.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
    assert float(optimizer.state[p]["angle"]) == pytest.approx(torch.pi / 2)
    assert torch.isfinite(p).all()
