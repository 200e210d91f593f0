"""The recorder's kernel in Triton's interpreter, on CPU tensors, compared with torch's operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer

import tam
from tam.recorder import cuda
from tam.recorder import recorder as recorder_module
from tam.step.fused import launcher
from tests.helpers import gradients, parameters, params_of

SHAPES = [(0,), (), (3,), (63,), (64,), (65,), (3, 67)]


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[Optimizer], tam.Recorder]:
    monkeypatch.setattr(launcher, "SMALL_CHUNK", 64)
    monkeypatch.setattr(cuda, "BLOCK", 16)

    def make(optimizer: Optimizer, **options: Any) -> tam.Recorder:
        with monkeypatch.context() as patch:
            patch.setattr(recorder_module, "choose_observer", cuda.KernelObserver)
            return tam.Recorder(optimizer, **options)

    return make


MAKERS: dict[str, Callable[[list[Any]], Optimizer]] = {
    "SGDM": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "SGDM, groups": lambda ps: SGD(
        [{"params": ps[:3]}, {"params": ps[3:], "maximize": True}], lr=0.1, momentum=0.9
    ),
    "Adam": lambda ps: Adam(ps, lr=1e-2),
    "TAM": lambda ps: tam.TAM(ps, lr=0.1),
    "TAM, tensor": lambda ps: tam.TAM(ps, lr=0.1, scope="tensor"),
    "AdaTAMW": lambda ps: tam.AdaTAMW(ps, lr=1e-2),
}


def run(optimizer: Optimizer, steps: int, scale: float | None = None) -> None:
    for t in range(steps):
        params = params_of(optimizer)
        for j, (p, g) in enumerate(zip(params, gradients(params, t), strict=True)):
            p.grad = None if (j + t) % 4 == 0 else g * (scale or 1.0)
        optimizer.step()


CASES = [(name, torch.float32) for name in MAKERS]
CASES += [
    (name, dtype) for name in ("SGDM", "TAM") for dtype in (torch.bfloat16, torch.float16, torch.complex64)
]


@pytest.mark.parametrize("name, dtype", CASES)
def test_as_torchs_operations(
    name: str, dtype: torch.dtype, by_kernels: Callable[[Optimizer], tam.Recorder]
) -> None:
    one, two = (MAKERS[name](parameters(SHAPES, dtype)) for _ in range(2))
    plain, kernels = tam.Recorder(one), by_kernels(two)
    run(one, 6)
    run(two, 6)
    assert (plain.backend, kernels.backend) == ("loop", "triton")
    rel = 1e-5 if dtype in (torch.float32, torch.complex64) else 2e-3
    for quantity in plain.quantities:
        torch.testing.assert_close(kernels[quantity], plain[quantity], rtol=rel, atol=rel / 10)
    assert float(plain["alignment"].abs().max()) > 0


def test_unscaling(by_kernels: Callable[[Optimizer], tam.Recorder]) -> None:
    one, two = (Adam(parameters(SHAPES[1:]), lr=1e-2, fused=True) for _ in range(2))
    plain, kernels = tam.Recorder(one), by_kernels(two)
    run(one, 4)
    two.grad_scale, two.found_inf = torch.tensor(256.0), torch.tensor(0.0)  # type: ignore[attr-defined]
    run(two, 4, scale=256.0)
    for quantity in plain.quantities:
        torch.testing.assert_close(kernels[quantity], plain[quantity], rtol=1e-5, atol=1e-6)


def test_other_layouts_and_new_tensors(by_kernels: Callable[[Optimizer], tam.Recorder]) -> None:
    """Torch's operations measure a gradient or momentum with other strides; new state is noticed."""
    one, two = (SGD(parameters([(4, 3), (5,)]), lr=0.1, momentum=0.9) for _ in range(2))
    plain, kernels = tam.Recorder(one), by_kernels(two)
    for t in range(6):
        for optimizer in (one, two):
            params = params_of(optimizer)
            for p, g in zip(params, gradients(params, t), strict=True):
                p.grad = g.t().contiguous().t() if t == 2 else g
            if t == 4:
                optimizer.load_state_dict(optimizer.state_dict())
                optimizer.state[params[0]]["momentum_buffer"] = torch.ones(4, 3)
            if t == 5:
                transposed = optimizer.state[params[0]]["momentum_buffer"].t().contiguous().t()
                optimizer.state[params[0]]["momentum_buffer"] = transposed
            optimizer.step()
        assert kernels.backend == ("loop" if t in (2, 5) else "triton")
    for quantity in plain.quantities:
        torch.testing.assert_close(kernels[quantity], plain[quantity], rtol=1e-5, atol=1e-6)


