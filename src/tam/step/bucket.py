"""What a step works on: tensors of one parameter group, device and dtype, with their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tam.step.eager import Arithmetic, accumulator


@dataclass
class Bucket:
    """Columns of tensors; row i belongs to parameter i.

    A way that works in place writes into the tensors; the pure way replaces the columns.
    """

    group: dict[str, Any]  # the parameter group: its options
    index: int  # which of the optimizer's groups it is
    theta: list[Tensor]
    grad: list[Tensor]
    state: dict[str, list[Tensor]]
    rows: list[int]  # where each row stood in the list the bucket was made from
    shares: list[int] = field(default_factory=list)  # of the exchange, for each row, where there is one

    @property
    def device(self) -> torch.device:
        return self.theta[0].device

    @property
    def compute_dtype(self) -> torch.dtype:
        """Arithmetic is float64 for float64 (and complex128) tensors, float32 for all others."""
        double = self.theta[0].dtype in (torch.float64, torch.complex128)
        return torch.float64 if double else torch.float32

    def working(self, column: list[Tensor]) -> list[Tensor]:
        """The column as real tensors of the compute dtype: the tensors themselves where they are."""
        dtype = self.compute_dtype
        return [x if x.dtype == dtype else _real(x).to(dtype) for x in column]

    def scalar(self, ops: Arithmetic, a: Any) -> Any:
        """A coefficient (lr and the like) as a number or as a 0-dim tensor of the compute dtype.

        A tensor on the CPU is read where the bucket is elsewhere: that waits for nothing. It stays a
        tensor where its graph matters (pure) and under torch.compile, so that new values need no new
        compilation.
        """
        if not isinstance(a, Tensor):
            return a
        kept = ops.pure or torch.compiler.is_compiling()
        if a.device != self.device and a.device.type == "cpu" and not kept:
            return float(a)
        return a.reshape(()).to(self.device, self.compute_dtype)

    def lr(self, ops: Arithmetic) -> Any:
        """Return the group's lr, under torch.compile always as a tensor.

        A tensor lr never causes a new compilation. A float lr causes one, when it first changes: torch
        compiles the first value in and only then makes the number an input of the graph.
        """
        lr = self.group["lr"]
        if torch.compiler.is_compiling() and not isinstance(lr, Tensor):
            # A product: `torch.full` would compile each new value in until torch gives up compiling.
            return torch.ones((), dtype=self.compute_dtype, device=self.device) * lr
        return self.scalar(ops, lr)


def fill(
    group: dict[str, Any],
    index: int,
    theta: list[Tensor],
    grad: list[Tensor],
    state: dict[str, list[Tensor]],
    shares: list[int] | None = None,
) -> list[Bucket]:
    """A group's tensors, in one bucket for each device and dtype among them."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, p in enumerate(theta):
        kinds.setdefault((p.device, p.dtype), []).append(i)
    return [
        Bucket(
            group,
            index,
            [theta[i] for i in rows],
            [grad[i] for i in rows],
            {key: [column[i] for i in rows] for key, column in state.items()},
            rows,
            [shares[i] for i in rows] if shares else [],
        )
        for rows in kinds.values()
    ]


def filled(like: Tensor, value: float) -> Tensor:
    """A tensor laid out like the given one; each part of a complex number is the value."""
    x = torch.zeros_like(like, memory_format=torch.preserve_format)
    if value:
        _real(x).fill_(value)
    return x


def _real(x: Tensor) -> Tensor:
    """A complex tensor as pairs of reals."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def write_back(ops: Arithmetic, column: list[Tensor], result: Iterable[Tensor]) -> list[Tensor]:
    """The column after a step whose working copies ended as `result`."""
    result = list(result)
    if ops.pure:
        pairs = zip(column, result, strict=True)
        return [
            torch.view_as_complex(new).to(old.dtype) if old.is_complex() else new.to(old.dtype)
            for old, new in pairs
        ]
    for x, new in zip(column, result, strict=True):
        if x.is_complex() and x.is_conj():  # the working copy was no view
            x.copy_(torch.view_as_complex(new))
        elif _real(x).dtype != new.dtype:
            _real(x).copy_(new)
    return column


def apply(
    ops: Arithmetic, rule: Callable[..., tuple[Any, ...]], columns: list[list[Any]]
) -> list[list[Tensor]]:
    """The rule over whole columns, or row by row where the arithmetic knows single tensors only."""
    if ops.lists:
        return [list(column) for column in rule(*columns)]
    rows = [rule(*row) for row in zip(*columns, strict=True)]
    return [list(column) for column in zip(*rows, strict=True)]


def advance(ops: Arithmetic, steps: list[Tensor]) -> list[Tensor]:
    """The step counts, one more."""
    if ops.pure:
        return [t + 1 for t in steps]
    torch._foreach_add_(steps, 1)
    return steps


def bias_corrections(ops: Arithmetic, bucket: Bucket, beta: float) -> list[Any]:
    """1 - beta^t for each row.

    Numbers where the step counts lie on the CPU and reading them waits for nothing; tensors where
    they lie on the device (capturable) or where their values must not be baked in.
    """
    steps = bucket.state["step"]
    on_cpu = steps[0].device.type == "cpu"
    if on_cpu and not (ops.pure or bucket.group["capturable"] or torch.compiler.is_compiling()):
        return [1 - beta ** float(t) for t in steps]
    wide = accumulator(steps[0].device)  # in float32, 1 - 0.999 would be off by 6e-5
    return [(1 - beta ** t.to(wide)).to(bucket.compute_dtype) for t in steps]
