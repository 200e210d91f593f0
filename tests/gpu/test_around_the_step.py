"""Hand-over, Warmup and Recorder on a GPU: as on the CPU, and without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

import tam
from tam.recorder.quantities import QUANTITIES
from tests.helpers import gradients, parameters, params_of

SHAPES = [(33, 17), (64,), (3, 3, 4), ()]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def run(make: Callable[[list[Any]], Optimizer], steps: int, device: str) -> tuple[Optimizer, tam.Recorder]:
    params = [torch.nn.Parameter(p.detach().to(device)) for p in parameters(SHAPES)]
    stream = [[g.to(device) for g in gradients(parameters(SHAPES), t)] for t in range(steps)]
    optimizer = make(params)
    recorder = tam.Recorder(optimizer, capacity=4)
    for t, grads in enumerate(stream):
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        if t >= 2 and device == "cuda":  # by then the kernels are compiled and the buffers made
            with no_waiting():
                optimizer.step()
        else:
            optimizer.step()
    return optimizer, recorder


MAKERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "SGDM": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "AdamW": lambda ps: AdamW(ps, lr=1e-2),
    "AdamW fused": lambda ps: AdamW(ps, lr=1e-2, fused=True),
    "TAM": lambda ps: tam.TAM(ps, lr=0.1),
    "AdaTAMW, tensor": lambda ps: tam.AdaTAMW(ps, lr=1e-2, scope="tensor"),
    "TAM -> SGD": lambda ps: tam.Warmup(tam.TAM(ps, lr=0.1), SGD, 5),
    "SGD -> TAM": lambda ps: tam.Warmup(SGD(ps, lr=0.1, momentum=0.9), tam.TAM, 5, buffers="rescale"),
    "AdamW -> AdaTAMW": lambda ps: tam.Warmup(AdamW(ps, lr=1e-2, fused=True), tam.AdaTAMW, 5),
    "AdaTAM -> Adam": lambda ps: tam.Warmup(tam.AdaTAM(ps, lr=1e-2), Adam, 5),
    "TAM -> Adam": lambda ps: tam.Warmup(tam.TAM(ps, lr=0.1), lambda gs: Adam(gs, lr=1e-2), 5),
}


@pytest.mark.parametrize("name", MAKERS)
def test_as_on_the_cpu_and_without_waiting(name: str) -> None:
    here, recorded_here = run(MAKERS[name], 12, "cpu")
    there, recorded_there = run(MAKERS[name], 12, "cuda")
    for p, q in zip(params_of(here), params_of(there), strict=True):
        torch.testing.assert_close(p.detach(), q.detach().cpu(), rtol=1e-4, atol=1e-5)
    for quantity in QUANTITIES:
        a, b = recorded_here[quantity], recorded_there[quantity]
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    if isinstance(there, tam.Warmup):
        assert there.switched
        again = MAKERS[name](params_of(there))
        again.load_state_dict(there.state_dict())
        assert isinstance(again, tam.Warmup) and again.switched


def test_the_step_count_stays_on_the_device() -> None:
    optimizer, _ = run(MAKERS["AdaTAM -> Adam"], 8, "cuda")
    assert isinstance(optimizer, tam.Warmup)
    group = optimizer.optimizer.param_groups[0]
    assert group["fused"] and all(s["step"].is_cuda and int(s["step"]) == 8 for s in optimizer.state.values())


def test_grad_scaler_across_the_switch() -> None:
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters(SHAPES)]
    plain = [torch.nn.Parameter(p.detach().clone()) for p in params]
    scaled, other = (tam.Warmup(tam.TAM(ps, lr=0.1), SGD, 4) for ps in (params, plain))
    recorder = tam.Recorder(scaled)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for t in range(9):
        factor = scaler.scale(torch.ones((), device="cuda"))
        for p, q, g in zip(params, plain, gradients(params, t), strict=True):
            p.grad, q.grad = g.cuda() * factor, g.cuda()
        scaler.step(scaled)
        scaler.update()
        other.step()
    assert scaled.switched and other.switched
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    norms = [
        float(torch.cat([g.flatten() for g in gradients(parameters(SHAPES), t)]).norm()) for t in range(9)
    ]
    assert recorder["grad_norm"].tolist() == pytest.approx(norms, rel=1e-5)


def test_a_capture_is_refused() -> None:
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters(SHAPES)]
    optimizer = tam.TAM(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    tam.Recorder(optimizer)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="CUDA graph"), torch.cuda.graph(graph):
        optimizer.step()
