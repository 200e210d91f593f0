"""What a recorder measures of a step, with torch's operations. `cuda.py` does the same in one kernel.

Nothing here waits for the device. A row of measurements starts with the readings of the step: s of each
segment and |g| for TAM, AdaTAM and AdaTAMW; <m, g>, |m|^2 and |g|^2 for other optimizers. Behind them are
|m|^2 after the step, |update|^2 and |theta before|^2.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam.optimizers.torque import TorqueOptimizer
from tam.sharding.dtensor import local_tensor, redistribute_gradient
from tam.sharding.exchange import exchange_of
from tam.step.eager import accumulator_dtype
from tam.step.fused.support import is_dense

Measure = Literal["cosine", "momentum", "update"]
Backend = Literal["triton", "loop"]

NORMS = 3  # the numbers at the end of a row
_PART = 2**22  # numbers added in float32 before float64 takes over

# Sums over all parameters: <m, g>, |m|^2 and |g|^2 of those that have a gradient, and the norms of a row.
Total = IntEnum("Total", "MG MM GG MOMENTUM UPDATE THETA", start=0)


class Observer(Protocol):
    """Measures the steps of one optimizer."""

    device: torch.device  # of the rows
    width: int  # the length of a row

    @property
    def backend(self) -> Backend:
        """What measured the last step."""

    def measure_before(self) -> None:
        """Measure what must be known before the step."""

    def measure_after(self, row: Tensor) -> None:
        """Write the row of the step just taken, now or in `finish_row`."""

    def finish_row(self) -> None:
        """Write the last row if it is not written yet."""


class TorchObserver:
    """Measures any tensors with torch's operations, one tensor after the other.

    Each rank measures its own shards. The ranks add up their sums, so every rank must record.
    """

    backend: Backend = "loop"

    def __init__(self, optimizer: Optimizer, measures: set[Measure]) -> None:
        self.optimizer, self.measures = optimizer, measures
        self.width = 0
        self.copies: list[Tensor] = []
        self.exchange = exchange_of(optimizer)
        self.device = self.exchange.device or torch.device("cpu")
        self.terms: list[list[list[Tensor]]] = []  # of the totals, per share and column

    @torch.no_grad()
    def measure_before(self) -> None:
        readings = 3
        if isinstance(self.optimizer, TorqueOptimizer):
            readings = len(self.optimizer.segments.members()) + 1
        self.width = readings + NORMS
        self.exchange = exchange_of(self.optimizer, self.exchange)
        self.terms = [[[] for _ in Total] for _ in self.exchange.shares]
        if "update" in self.measures:
            shards = [*map(local_tensor, params_of(self.optimizer))]
            if [*map(_form_of, shards)] != [*map(_form_of, self.copies)]:
                self.copies = [torch.empty_like(p) for p in shards]
            for copy, p in zip(self.copies, shards, strict=True):
                copy.copy_(p)
        if "cosine" in self.measures:
            self._measure_gradients()

    def _measure_gradients(self) -> None:
        """Add <m, g>, |m|^2 and |g|^2 of the parameters that have gradients."""
        scale = getattr(self.optimizer, "grad_scale", None)  # GradScaler leaves unscaling to a fused step
        for group in self.optimizer.param_groups:
            sign = -1 if group.get("maximize") else 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.layout is not torch.strided:
                    raise RuntimeError(f"a recorder needs dense gradients, got one of {p.grad.layout}")
                g, m = redistribute_gradient(p, p.grad), momentum_of(self.optimizer, p)
                factor = 1 if scale is None else 1 / scale.to(g.device, accumulator_dtype(g.device))
                if m is not None:
                    self._add(p, Total.MG, dot(m, g) * factor * sign)
                    self._add(p, Total.MM, dot(m, m))
                self._add(p, Total.GG, dot(g, g) * factor * factor)

    @torch.no_grad()
    def measure_after(self, row: Tensor) -> None:
        params = params_of(self.optimizer)
        if "momentum" in self.measures:
            for p in params:
                m = momentum_of(self.optimizer, p)
                if m is not None:
                    self._add(p, Total.MOMENTUM, dot(m, m))
        if "update" in self.measures:
            for p, copy in zip(params, self.copies, strict=True):
                wide = torch.promote_types(p.dtype, torch.float32)
                update = local_tensor(p).to(wide) - copy.to(wide)
                self._add(p, Total.UPDATE, dot(update, update))
                self._add(p, Total.THETA, dot(copy, copy))
        # The ranks exchange nothing for what the step itself knows.
        totals = self._all_reduce_terms(row.device) if self.measures else row.new_zeros(len(Total))
        parts = [totals]
        if isinstance(self.optimizer, TorqueOptimizer):
            s, norm = self.optimizer.alignment, self.optimizer.grad_norm
            parts = [s.reshape(-1), norm.reshape(1), totals[Total.MOMENTUM :]]
        torch.cat([x.to(row) for x in parts], out=row)

    def finish_row(self) -> None:
        pass  # `measure_after` has written it

    def _add(self, p: Tensor, column: Total, term: Tensor) -> None:
        self.terms[self.exchange.share_of[p]][column].append(term)

    def _all_reduce_terms(self, device: torch.device) -> Tensor:
        """Return the totals over the shards of all ranks."""
        zero = torch.zeros((), dtype=accumulator_dtype(device), device=device)

        def add_up(terms: list[Tensor]) -> Tensor:
            return torch.stack([x.to(zero) for x in terms]).sum() if terms else zero

        sums = torch.stack([torch.stack([*map(add_up, share)]) for share in self.terms])
        self.exchange.all_reduce_rows(sums)
        return sums.sum(0)


def dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of x y. Complex tensors are pairs of reals; float16 and bfloat16 become float32."""
    x, y = (torch.view_as_real(v.resolve_conj()) if v.is_complex() else v for v in (x, y))
    if x.stride() == y.stride() and is_dense(x):  # in the order of the memory: no copy
        x, y = (v.as_strided((v.numel(),), (1,)) for v in (x, y))
    wide = torch.promote_types(x.dtype, torch.float32)
    parts = zip(torch.split(x.reshape(-1), _PART), torch.split(y.reshape(-1), _PART), strict=True)
    dots = [torch.dot(a.to(wide), b.to(wide)).to(accumulator_dtype(x.device)) for a, b in parts]
    return torch.stack(dots).sum()


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def momentum_of(optimizer: Optimizer, p: Tensor) -> Tensor | None:
    """Return this rank's shard of m, or None before the parameter's first gradient."""
    state = optimizer.state.get(p, {})
    m: Tensor | None = state.get("momentum_buffer", state.get("exp_avg"))
    return None if m is None else local_tensor(m)


def _form_of(x: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return x.shape, x.dtype, x.device
