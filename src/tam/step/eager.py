"""Steps made of torch operations: the tensors they work on, and the arithmetic their rules are written in.

A rule (`rule.py`, `angular.py`) is written once, in calls like `ops.mul_(m, beta)`. Its operands are

- tensors, with `LOOP` (in place) or `PURE` (nothing is changed: for autograd and vmap),
- lists of tensors of one device and dtype, with `FOREACH`.

A trailing underscore means that the first operand is not needed afterwards: `LOOP` and `FOREACH` write into
it, `PURE` does not. A coefficient is a number, a 0-dim tensor or, with `FOREACH`, also a list with one entry
per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

GroupOptions = dict[str, Any]  # a parameter group of an optimizer
Coefficient = Any  # a number, a 0-dim tensor, or a list of them
Operand = Any  # a tensor, or a list of tensors


SUM_DTYPES = {"mps": torch.float32}  # of sums over tensors; float64 on all other devices


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums over tensors are kept."""
    return SUM_DTYPES.get(device.type, torch.float64)


# ---------------------------------------------------------------------- arithmetic


@dataclass(frozen=True)
class Arithmetic:
    """The operations of the rules, on tensors or lists of tensors, in place or pure."""

    name: Literal["pure", "loop", "foreach"]
    takes_lists: bool = False  # operands are lists; temporaries are as large as the list
    is_pure: bool = False  # no operand is ever written to

    def neg(self, x: Operand) -> Operand:
        return torch._foreach_neg(x) if self.takes_lists else -x

    def sqrt(self, x: Operand) -> Operand:
        return torch._foreach_sqrt(x) if self.takes_lists else x.sqrt()

    def mul(self, x: Operand, y: Operand) -> Operand:
        return torch._foreach_mul(x, y) if self.takes_lists else x * y

    def mul_(self, x: Operand, y: Operand) -> Operand:
        if self.is_pure:
            return x * y
        if not self.takes_lists:
            return x.mul_(y)
        torch._foreach_mul_(x, y)
        return x

    def div_(self, x: Operand, y: Operand) -> Operand:
        if self.is_pure:
            return x / y
        if not self.takes_lists:
            return x.div_(y)
        torch._foreach_div_(x, y)
        return x

    def add_(self, x: Operand, c: float) -> Operand:
        if self.is_pure:
            return x + c
        if not self.takes_lists:
            return x.add_(c)
        torch._foreach_add_(x, c)
        return x

    def axpy(self, x: Operand, y: Operand, a: Coefficient) -> Operand:
        """Return x + a y."""
        # add(alpha=) takes numbers only: a tensor there would be read back from the device.
        if not self.takes_lists:
            return torch.addcmul(x, y, a) if isinstance(a, Tensor) else torch.add(x, y, alpha=a)
        if isinstance(a, (Tensor, list)):
            return torch._foreach_add(x, torch._foreach_mul(y, a))
        return torch._foreach_add(x, y, alpha=a)

    def axpy_(self, x: Operand, y: Operand, a: Coefficient) -> Operand:
        if self.is_pure:
            return self.axpy(x, y, a)
        if not self.takes_lists:
            return x.addcmul_(y, a) if isinstance(a, Tensor) else x.add_(y, alpha=a)
        if isinstance(a, (Tensor, list)):
            torch._foreach_add_(x, torch._foreach_mul(y, a))
        else:
            torch._foreach_add_(x, y, alpha=a)
        return x

    def addcdiv_(self, x: Operand, y: Operand, z: Operand, a: Coefficient) -> Operand:
        """Return x + a y / z."""
        if isinstance(a, Tensor):
            return self.axpy_(x, torch._foreach_div(y, z) if self.takes_lists else y / z, a)
        if self.is_pure:
            return torch.addcdiv(x, y, z, value=a)
        if not self.takes_lists:
            return x.addcdiv_(y, z, value=a)
        torch._foreach_addcdiv_(x, y, z, value=a)
        return x

    def dot(self, x: list[Tensor], y: list[Tensor], dtype: torch.dtype) -> Tensor:
        """Return the sum of x y over the elements of each pair of tensors."""
        # The three sums of the cosine must be of one kind, or their rounding could make |S| > 1.
        if self.takes_lists:
            return torch.stack([product.sum(dtype=dtype) for product in torch._foreach_mul(x, y)])
        return torch.stack([torch.sum(a * b, dtype=dtype) for a, b in zip(x, y, strict=True)])


