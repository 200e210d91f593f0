"""Every optimizer, in every way, computes what the reference computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tam
from tests.helpers import (
    TORQUE,
    WAYS,
    Path,
    assert_close,
    compare_with_reference,
    gradients,
    parameters,
    params_of,
    reference_of,
    train,
)

SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 3, 4), (4, 0), (130,)]


@st.composite
def set_ups(draw: Any) -> dict[str, Any]:
    """Shapes, options and a seed; never gradient values."""
    # A segment of one number has S = +-1. Unsmoothed, its weight (1 + S) / 2 is then a rounding
    # error or exactly 0, and its relative error is not bounded: smoothing=0 is drawn with large
    # tensors only.
    smoothing = draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))
    shapes = SHAPES if smoothing else [(130,), (11, 12)]
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        groups.append(
            {
                "shapes": draw(st.lists(st.sampled_from(shapes), min_size=1, max_size=4)),
                "lr": draw(st.sampled_from([1e-3, 1e-2, 0.2])),
                "beta1": draw(st.sampled_from([0.0, 0.9, 0.99])),
                "beta2": draw(st.sampled_from([0.9, 0.999])),
                "eps": draw(st.sampled_from([1e-8, 1e-2])),
                "weight_decay": draw(st.sampled_from([0.0, 1e-2])),
                "floor": draw(st.sampled_from([0.0, 1e-8, 0.5])),
                "maximize": draw(st.booleans()),
            }
        )
    return {
        "seed": draw(st.integers(0, 10_000)),
        "absent": draw(st.sampled_from([0.0, 0.0, 0.3])),
        "groups": groups,
        "scope": draw(st.sampled_from(["global", "group", "tensor"])),
        "smoothing": smoothing,
        "gain": draw(st.sampled_from([1.0, 1.0, 0.0, 0.5, 2.0, -1.0])),
        "max_grad_norm": draw(st.sampled_from([None, 0.5, 1e6])),
        "ema": draw(st.booleans()),
        "bias_correction": draw(st.booleans()),
    }


def build(cls: type, way: str, dtype: torch.dtype, set_up: dict[str, Any]) -> torch.optim.Optimizer:
    groups = []
    for i, group in enumerate(set_up["groups"]):
        options = {k: group[k] for k in ("lr", "weight_decay", "floor", "maximize")}
        if cls.__name__ == "TAM":
            options["momentum"] = group["beta1"]
        else:
            options |= {"betas": (group["beta1"], group["beta2"]), "eps": group["eps"]}
        params = parameters(group["shapes"], dtype, seed=set_up["seed"] + i)
        groups.append({"params": params, **options})
    shared = {k: set_up[k] for k in ("scope", "smoothing", "gain", "max_grad_norm")}
    if cls.__name__ != "TAM":
        shared |= {k: set_up[k] for k in ("ema", "bias_correction")}
    return cls(groups, **shared, **WAYS[way])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", TORQUE)
@given(set_up=set_ups())
@settings(max_examples=25)
def test_fifty_steps_match_the_reference(
    cls: type, way: str, dtype: torch.dtype, set_up: dict[str, Any]
) -> None:
    optimizer = build(cls, way, dtype, set_up)
    reference, path = reference_of(optimizer), Path()
    chance = torch.Generator().manual_seed(set_up["seed"])
    for step in range(50):
        stream = []
        for i, group in enumerate(optimizer.param_groups):
            row = []
            for p, g in zip(
                group["params"], gradients(group["params"], step, set_up["seed"] + i), strict=True
            ):
                here = float(torch.rand((), generator=chance)) >= set_up["absent"]
                p.grad = g if here else None
                row.append(g.double() if here else None)
            stream.append(row)
        optimizer.step()
        reference.step(stream)
        path.follow(reference)
    compare_with_reference(optimizer, reference, path)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", TORQUE)
@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("signs", [(1, -1), (1, 1), (1, -1, -1, 1)], ids=["cancel", "repeat", "mix"])
def test_cancelling_and_repeating_streams_match_step_by_step(
    cls: type, way: str, scope: str, signs: tuple[int, ...]
) -> None:
    optimizer = cls(parameters([(3, 5), (7,)]), lr=0.01, scope=scope, **WAYS[way])
    params = optimizer.param_groups[0]["params"]
    fixed = gradients(params, 0)
    for step in range(12):
        reference = reference_of(optimizer)
        before = [float(m.abs().max()) for m in reference.m[0]]
        stream = [signs[step % len(signs)] * g for g in fixed]
        for p, g in zip(params, stream, strict=True):
            p.grad = g
        optimizer.step()
        reference.step([[g.double() for g in stream]])
        for j, p in enumerate(params):
            assert_close(p, reference.groups[0].theta[j], 2e-5)
            state = optimizer.state[p]
            m = state.get("momentum_buffer", state.get("exp_avg"))
            assert_close(m, reference.m[0][j], 2e-5, scale=before[j])  # what cancels gives the scale
            assert abs(float(state["alignment"]) - reference.s[reference.segment(0, j)]) <= 2e-5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_very_many_parallel_elements_have_cosine_one(way: str, sign: float) -> None:
    p = torch.nn.Parameter(torch.zeros(10_000_000))
    optimizer = tam.TAM([p], lr=0.0, smoothing=0.0, **WAYS[way])
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()  # m = (1/2 + floor) g
    p.grad *= sign
    optimizer.step()
    assert float(optimizer.alignment) == pytest.approx(sign, abs=1e-7)
    assert 0.0 <= float(optimizer.damping) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_at_fixed_damping_tam_is_torch_sgd_exactly(way: str, dtype: torch.dtype, weight_decay: float) -> None:
    shapes = [(3, 5), (7,), (2, 3, 4)]
    options = {"momentum": 0.9, "weight_decay": weight_decay}
    ours = tam.TAM(parameters(shapes, dtype), 0.1, smoothing=1.0, floor=0.5, **options, **WAYS[way])
    theirs = torch.optim.SGD(parameters(shapes, dtype), 0.1, **options)
    half = tam.TAM(parameters(shapes, dtype), 0.1, smoothing=1.0, floor=0.0, **options, **WAYS[way])
    half_sgd = torch.optim.SGD(parameters(shapes, dtype), 0.05, **options)
    for optimizer in (ours, theirs, half, half_sgd):
        train(optimizer, 20)
    for a, b in zip(params_of(ours), params_of(theirs), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(params_of(half), params_of(half_sgd), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", TORQUE)
def test_zero_gradients_give_cosine_zero_and_absent_ones_keep_s(cls: type, way: str) -> None:
    optimizer = train(cls(parameters([(5,)]), smoothing=0.5, **WAYS[way]), 3)
    (p,) = params_of(optimizer)
    before = float(optimizer.alignment)
    assert before != 0
    p.grad = None
    optimizer.step()
    assert float(optimizer.alignment) == before
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert float(optimizer.alignment) == pytest.approx(before / 2, rel=1e-6)


def test_first_step_has_half_weight() -> None:
    (p,) = parameters([(5,)], torch.float64)
    before = p.detach().clone()
    p.grad = gradients([p], 0)[0]
    optimizer = tam.TAM([p], lr=0.1)
    optimizer.step()
    assert float(optimizer.alignment) == 0 and float(optimizer.damping) == 0.5
    assert torch.allclose(p, before - 0.1 * (0.5 + 1e-8) * p.grad, rtol=1e-15, atol=0)
