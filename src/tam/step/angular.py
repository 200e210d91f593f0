"""The AngularGrad step (Roy et al. 2021), per coordinate; docs/rule.md has the equations."""

from __future__ import annotations

from typing import Any

from tam.step.bucket import Bucket, advance, apply, bias_corrections, write_back
from tam.step.eager import Arithmetic, nonzero


def step(ops: Arithmetic, method: str, vote: bool, buckets: list[Bucket]) -> None:
    """One step of all buckets."""
    for bucket in buckets:
        update(ops, method, vote, bucket)


def update(ops: Arithmetic, method: str, vote: bool, bucket: Bucket) -> None:
    """Moves the bucket's rows."""
    bucket.state["step"] = advance(ops, bucket.state["step"])
    group, rows = bucket.group, len(bucket.theta)
    beta1, beta2 = group["betas"]
    lr, weight_decay = bucket.lr(ops), bucket.scalar(ops, group["weight_decay"])
    coefficient_of = ops.cos if method == "cos" else ops.tan

    def move(
        theta: Any, g: Any, m: Any, v: Any, previous: Any, angle: Any, coefficient: Any,
        c1: Any, c2: Any,
    ) -> tuple[Any, ...]:  # fmt: skip
        if group["maximize"]:
            g = ops.neg(g)
        if nonzero(weight_decay):
            g = ops.axpy(g, theta, weight_decay)
        m = ops.axpy_(ops.mul_(m, beta1), g, 1 - beta1)
        v = ops.axpy_(ops.mul_(v, beta2), ops.mul(g, g), 1 - beta2)

        turn = ops.div_(ops.axpy(previous, g, -1), ops.add_(ops.mul(previous, g), 1.0))
        current = ops.atan_(ops.abs_(turn))
        if vote:
            # One decision for the whole tensor, as the authors' public code has it.
            replace = ops.minority(current, angle)
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

    keys = ["exp_avg", "exp_avg_sq", "previous_grad", "angle", *(["coefficient"] if vote else [])]
    columns = [bucket.working(bucket.state[key]) for key in keys]
    if not vote:
        columns.append([None] * rows)  # type: ignore[list-item]
    c1 = bias_corrections(ops, bucket, beta1)
    c2 = [c**0.5 for c in bias_corrections(ops, bucket, beta2)]
    theta, g = bucket.working(bucket.theta), bucket.working(bucket.grad)
    new = apply(ops, move, [theta, g, *columns, c1, c2])
    bucket.theta = write_back(ops, bucket.theta, new[0])
    for key, column in zip(keys, new[1:], strict=True):
        bucket.state[key] = write_back(ops, bucket.state[key], column)