PURE = Arithmetic("pure", is_pure=True)
LOOP = Arithmetic("loop")
FOREACH = Arithmetic("foreach", takes_lists=True)


def choose_arithmetic(
    tensors: Iterable[Tensor], *, foreach: bool | None, differentiable: bool = False
) -> Arithmetic:
    """Return the arithmetic for these parameters; `foreach=None` leaves the choice to us."""
    if differentiable:
        return PURE
    if foreach is None:
        # The foreach operations know plain tensors only, not every subclass. On a CPU they save nothing
        # and need memory of the model's size, so the loop is used there, as in torch.optim.
        wanted = torch.compiler.is_compiling()
        foreach = all(type(p) in (Tensor, Parameter) and (wanted or not p.is_cpu) for p in tensors)
    return FOREACH if foreach else LOOP


# ---------------------------------------------------------------------- tensors


@dataclass
class Bucket:
    """Tensors of one parameter group, device and dtype, as columns; row i belongs to parameter i.

    An arithmetic that works in place writes into the tensors; the pure one replaces the columns.
    """

    group: GroupOptions
    index: int  # which of the optimizer's groups it is
    theta: list[Tensor]
    grad: list[Tensor]
    state: dict[str, list[Tensor]]
    rows: list[int]  # where each row stood in the list the bucket was made from
    shares: list[int]  # of the exchange with other ranks, for each row; empty without one
    device: torch.device
    compute_dtype: torch.dtype  # float64 for float64 and complex128 tensors, float32 for all others
    sum_dtype: torch.dtype  # of sums over all elements
    needs_cast: bool  # some tensors are not of the compute dtype
    segments: list[int] = field(default_factory=list)  # of each row, in the order of the step's sums

    def scalar(self, ops: Arithmetic, a: Coefficient) -> Coefficient:
        """Return a coefficient as a number or as a 0-dim tensor of the compute dtype.

        A tensor on the CPU is read if the bucket is elsewhere: that waits for nothing. It stays a tensor if
        its graph matters (pure) and under torch.compile, where new values then need no new compilation.
        """
        if not isinstance(a, Tensor):
            return a
        stays_tensor = ops.is_pure or torch.compiler.is_compiling()
        if a.device != self.device and a.device.type == "cpu" and not stays_tensor:
            return float(a)
        return a.reshape(()).to(self.device, self.compute_dtype)

    def lr_tensor(self, ops: Arithmetic) -> Coefficient:
        """Return the lr if it is a tensor, or as a tensor under torch.compile."""
        lr = self.group["lr"]
        return self.scalar(ops, lr) if isinstance(lr, Tensor) else self.graph_input(lr)

    def graph_input(self, value: float) -> Tensor:
        """Return a number as a tensor under torch.compile, for options that schedulers change.

        It causes one new compilation, when it first changes: torch compiles the first value in and only then
        makes the number an input of the graph.
        """
        # A product: `torch.full` would compile each new value in until torch gives up compiling.
        return torch.ones((), dtype=self.compute_dtype, device=self.device) * value

    def bias_corrections(self, ops: Arithmetic, beta: float) -> list[Coefficient]:
        """Return 1 - beta^t for each row.

        Numbers if the step counts are on the CPU, where reading them waits for nothing; tensors if they are
        on the device (capturable) or if their values must not be baked in.
        """
        steps = self.state["step"]
        on_cpu = steps[0].device.type == "cpu"
        if on_cpu and not (ops.is_pure or self.group["capturable"] or torch.compiler.is_compiling()):
            return [1 - beta ** float(t) for t in steps]
        wide = accumulator_dtype(steps[0].device)  # in float32, 1 - 0.999 would be off by 6e-5
        return [(1 - beta ** t.to(wide)).to(self.compute_dtype) for t in steps]

    def map_rows(
        self, ops: Arithmetic, rule: Callable[..., tuple[Operand, ...]], keys: list[str],
        *coefficients: Coefficient,
    ) -> None:  # fmt: skip
        """Replace theta and the state of these keys by what the rule makes of theta, g, state, coefficients.

        The rule is applied to whole columns, or row by row if the arithmetic takes single tensors. A
        coefficient that is a list has one entry per row.
        """
        columns = [self.theta, self.grad, *(self.state[key] for key in keys)]
        if self.needs_cast:
            columns = [as_compute_dtype(column, self.compute_dtype) for column in columns]
        if ops.takes_lists:
            results = [list(column) for column in rule(*columns, *coefficients)]
        else:
            per_row = [a if isinstance(a, list) else [a] * len(self.theta) for a in coefficients]
            rows = [rule(*row) for row in zip(*columns, *per_row, strict=True)]
            results = [list(column) for column in zip(*rows, strict=True)]
        if self.needs_cast or ops.is_pure:
            targets = [self.theta, *(self.state[key] for key in keys)]
            results = [write_back(ops, *pair) for pair in zip(targets, results, strict=True)]
        self.theta = results[0]
        self.state.update(zip(keys, results[1:], strict=True))


