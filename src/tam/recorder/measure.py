"""What is measured of a step, with torch's operations; `cuda.py` does the same in a kernel.

Nothing here waits for the device. A row of measurements has the readings of the step first: s of each
segment and |g| of our optimizers, <m, g>, |m|^2 and |g|^2 of the others; then |m|^2 after the step,
|update|^2 and |theta before|^2.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam.optimizers.torque import TorqueOptimizer
from tam.sharding import Exchange, exchange_of, is_dtensor, local_gradient, local_tensor, shards_of
from tam.step.eager import accumulator_dtype as accumulator
from tam.step.fused.support import is_dense as dense
from tam.step.fused.support import why_not_fused as obstacle

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
    in_pieces = shards_of(optimizer) is not None or any(map(is_dtensor, params))
    if params and not in_pieces and params[0].is_cuda and obstacle(params) is None:
        from tam.recorder.cuda import Kernels

        return Kernels(optimizer, wanted)
    return Operations(optimizer, wanted)


class Operations:
    """Measures with torch's operations, one tensor after the other, whatever tensors there are.

    Of parameters that lie in pieces on several ranks each rank measures its own; the sums are added up as the
    step's are, so that every rank must record.
    """

    def __init__(self, optimizer: Optimizer, wanted: set[str]) -> None:
        self.wanted = wanted
        self.width = 0
        self.copies: list[Tensor] = []
        self.exchange = exchange_of(optimizer)
        self.device = self.exchange.device or torch.device("cpu")
        self.sums = Sums(self.exchange)

    @torch.no_grad()
    def before(self, optimizer: Optimizer) -> None:
        readings = len(optimizer.segments.members()) + 1 if isinstance(optimizer, TorqueOptimizer) else 3
        self.width = readings + NORMS
        if not self.exchange.fits([params_of(optimizer)], "global", shards_of(optimizer)):
            self.exchange = exchange_of(optimizer)
        self.sums = Sums(self.exchange)
        if "update" in self.wanted:
            pieces = [*map(local_tensor, params_of(optimizer))]
            if [*map(_layout, pieces)] != [*map(_layout, self.copies)]:
                self.copies = [torch.empty_like(p) for p in pieces]
            for copy, p in zip(self.copies, pieces, strict=True):
                copy.copy_(p)
        if "cosine" in self.wanted and not isinstance(optimizer, TorqueOptimizer):
            self._measure_gradients(optimizer)

    def _measure_gradients(self, optimizer: Optimizer) -> None:
        """<m, g>, |m|^2 and |g|^2 of the parameters that have gradients."""
        scale = getattr(optimizer, "grad_scale", None)  # GradScaler leaves unscaling to a fused step
        for group in optimizer.param_groups:
            sign = -1 if group.get("maximize") else 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.layout is not torch.strided:
                    raise RuntimeError(f"sparse gradients ({p.grad.layout}) cannot be recorded")
                g, m = local_gradient(p, p.grad), momentum_of(optimizer, p)
                factor = 1 if scale is None else 1 / scale.to(g.device, accumulator(g.device))
                if m is not None:
                    self.sums.add(p, 0, dot(m, g) * factor * sign)
                    self.sums.add(p, 1, dot(m, m))
                self.sums.add(p, 2, dot(g, g) * factor * factor)

    @torch.no_grad()
    def after(self, optimizer: Optimizer, row: Tensor) -> None:
        params = params_of(optimizer)
        if "momentum" in self.wanted:
            for p in params:
                m = momentum_of(optimizer, p)
                if m is not None:
                    self.sums.add(p, 3, dot(m, m))
        if "update" in self.wanted:
            for p, copy in zip(params, self.copies, strict=True):
                wide = torch.promote_types(p.dtype, torch.float32)
                update = local_tensor(p).to(wide) - copy.to(wide)
                self.sums.add(p, 4, dot(update, update))
                self.sums.add(p, 5, dot(copy, copy))
        torque = isinstance(optimizer, TorqueOptimizer)
        # Nothing is exchanged for what the step itself knows.
        measured = {"momentum", "update"} & self.wanted or ("cosine" in self.wanted and not torque)
        totals = self.sums.totals(row.device) if measured else row.new_zeros(6)
        found = [totals]
        if isinstance(optimizer, TorqueOptimizer):
            found = [optimizer.alignment.reshape(-1), _norm_of(optimizer).reshape(1), totals[3:]]
        torch.cat([x.to(row) for x in found], out=row)

    def finish(self, optimizer: Optimizer) -> None:
        """They are."""


class Sums:
    """Six sums over all parameters, wherever their pieces lie."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.found: list[list[list[Tensor]]] = [[[] for _ in range(6)] for _ in exchange.shares]

    def add(self, p: Tensor, column: int, number: Tensor) -> None:
        self.found[self.exchange.share_of[p]][column].append(number)

    def totals(self, device: torch.device) -> Tensor:
        like = torch.empty(0, dtype=accumulator(device), device=device)
        rows = [torch.stack([total(column, like) for column in share]) for share in self.found]
        sums = torch.stack(rows)
        self.exchange.all_reduce_rows(sums)
        return sums.sum(0)


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
    """This rank's piece of m."""
    state = optimizer.state.get(p, {})
    m: Tensor | None = state.get("momentum_buffer", state.get("exp_avg"))
    return None if m is None else local_tensor(m)


def _norm_of(optimizer: TorqueOptimizer) -> Tensor:
    return optimizer.grad_norm if optimizer.segments.knows_grad_norm() else torch.tensor(math.nan)


def refuse_capture() -> None:
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a Recorder sees nothing of the steps a CUDA graph replays: close it before the capture"
        )


def _layout(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, x.device
