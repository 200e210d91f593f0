"""What is measured of a step, with torch's operations; `cuda.py` does the same in a kernel.

Nothing here waits for the device. A row of measurements has the readings of the step first: s of each
segment and |g| of our optimizers, <m, g>, |m|^2 and |g|^2 of the others; then |m|^2 after the step,
|update|^2 and |theta before|^2.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam.kernels.arithmetic import accumulator
from tam.kernels.fused import dense, obstacle
from tam.optimizers.torque import TorqueOptimizer

NORMS = 3  # the numbers at the end of a row
_PART = 2**22  # numbers added in float32 before float64 takes over


class Observer(Protocol):
    """Measures the steps of one optimizer."""

    device: torch.device  # where the rows are
    width: int  # how many numbers a row has

    def before(self, optimizer: Optimizer) -> None:
        """What must be known before the step."""

    def after(self, optimizer: Optimizer, row: Tensor) -> None:
        """Writes the row of the step just taken, now or when it is finished."""

    def finish(self, optimizer: Optimizer) -> None:
        """Sees to it that all rows are written."""


def observer(optimizer: Optimizer, wanted: set[str]) -> Observer:
    """The fastest way to measure "cosine", "momentum" and "update", as far as they are wanted."""
    params = params_of(optimizer)
    if params[0].is_cuda and obstacle(params) is None:
        from tam.recording.cuda import Kernels

        return Kernels(optimizer, wanted)
    return Operations(optimizer, wanted)


class Operations:
    """Measures with torch's operations, one tensor after the other, whatever tensors there are."""

    def __init__(self, optimizer: Optimizer, wanted: set[str]) -> None:
        self.device, self.wanted = params_of(optimizer)[0].device, wanted
        self.width = 0
        self.copies: list[Tensor] = []
        self.sums = torch.zeros(3, device=self.device)

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        readings = len(optimizer.segments()) + 1 if isinstance(optimizer, TorqueOptimizer) else 3
        self.width = readings + NORMS
        if "update" in self.wanted:
            params = params_of(optimizer)
            if [*map(_layout, params)] != [*map(_layout, self.copies)]:
                self.copies = [torch.empty_like(p) for p in params]
            for copy, p in zip(self.copies, params, strict=True):
                copy.copy_(p)
        if "cosine" in self.wanted and not isinstance(optimizer, TorqueOptimizer):
            self.sums = gradient_sums(optimizer)

    @torch.no_grad()
    def after(self, optimizer: Optimizer, row: Tensor) -> None:
        found = [self.sums.to(row)]
        if isinstance(optimizer, TorqueOptimizer):
            found = [optimizer.alignment.reshape(-1).to(row), optimizer.grad_norm.reshape(1).to(row)]
        squares: list[list[Tensor]] = [[], [], []]
        params = params_of(optimizer)
        if "momentum" in self.wanted:
            momenta = [m for p in params if (m := momentum_of(optimizer, p)) is not None]
            squares[0] = [dot(m, m) for m in momenta]
        if "update" in self.wanted:
            for p, copy in zip(params, self.copies, strict=True):
                wide = torch.promote_types(p.dtype, torch.float32)
                update = p.to(wide) - copy.to(wide)
                squares[1].append(dot(update, update))
                squares[2].append(dot(copy, copy))
        torch.cat([*found, *(total(column, row).reshape(1) for column in squares)], out=row)

    def finish(self, optimizer: Optimizer) -> None:
        """They are."""


def gradient_sums(optimizer: Optimizer) -> Tensor:
    """<m, g>, |m|^2 and |g|^2 of the parameters that have gradients."""
    sums: list[list[Tensor]] = [[], [], []]
    for group in optimizer.param_groups:
        sign = -1 if group.get("maximize") else 1
        for p in group["params"]:
            if p.grad is None:
                continue
            if p.grad.layout is not torch.strided:
                raise RuntimeError(f"sparse gradients ({p.grad.layout}) cannot be recorded")
            m = momentum_of(optimizer, p)
            if m is not None:
                sums[0].append(sign * dot(m, p.grad))
                sums[1].append(dot(m, m))
            sums[2].append(dot(p.grad, p.grad))
    device = params_of(optimizer)[0].device
    like = torch.empty(0, dtype=accumulator(device), device=device)
    mg, mm, gg = (total(column, like) for column in sums)
    scale = getattr(optimizer, "grad_scale", None)  # GradScaler leaves unscaling to a fused step
    if scale is not None:
        scale = scale.to(gg)
        mg, gg = mg / scale, gg / scale.square()
    return torch.stack([mg, mm, gg])


def dot(x: Tensor, y: Tensor) -> Tensor:
    """The sum of x y. Two complex tensors are pairs of reals; float16 and the like are taken as float32."""
    x, y = (torch.view_as_real(v.resolve_conj()) if v.is_complex() else v for v in (x, y))
    if x.stride() == y.stride() and dense(x):  # in the order they lie in memory, whatever it is
        x, y = (v.as_strided((v.numel(),), (1,)) for v in (x, y))
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = zip(torch.split(x.reshape(-1), _PART), torch.split(y.reshape(-1), _PART), strict=True)
    found = [torch.dot(a.to(wide), b.to(wide)).to(accumulator(x.device)) for a, b in parts]
    return torch.stack(found).sum()


def total(numbers: list[Tensor], like: Tensor) -> Tensor:
    """The sum of all, where and as `like` is."""
    return torch.stack([x.to(like) for x in numbers]).sum() if numbers else like.new_zeros(())


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def momentum_of(optimizer: Optimizer, p: Tensor) -> Tensor | None:
    state = optimizer.state.get(p, {})
    m: Tensor | None = state.get("momentum_buffer", state.get("exp_avg"))
    return m


def refuse_capture() -> None:
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a Recorder sees nothing of the steps a CUDA graph replays: close it before the capture"
        )


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.device
