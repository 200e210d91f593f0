"""The torque-aware step: measure three sums per segment, settle s and d, update.

The rule of TAM, AdaTAM and AdaTAMW for every way that is made of torch operations: `step`, or
`step_together` where ranks add up their sums between `measure` and `settle`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from tam.sharding import FOUND_INF, Exchange, Sum
from tam.step.bucket import Bucket, advance, apply, bias_corrections, write_back
from tam.step.eager import Arithmetic, accumulator, nonzero


@dataclass(frozen=True)
class Rule:
    """What is one value for the whole optimizer."""

    scope: str  # "global" | "group" | "tensor"
    smoothing: float | Tensor  # gamma
    gain: float | Tensor  # of s in the damping
    max_grad_norm: float | None
    adaptive: bool  # AdaTAM and AdaTAMW
    decoupled: bool  # AdaTAMW's weight decay
    ema: bool
    bias_correction: bool

    @property
    def momentum(self) -> str:
        """The state key of m."""
        return "exp_avg" if self.adaptive else "momentum_buffer"

    def segment(self, bucket: Bucket) -> int:
        """The segment of a bucket's rows, where rows share one (scopes "global" and "group")."""
        return 0 if self.scope == "global" else bucket.index


def step(ops: Arithmetic, rule: Rule, buckets: list[Bucket]) -> Tensor | None:
    """One step of all buckets. Returns |g|, or None where it lies on a CPU and a GPU at once."""
    sums = [measure(ops, rule, bucket) for bucket in buckets]
    damping = settle_segments(ops, rule, buckets, sums)
    norm = grad_norm(sums)
    finish(ops, rule, buckets, damping, norm)
    return norm


def step_together(
    ops: Arithmetic,
    rule: Rule,
    buckets: list[Bucket],
    exchange: Exchange,
    alignments: list[Tensor],
    found_inf: Tensor | None,
) -> Tensor | None:
    """One step of parameters that lie in pieces on several ranks, given each segment's s. Returns |g|.

    Every rank takes part in it, whatever it has to move. None where gradients are not finite on some rank.
    """
    sums = torch.zeros(len(exchange.shares) + 1, 4, dtype=torch.float64, device=exchange.device)
    for bucket in buckets:
        _collect(exchange, bucket, measure(ops, rule, bucket).to(sums.device), sums)
    exchange.all_reduce_sums(sums, found_inf)
    # GradScaler waits for this value, too; on a CPU nobody has to.
    if (found_inf is not None or sums.is_cpu) and float(sums[-1, FOUND_INF]) != 0:
        return None
    d = _settle_together(rule, exchange, sums, alignments) if alignments else sums.new_empty(0)
    damping = []
    for bucket in buckets:
        segments = [exchange.shares[share][0] for share in bucket.shares]
        own = d[exchange.index_tensor(segments, d.device)] if rule.scope == "tensor" else d[segments[0]]
        damping.append(own.to(bucket.device, accumulator(bucket.device)))
    norm = sums[-1, Sum.GG].sqrt()
    finish(ops, rule, buckets, damping, norm)
    return norm


def _settle_together(rule: Rule, exchange: Exchange, sums: Tensor, alignments: list[Tensor]) -> Tensor:
    """Writes every segment's s; returns d of each."""
    totals = torch.stack([shares.sum(0) for shares in torch.split(sums[:-1], exchange.share_counts)])
    before = torch.stack([s.to(sums.device) for s in alignments])
    # A rank that has no GradScaler does not read the others' verdict, but s it must keep as they do.
    moved = (totals[:, Sum.PRESENT] > 0) & (sums[-1, FOUND_INF] == 0)
    s = torch.where(moved, settle(totals[:, : Sum.PRESENT], before, rule.smoothing), before)
    torch._foreach_copy_(alignments, list(s.unbind()))
    return damping_of(s.to(sums.dtype), rule.gain)


