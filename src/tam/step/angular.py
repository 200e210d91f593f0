"""The AngularGrad step (Roy et al. 2021), per coordinate; rule.md has the equations."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tam.options import Method
from tam.step.eager import LOOP, Arithmetic, Bucket, Coefficient, Operand, increment_steps


def take_step(ops: Arithmetic, method: Method, vote: bool, buckets: list[Bucket]) -> None:
    """Move the rows of all buckets."""
    for bucket in buckets:
        bucket.state["step"] = increment_steps(ops, bucket.state["step"])
        _update_bucket(ops, method, vote, bucket)


def _apply(ops: Arithmetic, name: str, x: Operand, *others: Operand) -> Operand:
    """Apply an operation of torch to a tensor or a list; one with a trailing underscore in place, or pure."""
    if ops.is_pure:
        name = name.removesuffix("_")
    if not ops.takes_lists:
        return getattr(x, name)(*others)
    result = getattr(torch, f"_foreach_{name}")(x, *others)
    return x if name.endswith("_") else result


def _replace(ops: Arithmetic, old: Operand, new: Operand) -> Operand:
    """Return `new`, in the place of `old`."""
    return new.clone() if ops.is_pure else _apply(ops, "copy_", old, new)


def _vote(ops: Arithmetic, current: Operand, angle: Operand, new: Operand, old: Operand) -> Operand:
    """Return `new`, in the place of `old`, if fewer current angles exceed the stored one than do not."""
    if ops.takes_lists:  # there is no foreach form
        return [_vote(LOOP, *row) for row in zip(current, angle, new, old, strict=True)]
    is_minority = 2 * (current > angle).sum() < current.numel()
    chosen = torch.where(is_minority, new, old)
    return chosen if ops.is_pure else old.copy_(chosen)


def _update_bucket(ops: Arithmetic, method: Method, vote: bool, bucket: Bucket) -> None:
    group = bucket.group
    beta1, beta2 = group["betas"]
    lr, decay = group["lr"], group["weight_decay"]
    if isinstance(lr, Tensor) or torch.compiler.is_compiling():
        lr = bucket.lr_tensor(ops)
    if isinstance(decay, Tensor):
        decay = bucket.scalar(ops, decay)
    decays = isinstance(decay, Tensor) or decay != 0
    apply = partial(_apply, ops)

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
        current = apply("atan_", apply("abs_", turn))
        if vote:
            # One decision for the whole tensor, as in the authors' public code.
            coefficient = _vote(ops, current, angle, apply(method, current), coefficient)
            angle = _vote(ops, current, angle, current, angle)
            phi = ops.mul(coefficient, 1.0)  # a copy: the coefficient itself is state
        else:
            phi = apply(method, apply("minimum", angle, current))
            angle = _replace(ops, angle, current)
        phi = ops.add_(ops.mul_(apply("tanh_", apply("abs_", phi)), 0.5), 0.5)
        previous = _replace(ops, previous, g)

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
