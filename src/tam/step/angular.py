"""The AngularGrad step (Roy et al. 2021), per coordinate; docs/rule.md has the equations."""

from __future__ import annotations

import torch
from torch import Tensor

from tam.options import Method
from tam.step.eager import (
    FOREACH,
    PURE,
    Arithmetic,
    Bucket,
    Coefficient,
    Foreach,
    Loop,
    Operand,
    Pure,
    increment_steps,
)


class AngularPure(Pure):
    """The operations that only AngularGrad needs."""

    def abs_(self, x: Operand) -> Operand:
        return x.abs()

    def atan_(self, x: Operand) -> Operand:
        return x.atan()

    def tanh_(self, x: Operand) -> Operand:
        return x.tanh()

    def cos(self, x: Operand) -> Operand:
        return x.cos()

    def tan(self, x: Operand) -> Operand:
        return x.tan()

    def minimum(self, x: Operand, y: Operand) -> Operand:
        return torch.minimum(x, y)

    def copy_(self, x: Operand, y: Operand) -> Operand:
        """Return y, in x's place."""
        return y.clone()

    def where_(self, condition: Operand, x: Operand, y: Operand) -> Operand:
        """Return x where the condition holds, else y; in y's place."""
        return torch.where(condition, x, y)

    def is_minority(self, x: Operand, y: Operand) -> Operand:
        """Return whether fewer elements of x exceed y than do not: a 0-dim bool tensor."""
        exceeds = (x > y).sum()
        return 2 * exceeds < x.numel()


class AngularLoop(Loop, AngularPure):
    def abs_(self, x: Operand) -> Operand:
        return x.abs_()

    def atan_(self, x: Operand) -> Operand:
        return x.atan_()

    def tanh_(self, x: Operand) -> Operand:
        return x.tanh_()

    def copy_(self, x: Operand, y: Operand) -> Operand:
        return x.copy_(y)

    def where_(self, condition: Operand, x: Operand, y: Operand) -> Operand:
        return y.copy_(torch.where(condition, x, y))


class AngularForeach(Foreach):
    def abs_(self, x: Operand) -> Operand:
        torch._foreach_abs_(x)
        return x

    def atan_(self, x: Operand) -> Operand:
        torch._foreach_atan_(x)
        return x

    def tanh_(self, x: Operand) -> Operand:
        torch._foreach_tanh_(x)
        return x

    def cos(self, x: Operand) -> Operand:
        return torch._foreach_cos(x)

    def tan(self, x: Operand) -> Operand:
        return torch._foreach_tan(x)

    def minimum(self, x: Operand, y: Operand) -> Operand:
        return torch._foreach_minimum(x, y)

    def copy_(self, x: Operand, y: Operand) -> Operand:
        torch._foreach_copy_(x, y)
        return x

    # There is no foreach form of the next two; they take a kernel or two for each tensor.

    def where_(self, condition: Operand, x: Operand, y: Operand) -> Operand:
        return [_LOOP.where_(c, a, b) for c, a, b in zip(condition, x, y, strict=True)]

    def is_minority(self, x: Operand, y: Operand) -> Operand:
        return [_LOOP.is_minority(a, b) for a, b in zip(x, y, strict=True)]


_PURE, _LOOP, _FOREACH = AngularPure(), AngularLoop(), AngularForeach()


def take_step(arithmetic: Arithmetic, method: Method, vote: bool, buckets: list[Bucket]) -> None:
    """Move the rows of all buckets."""
    ops = _PURE if arithmetic is PURE else _FOREACH if arithmetic is FOREACH else _LOOP
    for bucket in buckets:
        bucket.state["step"] = increment_steps(ops, bucket.state["step"])
        _update_bucket(ops, method, vote, bucket)


def _update_bucket(ops: AngularPure | AngularForeach, method: Method, vote: bool, bucket: Bucket) -> None:
    group = bucket.group
    beta1, beta2 = group["betas"]
    lr, decay = group["lr"], group["weight_decay"]
    if isinstance(lr, Tensor) or torch.compiler.is_compiling():
        lr = bucket.lr_tensor(ops)
    if isinstance(decay, Tensor):
        decay = bucket.scalar(ops, decay)
    decays = isinstance(decay, Tensor) or decay != 0
    coefficient_of = ops.cos if method == "cos" else ops.tan

    def move(
        theta: Operand, g: Operand, m: Operand, v: Operand, previous: Operand, angle: Operand,
        coefficient: Operand, c1: Coefficient, c2: Coefficient,
    ) -> tuple[Operand, ...]:  # fmt: skip
        if group["maximize"]:
            g = ops.neg(g)
        if decays:
            g = ops.axpy(g, theta, decay)
        m = ops.axpy_(ops.mul_(m, beta1), g, 1 - beta1)
        v = ops.axpy_(ops.mul_(v, beta2), ops.mul(g, g), 1 - beta2)

        turn = ops.div_(ops.axpy(previous, g, -1), ops.add_(ops.mul(previous, g), 1.0))
        current = ops.atan_(ops.abs_(turn))
        if vote:
            # One decision for the whole tensor, as in the authors' public code.
            replace = ops.is_minority(current, angle)
            coefficient = ops.where_(replace, coefficient_of(current), coefficient)
            angle = ops.where_(replace, current, angle)
            phi = ops.mul(coefficient, 1.0)  # a copy: the coefficient itself is state
        else:
            phi = coefficient_of(ops.minimum(angle, current))
            angle = ops.copy_(angle, current)
        phi = ops.add_(ops.mul_(ops.tanh_(ops.abs_(phi)), 0.5), 0.5)
        previous = ops.copy_(previous, g)

        denominator = ops.add_(ops.div_(ops.sqrt(v), c2), group["eps"])
        direction = ops.div_(ops.mul_(phi, m), c1)
        theta = ops.addcdiv_(theta, direction, denominator, -lr)
        return theta, m, v, previous, angle, *([coefficient] if vote else [])

    c1 = bucket.bias_corrections(ops, beta1)
    c2 = [c**0.5 for c in bucket.bias_corrections(ops, beta2)]
    keys = ["exp_avg", "exp_avg_sq", "previous_grad", "angle"]
    if vote:
        bucket.map_rows(ops, move, [*keys, "coefficient"], c1, c2)
    else:
        bucket.map_rows(ops, move, keys, None, c1, c2)