def test_single_quantities(by_kernels: Any) -> None:
    for quantity in ("alignment", "momentum_norm", "update_ratio", "effective_lr"):
        one, two = (SGD(parameters(SHAPES), lr=0.1, momentum=0.9) for _ in range(2))
        plain, kernels = tam.Recorder(one, quantity), by_kernels(two, quantities=quantity)
        run(one, 3)
        run(two, 3)
        torch.testing.assert_close(kernels[quantity], plain[quantity], rtol=1e-5, atol=1e-6)


def test_parameters_changed_between_steps_show(by_kernels: Any) -> None:
    optimizer = SGD(parameters(SHAPES), lr=0.1, momentum=0.9)
    recorder = by_kernels(optimizer)
    run(optimizer, 2)
    with torch.no_grad():
        params_of(optimizer)[2].add_(1.0)
    run(optimizer, 2)
    assert recorder["update_norm"].isnan().tolist() == [False, True, False, False]
    assert not recorder["momentum_norm"].isnan().any() and not recorder["alignment"].isnan().any()


def test_a_row_is_finished_when_it_is_read(by_kernels: Any) -> None:
    one, two = (SGD(parameters(SHAPES), lr=0.1, momentum=0.9) for _ in range(2))
    plain, kernels = tam.Recorder(one), by_kernels(two, capacity=2)
    for _ in range(5):
        run(one, 1)
        run(two, 1)
        for quantity in plain.quantities:
            torch.testing.assert_close(kernels[quantity], plain[quantity], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("there", [True, False])
def test_it_follows_a_warmup(there: bool, by_kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> tam.Warmup:
        params = parameters(SHAPES)
        if there:
            return tam.Warmup(tam.TAM(params, lr=0.1), SGD, 3, buffers="rescale")
        return tam.Warmup(SGD(params, lr=0.1, momentum=0.9), tam.TAM, 3)

    one, two = make(), make()
    plain = tam.Recorder(one)
    run(one, 6)
    # Not `by_kernels`: the recorder chooses an observer for the second optimizer, too.
    monkeypatch.setattr(recorder_module, "choose_observer", cuda.KernelObserver)
    kernels = tam.Recorder(two)
    run(two, 6)
    for quantity in plain.quantities:
        torch.testing.assert_close(kernels[quantity], plain[quantity], rtol=1e-5, atol=1e-6)


def test_groups_that_change(by_kernels: Any) -> None:
    """A parameter that comes later is measured from its first step on; maximize may be turned over."""
    for make in (lambda ps: tam.TAM(ps, lr=0.1), lambda ps: SGD(ps, lr=0.1, momentum=0.9)):
        one, two = (make(parameters(SHAPES)) for _ in range(2))
        plain, kernels = tam.Recorder(one), by_kernels(two)
        for optimizer in (one, two):
            run(optimizer, 3)
            optimizer.add_param_group({"params": parameters([(30,)], seed=3)})
            run(optimizer, 2)
            for group in optimizer.param_groups:
                group["maximize"] = True
            run(optimizer, 2)
        for quantity in plain.quantities:
            torch.testing.assert_close(
                kernels[quantity], plain[quantity], rtol=1e-5, atol=1e-6, equal_nan=True
            )
