"""What users and allocators do to tensors between two steps, for every device.

Allocators reuse addresses. Here that is made certain: gradients of different layouts are views of one buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.helpers import assert_close, momentum_key, options_for

SIDE = 24
STEPS = 6

# Given a real buffer of SIDE * SIDE numbers and the number of the step, the gradient of a square parameter.
GRADIENTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "transposed": lambda buffer, step: buffer.t() if step % 2 else buffer,
    "expanded": lambda buffer, step: buffer[:1].expand(SIDE, SIDE) if step % 2 else buffer,
    "negated": lambda buffer, step: torch._neg_view(buffer) if step % 2 else buffer,
}


def square(dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIDE, SIDE, generator=generator, dtype=torch.float64).to(device).to(dtype)


class Twins:
    """An optimizer and another one that steps with torch's operations, one tensor after the other."""

    def __init__(
        self, cls: type, way: dict[str, Any], device: str, dtype: torch.dtype = torch.float32
    ) -> None:
        values = square(dtype, device, 1)
        self.params = [torch.nn.Parameter(values.clone()) for _ in range(2)]
        plain = options_for(cls, foreach=False, fused=False)
        self.optimizers = [cls([self.params[0]], lr=1e-2, **way), cls([self.params[1]], lr=1e-2, **plain)]

    def change(self, what: Callable[[Any, torch.nn.Parameter], None]) -> None:
        with torch.no_grad():
            for optimizer, p in zip(self.optimizers, self.params, strict=True):
                what(optimizer, p)

    def step(self, gradient: Tensor) -> None:
        """The first takes the gradient as it is, the second a plain copy of it."""
        plain = torch.empty(gradient.shape, dtype=gradient.dtype, device=gradient.device).copy_(gradient)
        for optimizer, p, g in zip(self.optimizers, self.params, (gradient, plain), strict=True):
            p.grad = g
            optimizer.step()

    def compare(self, tolerance: float = 2e-5) -> None:
        p, q = self.params
        assert_close(p, q, tolerance)
        states = [o.state[x] for o, x in zip(self.optimizers, self.params, strict=True)]
        for key, value in states[1].items():
            if isinstance(value, Tensor):
                scale = 1.0 if key == "alignment" else 0.0
                assert_close(states[0][key].to(value.dtype), value, tolerance, scale)


def gradients_at_one_address(cls: type, way: dict[str, Any], device: str, kind: str) -> None:
    twins = Twins(cls, way, device)
    buffer = torch.empty(SIDE, SIDE, device=device)
    for step in range(STEPS):
        buffer.copy_(square(torch.float32, device, 100 + step))
        twins.step(GRADIENTS[kind](buffer, step))
        twins.compare()


def conjugated_gradients(cls: type, way: dict[str, Any], device: str) -> None:
    twins = Twins(cls, way, device, torch.complex64)
    buffer = torch.empty(SIDE, SIDE, device=device, dtype=torch.complex64)
    for step in range(STEPS):
        parts = [square(torch.float32, device, 100 * part + step) for part in (1, 2)]
        buffer.copy_(torch.complex(*parts))
        twins.step(buffer.conj() if step % 2 else buffer)
        twins.compare()


def _transpose(optimizer: Any, p: torch.nn.Parameter) -> None:
    p.data = p.data.t()


def _replace_momentum(optimizer: Any, p: torch.nn.Parameter) -> None:
    state = optimizer.state[p]
    state[momentum_key(state)].data = torch.full_like(p, 0.5)


def _transpose_momentum(optimizer: Any, p: torch.nn.Parameter) -> None:
    state = optimizer.state[p]
    state[momentum_key(state)].t_()


def _keep_a_note(optimizer: Any, p: torch.nn.Parameter) -> None:
    optimizer.state[p]["note"] = "mine"
    optimizer.state["wrapper"] = {"count": len(optimizer.state)}


def _narrow(optimizer: Any, p: torch.nn.Parameter) -> None:
    p.grad = None
    p.data = p.data.bfloat16()


CHANGES = {
    "parameter transposed": _transpose,
    "momentum replaced": _replace_momentum,
    "momentum transposed": _transpose_momentum,
    "a user's own state": _keep_a_note,
}


def change_between_steps(cls: type, way: dict[str, Any], device: str, kind: str) -> None:
    twins = Twins(cls, way, device)
    for step in range(STEPS):
        if step % 2:
            twins.change(CHANGES[kind])
        twins.step(square(torch.float32, device, 100 + step))
        twins.compare()


def another_dtype(cls: type, way: dict[str, Any], device: str) -> None:
    twins = Twins(cls, way, device)
    for step in range(STEPS):
        if step == 3:
            twins.change(_narrow)
        twins.step(square(twins.params[0].dtype, device, 100 + step))
        twins.compare(2e-5 if step < 3 else 4e-2)


def a_note_before_the_first_step(cls: type, way: dict[str, Any], device: str) -> None:
    twins = Twins(cls, way, device)
    twins.change(_keep_a_note)
    for step in range(3):
        twins.step(square(torch.float32, device, 100 + step))
        twins.compare()
    optimizer, p = twins.optimizers[0], twins.params[0]
    assert optimizer.state[p]["note"] == "mine" and "count" in optimizer.state["wrapper"]
