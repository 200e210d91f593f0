"""alignment, damping and grad_norm; clipping; non-finite gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tam
from tests.helpers import TORQUE, assert_close, gradients, parameters, params_of, train

SHAPES = [(3, 5), (7,), (2, 2)]
CLASSES = TORQUE


@pytest.mark.parametrize("scope, shape", [("global", ()), ("group", (2,)), ("tensor", (3,))])
def test_readings_have_one_entry_per_segment(
    cls: type, way: dict[str, Any], scope: str, shape: tuple[int, ...]
) -> None:
    params = parameters(SHAPES)
    optimizer = cls([{"params": params[:2]}, {"params": params[2:]}], scope=scope, **way)
    assert optimizer.alignment.shape == shape and not optimizer.alignment.any()
    assert optimizer.damping.tolist() == torch.full(shape, 0.5).tolist()
    assert optimizer.grad_norm.shape == () and float(optimizer.grad_norm) == 0
    train(optimizer, 4)
    s = optimizer.alignment
    assert s.shape == shape and s.all() and (s.abs() <= 1).all()
    assert torch.equal(optimizer.damping, (1 + s) / 2)
    norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in params))
    assert float(optimizer.grad_norm) == pytest.approx(norm, rel=1e-6)


def test_alignment_is_the_smoothed_cosine(cls: type, way: dict[str, Any]) -> None:
    optimizer = train(cls(parameters(SHAPES), **way), 3)
    params, s = params_of(optimizer), float(optimizer.alignment)
    key = "momentum_buffer" if cls is tam.TAM else "exp_avg"
    m = torch.cat([optimizer.state[p][key].flatten() for p in params])
    g = torch.cat([x.flatten() for x in gradients(params, 3)])
    cosine = float(torch.nn.functional.cosine_similarity(m, g, dim=0))
    train(optimizer, 1, start=3)
    assert float(optimizer.alignment) == pytest.approx(0.9 * s + 0.1 * cosine, abs=1e-6)


def test_readings_are_fresh_copies(cls: type, way: dict[str, Any]) -> None:
    optimizer = train(cls(parameters(SHAPES), **way), 2)
    readings = {name: getattr(optimizer, name) for name in ("alignment", "damping", "grad_norm")}
    kept = {name: float(x) for name, x in readings.items()}
    train(optimizer, 1, start=2)
    for name, x in readings.items():
        assert float(x) == kept[name] != float(getattr(optimizer, name))
        x.fill_(7.0)
    assert float(optimizer.alignment) != 7.0 and float(optimizer.grad_norm) != 7.0


def test_the_step_writes_them_in_place(cls: type, way: dict[str, Any]) -> None:
    # What a replayed CUDA graph needs: the tensors stay the same ones.
    optimizer = train(cls(parameters(SHAPES), **way), 1)
    (p, *_) = params_of(optimizer)
    before = (optimizer.state[p]["alignment"], optimizer.segments.grad_norm)
    train(optimizer, 2, start=1)
    assert optimizer.state[p]["alignment"] is before[0]
    assert optimizer.segments.grad_norm is before[1]


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("limit", [0.1, 5.0, 1e6])
def test_max_grad_norm_is_clip_grad_norm(cls: type, way: dict[str, Any], scope: str, limit: float) -> None:
    options = {"lr": 0.01, "weight_decay": 0.1, "scope": scope, **way}
    inside = cls(parameters(SHAPES), max_grad_norm=limit, **options)
    outside = cls(parameters(SHAPES), **options)
    for step in range(10):
        for p, q, g in zip(
            params_of(inside), params_of(outside), gradients(params_of(inside), step), strict=True
        ):
            p.grad, q.grad = g, g.clone()
        norm = torch.nn.utils.clip_grad_norm_(params_of(outside), limit)
        inside.step()
        outside.step()
        assert float(inside.grad_norm) == pytest.approx(float(norm), rel=1e-6)
    assert_close(inside.alignment, outside.alignment, 1e-6, scale=1.0)
    for p, q in zip(params_of(inside), params_of(outside), strict=True):
        assert_close(p, q, 1e-6)
        for key in set(inside.state[p]) - {"alignment"}:
            assert_close(inside.state[p][key], outside.state[q][key], 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_one_non_finite_gradient_never_reaches_alignment(
    cls: type, way: dict[str, Any], scope: str, bad: float, max_grad_norm: float | None
) -> None:
    optimizer = train(cls(parameters(SHAPES), scope=scope, max_grad_norm=max_grad_norm, **way), 3)
    params = params_of(optimizer)
    before = optimizer.alignment
    for p, g in zip(params, gradients(params, 3), strict=True):
        p.grad = g
    params[0].grad[0, 0] = bad
    optimizer.step()
    after = optimizer.alignment
    assert torch.isfinite(after).all()
    if scope == "tensor":
        assert after[0] == before[0] and after[1] != before[1]
    else:
        assert torch.equal(after, before)
    # m takes the gradient, as SGD's would
    key = "momentum_buffer" if cls is tam.TAM else "exp_avg"
    assert not torch.isfinite(optimizer.state[params[0]][key][0, 0])
    train(optimizer, 3, start=4)
    assert torch.isfinite(optimizer.alignment).all()


def test_overflowing_sums_leave_s_as_it_was(cls: type, way: dict[str, Any]) -> None:
    # Finite float32 gradients whose squares are not.
    optimizer = train(cls(parameters(SHAPES), lr=0.0, **way), 3)
    before = optimizer.alignment
    for p in params_of(optimizer):
        p.grad = torch.full_like(p, 1e30)
    optimizer.step()
    assert torch.equal(optimizer.alignment, before)


def test_a_step_without_gradients_has_no_norm(cls: type, way: dict[str, Any]) -> None:
    optimizer = train(cls(parameters(SHAPES), **way), 2)
    params = params_of(optimizer)
    for make_gradients in (lambda p: None, torch.zeros_like):
        train(optimizer, 1, start=2)
        before = optimizer.alignment
        assert float(optimizer.grad_norm) > 0
        for p in params:
            p.grad = make_gradients(p)
        optimizer.step()
        assert float(optimizer.grad_norm) == 0
        if params[0].grad is None:
            assert torch.equal(optimizer.alignment, before)


def test_the_norm_over_two_kinds_of_devices_is_not_known(cls: type, torch_way: dict[str, Any]) -> None:
    params = [*parameters([(4,)]), torch.nn.Parameter(torch.ones(4, device="meta"))]
    optimizer = cls(params, scope="tensor", **torch_way)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert math.isnan(optimizer.grad_norm)
    optimizer.zero_grad()
    assert math.isnan(optimizer.grad_norm)
    params[0].grad = torch.full((4,), 2.0)
    optimizer.step()
    params[1].grad = torch.ones(4, device="meta")  # of the next step
    assert float(optimizer.grad_norm) == 4


def test_a_segment_without_gradients_keeps_s(cls: type, way: dict[str, Any]) -> None:
    params = parameters(SHAPES)
    optimizer = train(cls([{"params": params[:2]}, {"params": params[2:]}], scope="group", **way), 3)
    before = optimizer.alignment
    params[2].grad = None
    optimizer.step()
    assert optimizer.alignment[0] != before[0] and optimizer.alignment[1] == before[1]
