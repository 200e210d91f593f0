"""What the tests share: the optimizers, the backends of their step, and streams of gradients."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tam.optimizers.base import Base
from tam.reference import Group, Reference
from tam.registry import OPTIMIZERS


def options_for(cls: type, **wanted: Any) -> dict[str, Any]:
    """Those of the wanted options that the class takes."""
    return {name: value for name, value in wanted.items() if name in inspect.signature(cls).parameters}


# The registry lists torch's optimizers, too.
ALL: list[Any] = [info.cls for info in OPTIMIZERS.values() if issubclass(info.cls, Base)]
TORQUE: list[Any] = [info.cls for info in OPTIMIZERS.values() if info.has_alignment]
WAYS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
PAIRS = [(cls, way) for cls in ALL for way, options in WAYS.items() if options_for(cls, **options)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


def gradients(params: Sequence[Tensor], step: int, seed: int = 0) -> list[Tensor]:
    """Normal gradients that depend on (seed, step) alone."""
    generator = torch.Generator().manual_seed(100_003 * seed + step)
    real = [torch.view_as_real(p.detach()) if p.is_complex() else p.detach() for p in params]
    drawn = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in real]
    return [torch.view_as_complex(g) if p.is_complex() else g for p, g in zip(params, drawn, strict=True)]


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def train(
    optimizer: torch.optim.Optimizer, steps: int, seed: int = 0, start: int = 0
) -> torch.optim.Optimizer:
    """Steps on the normal stream; the same (seed, start, steps) give the same gradients."""
    params = params_of(optimizer)
    for step in range(start, start + steps):
        for p, g in zip(params, gradients(params, step, seed), strict=True):
            p.grad = g
        optimizer.step()
    return optimizer


def momentum_key(state: Mapping[str, Any]) -> str:
    """The name of m in a parameter's state: the one torch's optimizers give it."""
    return "momentum_buffer" if "momentum_buffer" in state else "exp_avg"


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters and all state, in a fixed order."""
    found: list[Tensor] = []
    for p in params_of(optimizer):
        state = optimizer.state.get(p, {})
        found += [p.detach(), *(state[key] for key in sorted(state))]
    return found


def assert_same(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """To the bit."""
    left, right = tensors(a), tensors(b)
    assert len(left) == len(right)
    for x, y in zip(left, right, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert torch.equal(x, y), (x - y).abs().max()


def assert_close(a: Tensor, b: Tensor, tol: float, scale: float = 0.0) -> None:
    """|a - b| <= tol max|b|, per tensor; `scale` raises max|b| where b alone gives no scale."""
    a, b = a.detach(), b.detach()
    assert a.shape == b.shape
    if b.numel():
        error = float((a.to(b.dtype) - b).abs().max())
        scale = max(scale, float(b.abs().max()))
        assert error <= tol * scale, f"|a - b| = {error:.3g}, max|b| = {scale:.3g}"


def code_in(error: pytest.ExceptionInfo[Exception]) -> str:
    """The line of code that a message gives in brackets."""
    (code,) = re.findall(r"\((for .*?)\)", str(error.value))
    return str(code)


def reference_of(optimizer: torch.optim.Optimizer) -> Reference:
    """The oracle with the optimizer's options, parameters and state, in float64."""
    groups = []
    for g in optimizer.param_groups:
        beta1, beta2 = g["betas"] if "betas" in g else (g["momentum"], 0.0)
        theta = [_wide(p) for p in g["params"]]
        options = {k: g[k] for k in ("lr", "weight_decay", "floor", "maximize")}
        groups.append(Group(theta, momentum=beta1, beta2=beta2, eps=g.get("eps", 0.0), **options))
    first = optimizer.param_groups[0]
    shared = {k: first[k] for k in ("scope", "smoothing", "gain", "max_grad_norm")}
    shared |= {k: first[k] for k in ("ema", "bias_correction") if k in first}
    reference = Reference(groups, rule=type(optimizer).__name__.lower(), **shared)
    for i, g in enumerate(optimizer.param_groups):
        for j, p in enumerate(g["params"]):
            state = optimizer.state.get(p, {})
            if state:
                reference.m[i][j] = _wide(state[momentum_key(state)])
                if "exp_avg_sq" in state:
                    reference.v[i][j] = _wide(state["exp_avg_sq"])
                    reference.t[i][j] = int(state["step"])
                reference.s[reference.segment(i, j)] = float(state["alignment"])
    return reference


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64, copy=True)


class Path:
    """The largest a tensor of one number has been: where it crosses 0 its own size is no scale."""

    def __init__(self) -> None:
        self.largest: dict[tuple[str, int, int], float] = {}

    def follow(self, reference: Reference) -> None:
        for i, group in enumerate(reference.groups):
            for j, p in enumerate(group.theta):
                if p.numel() == 1:
                    for key, x in (("theta", p), ("m", reference.m[i][j])):
                        now = float(x.abs())
                        self.largest[key, i, j] = max(now, self.largest.get((key, i, j), 0.0))

    def scale(self, key: str, i: int, j: int) -> float:
        return self.largest.get((key, i, j), 0.0)


def compare_with_reference(
    optimizer: torch.optim.Optimizer, reference: Reference, path: Path | None = None
) -> None:
    path = path or Path()
    for i, g in enumerate(optimizer.param_groups):
        for j, p in enumerate(g["params"]):
            tol = TOLERANCE[_real_dtype(p)]
            assert_close(p, reference.groups[i].theta[j], tol, path.scale("theta", i, j))
            state = optimizer.state.get(p, {})
            if state:
                m = state[momentum_key(state)]
                assert_close(m, reference.m[i][j], tol, path.scale("m", i, j))
                s = reference.s[reference.segment(i, j)]
                assert abs(float(state["alignment"]) - s) <= tol
            if "exp_avg_sq" in state:
                assert_close(state["exp_avg_sq"], reference.v[i][j], tol)
                assert int(state["step"]) == reference.t[i][j]


def _real_dtype(p: Tensor) -> torch.dtype:
    return torch.view_as_real(p).dtype if p.is_complex() else p.dtype