def _collect(exchange: Exchange, bucket: Bucket, measured: Tensor, sums: Tensor) -> None:
    """Adds a bucket's rows to the sums of their shares, in a fixed order."""
    shares = list(dict.fromkeys(bucket.shares))
    if len(shares) == len(bucket.shares):
        sums[exchange.index_tensor(shares, sums.device), : Sum.PRESENT] += measured
    else:
        for share in shares:
            rows = [i for i, other in enumerate(bucket.shares) if other == share]
            part = measured if len(shares) == 1 else measured[exchange.index_tensor(rows, sums.device)]
            sums[share, : Sum.PRESENT] += part.sum(0)
    sums[:, Sum.PRESENT].index_fill_(0, exchange.index_tensor(shares, sums.device), 1.0)


def finish(
    ops: Arithmetic, rule: Rule, buckets: list[Bucket], damping: list[Tensor], norm: Tensor | None
) -> None:
    """Clips and moves all rows."""
    clip = clip_factor(norm, rule.max_grad_norm)
    for bucket, d in zip(buckets, damping, strict=True):
        update(ops, rule, bucket, d, clip)


def measure(ops: Arithmetic, rule: Rule, bucket: Bucket) -> Tensor:
    """<m, g>, |m|^2 and |g|^2 of each row, in float64: a tensor of shape [rows, 3]."""
    m = bucket.working(bucket.state[rule.momentum])
    g = bucket.working(bucket.grad)
    dot, mm, gg = _dots(ops, m, g), _dots(ops, m, m), _dots(ops, g, g)
    return torch.stack([-dot if bucket.group["maximize"] else dot, mm, gg], dim=-1)


def _dots(ops: Arithmetic, x: list[Tensor], y: list[Tensor]) -> Tensor:
    if ops.lists:
        return ops.dot(x, y)  # type: ignore[no-any-return]
    return torch.stack([ops.dot(a, b) for a, b in zip(x, y, strict=True)])


def settle(sums: Tensor, s: Tensor, smoothing: float | Tensor) -> Tensor:
    """s after the step, from the sums [..., 3] and the s before it [...]."""
    dot, mm, gg = sums.unbind(-1)
    defined = (mm > 0) & (gg > 0)
    # Undefined cosines are computed with norms of 1, so that autograd meets no 0/0.
    norms = torch.where(defined, mm, 1.0).sqrt() * torch.where(defined, gg, 1.0).sqrt()
    cosine = torch.where(defined, dot / norms, 0.0).clamp(-1.0, 1.0)
    smoothed = smoothing * s.to(sums.dtype) + (1 - smoothing) * cosine
    return torch.where(torch.isfinite(sums).all(-1), smoothed.to(s.dtype), s)


@overload
def damping_of(s: float, gain: float = 1.0) -> float: ...
@overload
def damping_of(s: Tensor, gain: float | Tensor = 1.0) -> Tensor: ...
def damping_of(s: Any, gain: Any = 1.0) -> Any:
    """Return d = (1 + clip(gain s, -1, 1)) / 2, of a number or of a tensor of them."""
    if isinstance(gain, Tensor) or gain != 1:
        s = (gain * s).clamp(-1.0, 1.0) if isinstance(s, Tensor) else min(max(gain * s, -1.0), 1.0)
    return (1 + s) / 2


def settle_segments(ops: Arithmetic, rule: Rule, buckets: list[Bucket], sums: list[Tensor]) -> list[Tensor]:
    """Writes every segment's s; returns d = (1 + s) / 2 for each bucket: 0-dim, or one a row."""
    damping = []
    settled: dict[int, Tensor] = {}  # s of the segments that several buckets share
    for bucket, part in zip(buckets, sums, strict=True):
        alignment = bucket.state["alignment"]
        if rule.scope == "tensor":
            s = settle(part, torch.stack(alignment), rule.smoothing)
            bucket.state["alignment"] = _store(ops, alignment, list(s.unbind()))
        else:
            segment = rule.segment(bucket)
            if segment not in settled:
                home = alignment[0].device
                parts = [
                    part.sum(0).to(home)
                    for part, other in zip(sums, buckets, strict=True)
                    if rule.segment(other) == segment
                ]
                s = settle(torch.stack(parts).sum(0), alignment[0], rule.smoothing)
                settled[segment] = _store(ops, alignment[:1], [s])[0]
            s = settled[segment]
            bucket.state["alignment"] = [s] * len(alignment)
        damping.append(damping_of(s.to(bucket.device, accumulator(bucket.device)), rule.gain))
    return damping


