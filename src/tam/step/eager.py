"""The arithmetic the rules are written in, so that each rule is written once.

A rule (`torque.py`, `angular.py`) calls `ops.mul_(m, beta)` and the like. Its operands are

- tensors, with `Loop` (in place) or `Pure` (nothing is changed: for autograd and vmap),
- lists of tensors of one device and dtype, with `Foreach`.

A trailing underscore means that the first operand is not needed afterwards: `Loop` and `Foreach`
then write into it, `Pure` does not. A coefficient is a number, a 0-dim tensor or, with `Foreach`,
also a list with one entry per tensor.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

T = Any  # an operand: Tensor, or list[Tensor] with Foreach; or a coefficient


def accumulator(device: torch.device) -> torch.dtype:
    """The dtype in which sums over tensors are kept: float64 wherever the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def nonzero(a: Any) -> bool:
    """Whether a term with this coefficient must be computed. Never reads a tensor's value."""
    return isinstance(a, Tensor) or a != 0


class Pure:
    """One tensor; out of place."""

    lists: ClassVar[bool] = False  # operands are lists of tensors
    pure: ClassVar[bool] = True  # no operand is ever written to

    def neg(self, x: T) -> T:
        return -x

    def abs_(self, x: T) -> T:
        return x.abs()

    def mul(self, x: T, y: T) -> T:
        return x * y

    mul_ = mul

    def div_(self, x: T, y: T) -> T:
        return x / y

    def add_(self, x: T, c: float) -> T:
        return x + c

    def axpy(self, x: T, y: T, a: T) -> T:
        """x + a y"""
        # add(alpha=) takes numbers only: a tensor there would be read back from the device.
        return torch.addcmul(x, y, a) if isinstance(a, Tensor) else torch.add(x, y, alpha=a)

    axpy_ = axpy

    def addcdiv_(self, x: T, y: T, z: T, a: T) -> T:
        """x + a y / z"""
        if isinstance(a, Tensor):
            return torch.addcmul(x, y / z, a)
        return torch.addcdiv(x, y, z, value=a)

    def sqrt(self, x: T) -> T:
        return x.sqrt()

    def minimum(self, x: T, y: T) -> T:
        return torch.minimum(x, y)

    def atan_(self, x: T) -> T:
        return x.atan()

    def cos(self, x: T) -> T:
        return x.cos()

    def tan(self, x: T) -> T:
        return x.tan()

    def tanh_(self, x: T) -> T:
        return x.tanh()

    def copy_(self, x: T, y: T) -> T:
        """y, in x's place"""
        return y.clone()

    def where_(self, condition: T, x: T, y: T) -> T:
        """x where the condition holds, else y; in y's place"""
        return torch.where(condition, x, y)

    def minority(self, x: T, y: T) -> T:
        """Whether fewer elements of x exceed y than do not: a 0-dim bool tensor."""
        exceeds = (x > y).sum()
        return 2 * exceeds < x.numel()

    def dot(self, x: T, y: T) -> T:
        """The sum of x y over all elements: 0-dim, or with Foreach one entry a tensor."""
        # The three sums of the cosine must be of one kind, or their rounding could make |S| > 1.
        return torch.sum(x * y, dtype=accumulator(x.device))


class Loop(Pure):
    """One tensor; writes where a rule allows it."""

    pure: ClassVar[bool] = False

    def abs_(self, x: T) -> T:
        return x.abs_()

    def mul_(self, x: T, y: T) -> T:
        return x.mul_(y)

    def div_(self, x: T, y: T) -> T:
        return x.div_(y)

    def add_(self, x: T, c: float) -> T:
        return x.add_(c)

    def axpy_(self, x: T, y: T, a: T) -> T:
        return x.addcmul_(y, a) if isinstance(a, Tensor) else x.add_(y, alpha=a)

    def addcdiv_(self, x: T, y: T, z: T, a: T) -> T:
        if isinstance(a, Tensor):
            return x.addcmul_(y / z, a)
        return x.addcdiv_(y, z, value=a)

    def atan_(self, x: T) -> T:
        return x.atan_()

    def tanh_(self, x: T) -> T:
        return x.tanh_()

    def copy_(self, x: T, y: T) -> T:
        return x.copy_(y)

    def where_(self, condition: T, x: T, y: T) -> T:
        return y.copy_(torch.where(condition, x, y))


class Foreach:
    """Lists of tensors; writes where a rule allows it. Its temporaries are as large as the list."""

    lists: ClassVar[bool] = True
    pure: ClassVar[bool] = False

    def neg(self, x: T) -> T:
        return torch._foreach_neg(x)

    def abs_(self, x: T) -> T:
        torch._foreach_abs_(x)
        return x

    def mul(self, x: T, y: T) -> T:
        return torch._foreach_mul(x, y)

    def mul_(self, x: T, y: T) -> T:
        torch._foreach_mul_(x, y)
        return x

    def div_(self, x: T, y: T) -> T:
        torch._foreach_div_(x, y)
        return x

    def add_(self, x: T, c: float) -> T:
        torch._foreach_add_(x, c)
        return x

    def axpy(self, x: T, y: T, a: T) -> T:
        if isinstance(a, (Tensor, list)):
            return torch._foreach_add(x, torch._foreach_mul(y, a))
        return torch._foreach_add(x, y, alpha=a)

    def axpy_(self, x: T, y: T, a: T) -> T:
        if isinstance(a, (Tensor, list)):
            torch._foreach_add_(x, torch._foreach_mul(y, a))
        else:
            torch._foreach_add_(x, y, alpha=a)
        return x

    def addcdiv_(self, x: T, y: T, z: T, a: T) -> T:
        if isinstance(a, Tensor):
            return self.axpy_(x, torch._foreach_div(y, z), a)
        torch._foreach_addcdiv_(x, y, z, value=a)
        return x

    def sqrt(self, x: T) -> T:
        return torch._foreach_sqrt(x)

    def minimum(self, x: T, y: T) -> T:
        return torch._foreach_minimum(x, y)

    def atan_(self, x: T) -> T:
        torch._foreach_atan_(x)
        return x

    def cos(self, x: T) -> T:
        return torch._foreach_cos(x)

    def tan(self, x: T) -> T:
        return torch._foreach_tan(x)

    def tanh_(self, x: T) -> T:
        torch._foreach_tanh_(x)
        return x

    def copy_(self, x: T, y: T) -> T:
        torch._foreach_copy_(x, y)
        return x

    # There is no foreach form of the next three; they take a kernel or two for each tensor.

    def where_(self, condition: T, x: T, y: T) -> T:
        return [LOOP.where_(c, a, b) for c, a, b in zip(condition, x, y, strict=True)]

    def minority(self, x: T, y: T) -> T:
        return [LOOP.minority(a, b) for a, b in zip(x, y, strict=True)]

    def dot(self, x: T, y: T) -> T:
        products = torch._foreach_mul(x, y)
        return torch.stack([p.sum(dtype=accumulator(p.device)) for p in products])


Arithmetic = Pure | Foreach  # Loop is a Pure

PURE = Pure()
LOOP = Loop()
FOREACH = Foreach()