def make_buckets(
    group: GroupOptions, index: int, theta: list[Tensor], grad: list[Tensor],
    state: dict[str, list[Tensor]], shares: list[int] | None = None,
) -> list[Bucket]:  # fmt: skip
    """Return a group's tensors in one bucket per device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, p in enumerate(theta):
        kinds.setdefault((p.device, p.dtype), []).append(i)
    buckets = []
    for (device, dtype), rows in kinds.items():
        compute_dtype = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
        params, grads = [theta[i] for i in rows], [grad[i] for i in rows]
        columns = {key: [column[i] for i in rows] for key, column in state.items()}
        # State may be of another dtype than its parameter, which somebody has cast.
        others = (grads, *(column for key, column in columns.items() if key not in ("step", "alignment")))
        needs_cast = dtype != compute_dtype or any(x.dtype != compute_dtype for c in others for x in c)
        dtypes = compute_dtype, SUM_DTYPES.get(device.type, torch.float64), needs_cast
        row_shares = [shares[i] for i in rows] if shares else []
        buckets.append(Bucket(group, index, params, grads, columns, rows, row_shares, device, *dtypes))
    return buckets


def increment_steps(ops: Arithmetic, steps: list[Tensor]) -> list[Tensor]:
    """Return the step counts, one more."""
    if ops.is_pure:
        return [t + 1 for t in steps]
    torch._foreach_add_(steps, 1)
    return steps


def full_like_param(p: Tensor, value: float) -> Tensor:
    """Return a tensor laid out like the parameter; each part of a complex number is the value."""
    x = torch.zeros_like(p, memory_format=torch.preserve_format)
    if value:
        _as_real(x).fill_(value)
    return x


def _as_real(x: Tensor) -> Tensor:
    """Return a complex tensor as pairs of reals."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def as_compute_dtype(column: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the column as real tensors of the compute dtype: the tensors themselves where they are."""
    return [x if x.dtype == dtype else _as_real(x).to(dtype) for x in column]


def write_back(ops: Arithmetic, column: list[Tensor], result: list[Tensor]) -> list[Tensor]:
    """Return the column after a step whose copies in the compute dtype ended as `result`."""
    if ops.is_pure:
        return [
            torch.view_as_complex(new).to(old.dtype) if old.is_complex() else new.to(old.dtype)
            for old, new in zip(column, result, strict=True)
        ]
    for x, new in zip(column, result, strict=True):
        if x.is_complex() and x.is_conj():  # the copy was no view
            x.copy_(torch.view_as_complex(new))
        elif _as_real(x).dtype != new.dtype:
            _as_real(x).copy_(new)
    return column
