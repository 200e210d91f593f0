"""torch.compile and GradScaler."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

import tam
from tests.helpers import (
    ALL,
    PAIRS,
    TORQUE,
    WAYS,
    assert_close,
    assert_same,
    gradients,
    options_for,
    parameters,
    params_of,
    tensors,
    train,
)

SHAPES = [(3, 5), (7,)]


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def options_of(cls: type, **more: Any) -> dict[str, Any]:
    return {**options_for(cls, weight_decay=0.1, max_grad_norm=1.0, bias_correction=True), **more}


def compile_against_eager(cls: type, backend: str, **options: Any) -> None:
    eager = cls(parameters(SHAPES), lr=torch.tensor(0.01), **options)
    compiled = cls(parameters(SHAPES), lr=torch.tensor(0.01), **options)
    counter = CompileCounterWithBackend(backend)
    step = torch.compile(compiled.step, backend=counter)
    for k in range(5):
        for optimizer in (eager, compiled):
            optimizer.param_groups[0]["lr"].fill_(0.01 * (k + 1))
        train(eager, 1, start=k)
        for p, q in zip(params_of(eager), params_of(compiled), strict=True):
            q.grad = p.grad.clone()
        step()
    assert counter.frame_count == 1, "recompiled although only values changed"
    for a, b in zip(tensors(eager), tensors(compiled), strict=True):
        assert_close(b, a, 1e-5)
    if cls in TORQUE:
        assert_close(compiled.alignment, eager.alignment, 1e-5)
        assert_close(compiled.grad_norm, eager.grad_norm, 1e-5)


SCOPES: list[tuple[type, dict[str, str]]] = [
    *[(cls, {"scope": scope}) for cls in TORQUE for scope in ("global", "group", "tensor")],
    *[(cls, {}) for cls in ALL if cls not in TORQUE],
]


@pytest.mark.parametrize("way", ["loop", "foreach"])
@pytest.mark.parametrize("cls, scope", SCOPES)
def test_a_traced_step_gives_the_same_figures(cls: type, way: str, scope: dict[str, str]) -> None:
    compile_against_eager(cls, "aot_eager", **options_of(cls, **scope, **WAYS[way]))


@pytest.mark.parametrize("cls", ALL)
def test_a_compiled_step_gives_the_same_figures(cls: type) -> None:
    compile_against_eager(cls, "inductor", **options_of(cls))


@cache
def compilations(cls: type) -> int:
    """Return how often 4 steps are compiled, each with another float lr."""
    torch._dynamo.reset()
    optimizer = cls(parameters(SHAPES))
    counter = CompileCounterWithBackend("aot_eager")
    optimizer.step = torch.compile(optimizer.step, backend=counter)
    for k in range(4):
        optimizer.param_groups[0]["lr"] = 0.01 * (k + 1)
        train(optimizer, 1, start=k)
    return counter.frame_count


@pytest.mark.parametrize("cls", ALL)
def test_a_float_lr_compiles_as_often_as_torchs_adam(cls: type) -> None:
    assert compilations(cls) <= compilations(torch.optim.Adam)


@pytest.mark.parametrize("cls", TORQUE)
def test_a_scheduler_that_cycles_the_momentum_compiles_once_more(cls: type) -> None:
    optimizer = cls(parameters(SHAPES), lr=torch.tensor(0.01))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(optimizer.step, backend=counter)
    for k in range(5):
        for p, g in zip(params_of(optimizer), gradients(params_of(optimizer), k), strict=True):
            p.grad = g
        step()
        scheduler.step()
    assert counter.frame_count <= 2


@pytest.mark.parametrize("cls, way", PAIRS)
def test_grad_scaler_skips_a_step_with_an_overflow(cls: type, way: str) -> None:
    optimizer = train(cls(parameters(SHAPES), **options_of(cls, **WAYS[way])), 3)
    twin = train(cls(parameters(SHAPES), **options_of(cls, **WAYS[way])), 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for p in params_of(optimizer):
        p.grad = torch.full_like(p, torch.inf)
    scaler.scale(torch.ones(()))  # what makes the scaler's tensors
    scaler.step(optimizer)
    scaler.update()
    assert_same(optimizer, twin)
    assert scaler.get_scale() == 4.0


def test_grad_scaler_with_a_compiled_step() -> None:
    optimizer = tam.TAM(parameters(SHAPES))
    twin = tam.TAM(parameters(SHAPES), foreach=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer.step = torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[method-assign]
    for _ in range(3):
        for o, scaled in ((optimizer, True), (twin, False)):
            o.zero_grad()
            loss = sum(((p - 0.3) ** 2).sum() for p in params_of(o))
            (scaler.scale(loss) if scaled else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        twin.step()
    for p, q in zip(params_of(optimizer), params_of(twin), strict=True):
        assert_close(p, q, 1e-6)


@pytest.mark.parametrize("cls, way", PAIRS)
def test_grad_scaler_unscales(cls: type, way: str) -> None:
    scaled = cls(parameters(SHAPES), **options_of(cls, **WAYS[way]))
    plain = cls(parameters(SHAPES), **options_of(cls, **WAYS[way]))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(4):
        for optimizer, factor in ((scaled, True), (plain, False)):
            optimizer.zero_grad()
            loss = sum(((p - 0.3) ** 2).sum() for p in params_of(optimizer))
            (scaler.scale(loss) if factor else loss).backward()
        scaler.step(scaled)
        scaler.update()
        plain.step()
    assert_same(scaled, plain)


@pytest.mark.parametrize("cls, way", PAIRS)
def test_what_grad_scaler_leaves_to_the_step_is_done_by_every_backend(cls: type, way: str) -> None:
    a, b = (train(cls(parameters(SHAPES), **WAYS[way]), 1) for _ in range(2))
    for p, q, g in zip(params_of(a), params_of(b), gradients(params_of(a), 1), strict=True):
        p.grad, q.grad = g * 8, g
    a.grad_scale, a.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    a.step()
    b.step()
    assert_same(a, b)
    a.found_inf = torch.tensor(1.0)
    a.step()
    assert_same(a, b)


@pytest.mark.parametrize("cls, way", PAIRS)
def test_a_first_step_that_is_skipped_leaves_no_state(cls: type, way: str) -> None:
    optimizer, twin = (cls(parameters(SHAPES), **WAYS[way]) for _ in range(2))
    for p in params_of(optimizer):
        p.grad = torch.full_like(p, torch.inf)
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert len(optimizer.state) == 0
    assert_same(optimizer, twin)
    del optimizer.found_inf
    assert_same(train(optimizer, 2), train(twin, 2))