def _store(ops: Arithmetic, old: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    if ops.pure:
        return new
    torch._foreach_copy_(old, new)
    return old


def grad_norm(sums: list[Tensor]) -> Tensor | None:
    """|g| over all rows of all buckets."""
    home = sums[0].device
    if any((part.device.type == "cpu") != (home.type == "cpu") for part in sums):
        return None
    total = torch.stack([part.select(-1, 2).sum().to(home) for part in sums]).sum()
    # The root of 0 has no derivative; autograd shall not meet it.
    return torch.where(total > 0, torch.where(total > 0, total, 1.0).sqrt(), total)


def clip_factor(norm: Tensor | None, max_grad_norm: float | None) -> Tensor | None:
    """k, as torch's clip_grad_norm_ has it."""
    if max_grad_norm is None or norm is None:
        return None
    return (max_grad_norm / (norm + 1e-6)).clamp(max=1.0)


def update(ops: Arithmetic, rule: Rule, bucket: Bucket, damping: Tensor, clip: Tensor | None) -> None:
    """Moves the bucket's rows, given d (0-dim, or one entry a row) and the clip factor."""
    if rule.adaptive:
        bucket.state["step"] = advance(ops, bucket.state["step"])
    group, rows = bucket.group, len(bucket.theta)
    weight = group["floor"] + damping
    beta1, beta2 = group["betas"] if rule.adaptive else (group["momentum"], 0.0)
    keep = 1 - weight if rule.ema else beta1
    k = None if clip is None else bucket.scalar(ops, clip)
    lr, weight_decay = bucket.lr(ops), bucket.scalar(ops, group["weight_decay"])
    corrections: list[Any] = [None] * rows
    if rule.bias_correction:
        corrections = [c**0.5 for c in bias_corrections(ops, bucket, beta2)]

    def move(theta: Any, g: Any, m: Any, v: Any, w: Any, b: Any, correction: Any) -> tuple[Any, ...]:
        if group["maximize"]:
            g = ops.neg(g)
        if k is not None:
            g = ops.mul(g, k)
        if nonzero(weight_decay) and not rule.decoupled:
            g = ops.axpy(g, theta, weight_decay)
        m = ops.axpy_(ops.mul_(m, b), g, w)
        if not rule.adaptive:
            return ops.axpy_(theta, m, -lr), m
        v = ops.axpy_(ops.mul_(v, beta2), ops.mul(g, g), 1 - beta2)
        denominator = ops.sqrt(v)
        if rule.bias_correction:
            denominator = ops.div_(denominator, correction)
        denominator = ops.add_(denominator, group["eps"])
        if nonzero(weight_decay) and rule.decoupled:
            theta = ops.mul_(theta, 1 - lr * weight_decay)
        return ops.addcdiv_(theta, m, denominator, -lr), m, v

    keys = [rule.momentum, "exp_avg_sq"] if rule.adaptive else [rule.momentum]
    theta, g = bucket.working(bucket.theta), bucket.working(bucket.grad)
    m = bucket.working(bucket.state[rule.momentum])
    v = bucket.working(bucket.state["exp_avg_sq"]) if rule.adaptive else [None] * rows
    w = _coefficient(ops, bucket, weight)
    b = _coefficient(ops, bucket, keep)
    new = apply(ops, move, [theta, g, m, v, w, b, corrections])
    bucket.theta = write_back(ops, bucket.theta, new[0])
    for key, column in zip(keys, new[1:], strict=True):
        bucket.state[key] = write_back(ops, bucket.state[key], column)


def _coefficient(ops: Arithmetic, bucket: Bucket, a: Any) -> Any:
    """A coefficient as `apply` passes it on: one for all rows, or a column."""
    if isinstance(a, Tensor):
        a = a.to(bucket.compute_dtype)
        if a.ndim:
            return list(a.unbind())
    return a if ops.lists else [a] * len(bucket.theta)
