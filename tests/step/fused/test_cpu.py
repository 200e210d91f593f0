"""The C kernel: every instruction set this processor has, sizes around its chunks, threads, strides."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import tam
from tam.step.fused import cpu
from tests.helpers import (
    TORQUE,
    Path,
    assert_close,
    assert_same,
    compare_with_reference,
    gradients,
    parameters,
    params_of,
    reference_of,
    tensors,
    train,
)

CHUNK = 16384
SIZES = [0, 1, 3, 8, 513, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 17]


HERE = cpu.INSTRUCTION_SETS[: cpu.instruction_set() + 1]  # those this processor has


@pytest.fixture(params=range(len(HERE)), ids=HERE)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    chosen: int = request.param
    monkeypatch.setattr(cpu, "instruction_set", lambda: chosen)
    return chosen


def test_the_kernel_was_built() -> None:
    assert cpu.why_missing() is None
    assert tam.available_kernels()["cpu"].startswith("C, ")


@pytest.mark.parametrize("scope", ["global", "group", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cls", TORQUE)
def test_matches_the_reference(cls: type, dtype: torch.dtype, scope: str, instruction_set: int) -> None:
    variants: list[dict[str, Any]] = [{"weight_decay": 0.1}, {"max_grad_norm": 0.5, "maximize": True}]
    variants += [{"gain": 3.0, "smoothing": 0.5}]
    if cls is not tam.TAM:
        variants += [{"ema": True}, {"bias_correction": True, "weight_decay": 0.1}]
    for options in variants:
        params = parameters([(n,) for n in SIZES], dtype)
        groups = [{"params": params[:5]}, {"params": params[5:], "lr": 0.03}]
        optimizer = cls(groups, lr=0.01, scope=scope, fused=True, **options)
        reference, path = reference_of(optimizer), Path()
        for step in range(4):
            drawn = gradients(params, step)
            for p, g in zip(params, drawn, strict=True):
                p.grad = g
            optimizer.step()
            wide = [g.double() for g in drawn]
            reference.step([wide[:5], wide[5:]])
            path.follow(reference)
        compare_with_reference(optimizer, reference, path)


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("cls", TORQUE)
def test_bfloat16_is_float32_rounded_once(cls: type, scope: str, instruction_set: int) -> None:
    low = parameters([(n,) for n in SIZES], torch.bfloat16)
    high = [torch.nn.Parameter(p.detach().float()) for p in low]
    a = cls(low, lr=0.01, weight_decay=0.1, scope=scope, fused=True)
    b = cls(high, lr=0.01, weight_decay=0.1, scope=scope, fused=True)
    for step in range(3):
        for p, q, g in zip(low, high, gradients(low, step), strict=True):
            p.grad, q.grad = g, g.float()
        a.step()
        b.step()
        for p, q in zip(low, high, strict=True):
            assert torch.equal(p, q.bfloat16())
            with torch.no_grad():
                q.copy_(p)
            for key, value in a.state[p].items():
                b.state[q][key].copy_(value)


def test_bfloat16_keeps_nan_and_inf(instruction_set: int) -> None:
    p = torch.nn.Parameter(torch.ones(20, dtype=torch.bfloat16))
    p.grad = torch.tensor([float("nan"), float("inf"), -float("inf")] + [1.0] * 17, dtype=torch.bfloat16)
    tam.TAM([p], lr=1.0, fused=True).step()
    assert p[0].isnan() and p[1] == -float("inf") and p[2] == float("inf") and p[3:].isfinite().all()


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize("cls", TORQUE)
def test_the_number_of_threads_changes_nothing(cls: type, scope: str) -> None:
    runs, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            runs.append(train(cls(parameters([(n,) for n in SIZES]), scope=scope, fused=True), 3))
    finally:
        torch.set_num_threads(before)
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


def test_ten_million_and_three() -> None:
    p = torch.nn.Parameter(torch.zeros(10**7 + 3))
    optimizer = tam.TAM([p], lr=1e-3, smoothing=0.0, fused=True)
    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    exact = float((p.grad.double() ** 2).sum().sqrt())
    assert float(optimizer.grad_norm) == pytest.approx(exact, rel=1e-6)
    for sign in (1.0, -1.0):
        p.grad = sign * optimizer.state[p]["momentum_buffer"].clone()
        optimizer.step()
        assert float(optimizer.alignment) == pytest.approx(sign, abs=1e-7)
        assert 0 <= float(optimizer.damping) <= 1


def test_misaligned_views_leave_their_neighbours_alone() -> None:
    storage = torch.randn(3 * CHUNK, generator=torch.Generator().manual_seed(0))
    outside = storage.clone()
    p = storage[1 : CHUNK + 5].requires_grad_()
    q = torch.nn.Parameter(p.detach().clone())
    a, b = tam.AdaTAM([p], fused=True), tam.AdaTAM([q], fused=True)
    for step in range(3):
        p.grad = gradients([q], step)[0]
        q.grad = p.grad.clone()
        a.step()
        b.step()
    assert torch.equal(p, q)
    assert storage[0] == outside[0] and torch.equal(storage[CHUNK + 5 :], outside[CHUNK + 5 :])


@pytest.mark.parametrize("cls", TORQUE)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_grad_scale_and_found_inf_are_independent(cls: type, scaled: bool, bad: bool) -> None:
    a, b = (train(cls(parameters([(5,), (9,)]), fused=True), 1) for _ in range(2))
    before = [x.clone() for x in tensors(a)]
    drawn = gradients(params_of(a), 1)
    for p, q, g in zip(params_of(a), params_of(b), drawn, strict=True):
        p.grad, q.grad = g * 8 if scaled else g.clone(), g
    if scaled:
        a.grad_scale = torch.tensor(8.0)
    a.found_inf = torch.tensor(float(bad))
    a.step()
    b.step()
    if bad:
        assert all(torch.equal(x, y) for x, y in zip(tensors(a), before, strict=True))
    else:
        assert_same(a, b)


def test_checkpoints_with_other_strides_are_laid_out_anew() -> None:
    p = torch.nn.Parameter(torch.randn(3, 4, 5, 6).contiguous(memory_format=torch.channels_last))
    q = torch.nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format))
    source = tam.TAM([q], fused=True)
    train(source, 2)
    with torch.no_grad():
        p.copy_(q)
    target = tam.TAM([p], fused=True)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    train(source, 2, start=2)
    train(target, 2, start=2)
    assert target.state[p]["momentum_buffer"].stride() == p.stride()
    assert_close(p, q, 1e-6)
