"""The torque-aware rule in torch operations: measure three sums per segment, settle s and d, update."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from tam.options import Scope
from tam.sharding.exchange import Exchange
from tam.sharding.sums import FOUND_INF, Sum
from tam.step import eager
from tam.step.eager import Arithmetic, Bucket, Coefficient, GroupOptions, Operand

Number = TypeVar("Number", float, Tensor)


@dataclass(frozen=True)
class Rule:
    """The options that have one value for the whole optimizer."""

    scope: Scope
    smoothing: float | Tensor  # gamma
    gain: float | Tensor  # of s in the damping
    max_grad_norm: float | None
    adaptive: bool  # AdaTAM and AdaTAMW
    decoupled: bool  # AdaTAMW's weight decay
    ema: bool
    bias_correction: bool
    momentum_key: str  # of m in the state


def smooth_cosine(sums: Tensor, s: Tensor, smoothing: float | Tensor) -> Tensor:
    """Return s after the step, given the sums [..., 3] and the s before it [...]."""
    dot, mm, gg = sums.unbind(-1)
    defined = (mm > 0) & (gg > 0)
    # Undefined cosines are computed with norms of 1, so autograd meets no 0/0.
    norms = torch.where(defined, mm, 1.0).sqrt() * torch.where(defined, gg, 1.0).sqrt()
    cosine = torch.where(defined, dot / norms, 0.0).clamp(-1.0, 1.0)
    smoothed = smoothing * s.to(sums.dtype) + (1 - smoothing) * cosine
    return torch.where(torch.isfinite(sums).all(-1), smoothed.to(s.dtype), s)


def damping_of(s: Number, gain: float | Tensor = 1.0) -> Number:
    """Return d = (1 + clip(gain s, -1, 1)) / 2, of a number or of a tensor of them."""
    if isinstance(gain, Tensor) or gain != 1:
        scaled: Any = gain * s
        s = cast("Number", scaled.clamp(-1, 1) if isinstance(scaled, Tensor) else min(max(scaled, -1), 1))
    return (1 + s) / 2


@dataclass
class EagerBackend:
    """The step of TAM, AdaTAM and AdaTAMW over buckets of tensors.

    With other ranks, `exchange` says which share each parameter and which segment each share belongs to, and
    `alignments` has s of every segment. Without, only segments with a gradient take part.
    """

    ops: Arithmetic
    rule: Rule
    buckets: list[Bucket]
    exchange: Exchange | None = None
    alignments: list[Tensor] = field(default_factory=list)
    # Set by `measure` and `settle`.
    norm: Tensor = field(init=False)  # |g|
    clip: Tensor | None = field(init=False, default=None)
    damping: list[Tensor] = field(init=False, default_factory=list)  # per bucket: 0-dim, or one per row

    skips_on_device: ClassVar[bool] = False

    def measure(self) -> Tensor:
        """Return <m, g>, |m|^2, |g|^2 in float64: [segments, 3], or with other ranks [shares + 1, 4]."""
        parts = []  # [rows, 3] of each bucket
        for bucket in self.buckets:
            m, g = bucket.state[self.rule.momentum_key], bucket.grad
            if bucket.needs_cast:
                m, g = (eager.as_compute_dtype(column, bucket.compute_dtype) for column in (m, g))
            dot, mm, gg = (self.ops.dot(*pair, bucket.sum_dtype) for pair in ((m, g), (m, m), (g, g)))
            parts.append(torch.stack([-dot if bucket.group["maximize"] else dot, mm, gg], dim=-1))
        if self.exchange is not None:
            return self._sums_of_shares(parts, self.exchange)
        home = self.buckets[0].state["alignment"][0].device
        total = torch.stack([part.select(-1, Sum.GG).sum().to(home) for part in parts]).sum()
        # The root of 0 has no derivative; autograd must not meet it.
        self.norm = torch.where(total > 0, torch.where(total > 0, total, 1.0).sqrt(), total)
        if self.rule.scope == "tensor":
            for bucket in self.buckets:
                bucket.segments = [len(self.alignments) + i for i in range(len(bucket.theta))]
                self.alignments += bucket.state["alignment"]
            return torch.cat([part.to(home) for part in parts])
        sums: dict[int, list[Tensor]] = {}  # of each segment's buckets
        for bucket, part in zip(self.buckets, parts, strict=True):
            key = 0 if self.rule.scope == "global" else bucket.index
            if key not in sums:
                sums[key] = []
                self.alignments.append(bucket.state["alignment"][0])
            sums[key].append(part.sum(0).to(home))
            bucket.segments = [len(self.alignments) - 1] * len(bucket.theta)
        return torch.stack([torch.stack(members).sum(0) for members in sums.values()])

    def _sums_of_shares(self, parts: list[Tensor], exchange: Exchange) -> Tensor:
        """Return the sums of all shares, also of those that have nothing here, and a row for the whole."""
        sums = torch.zeros(len(exchange.shares) + 1, len(Sum), dtype=torch.float64, device=exchange.device)
        for bucket, part in zip(self.buckets, parts, strict=True):
            measured = part.to(sums.device)
            shares = list(dict.fromkeys(bucket.shares))
            # One share after the other: index_add_ adds in no fixed order on CUDA.
            if self.rule.scope == "tensor":
                index = exchange.index_tensor(shares, sums.device)
                sums[index, : Sum.PRESENT] += measured
                sums[:, Sum.PRESENT].index_fill_(0, index, 1.0)
            else:
                for share in shares:
                    rows = [i for i, other in enumerate(bucket.shares) if other == share]
                    if len(shares) > 1:
                        measured = part.to(sums.device)[exchange.index_tensor(rows, sums.device)]
                    sums[share, : Sum.PRESENT] += measured.sum(0)
                    sums[share, Sum.PRESENT].fill_(1.0)
            bucket.segments = [exchange.shares[share][0] for share in bucket.shares]
        return sums

    def settle(self, sums: Tensor) -> None:
        """Write s of every segment; compute |g|, the clip factor and d of each bucket."""
        rule, exchange = self.rule, self.exchange
        if not self.alignments:  # ranks that hold no segment only add up |g|
            self.norm = sums[-1, Sum.GG].sqrt()
            return
        before = torch.stack([s.to(sums.device) for s in self.alignments])
        if exchange is None:
            s = smooth_cosine(sums, before, rule.smoothing)
        else:
            totals = torch.stack([shares.sum(0) for shares in torch.split(sums[:-1], exchange.share_counts)])
            # A rank without a GradScaler does not read the others' verdict, but must keep s as they do.
            takes_part = (totals[:, Sum.PRESENT] > 0) & (sums[-1, FOUND_INF] == 0)
            s = torch.where(
                takes_part, smooth_cosine(totals[:, : Sum.PRESENT], before, rule.smoothing), before
            )
            self.norm = sums[-1, Sum.GG].sqrt()
        stored = self.alignments
        if self.ops.is_pure:
            stored = [x.to(old.dtype) for x, old in zip(s.unbind(), stored, strict=True)]
        else:
            torch._foreach_copy_(stored, list(s.unbind()))
        # d belongs to s as it is stored: some may be float32, some float64.
        d = damping_of(torch.stack([x.to(sums.device) for x in stored]).to(sums.dtype), rule.gain)
        for bucket in self.buckets:
            first = bucket.segments[0]
            own = d[first]
            if rule.scope == "tensor":
                own = d[first : first + len(bucket.segments)]
                if exchange is not None:
                    own = d[exchange.index_tensor(bucket.segments, d.device)]
            self.damping.append(own.to(bucket.device, bucket.sum_dtype))
            if self.ops.is_pure:
                bucket.state["alignment"] = [stored[k] for k in bucket.segments]
        if rule.max_grad_norm is not None:
            self.clip = (rule.max_grad_norm / (self.norm + 1e-6)).clamp(max=1.0)

    def update(self) -> None:
        """Move m, v and theta of all buckets."""
        ops, rule = self.ops, self.rule
        is_compiling = torch.compiler.is_compiling()
        for bucket, damping in zip(self.buckets, self.damping, strict=True):
            group, dtype = bucket.group, bucket.compute_dtype
            lr, decay, clip = group["lr"], group["weight_decay"], self.clip
            if isinstance(lr, Tensor) or is_compiling:
                lr = bucket.lr_tensor(ops)
            if isinstance(decay, Tensor):
                decay = bucket.scalar(ops, decay)
            if clip is not None:
                clip = bucket.scalar(ops, clip)
            weight = group["floor"] + damping
            beta = group["betas"][0] if rule.adaptive else group["momentum"]
            if is_compiling:
                beta = bucket.graph_input(beta)  # OneCycleLR and CyclicLR cycle it
            keep = 1 - weight if rule.ema else beta
            # One for all rows, or a list with one per row.
            w, b = (a.to(dtype) if isinstance(a, Tensor) else a for a in (weight, keep))
            w, b = (list(a.unbind()) if isinstance(a, Tensor) and a.ndim else a for a in (w, b))
            move = partial(self._move, group, lr, decay, clip)
            if not rule.adaptive:
                bucket.map_rows(ops, move, [rule.momentum_key], None, w, b, None)
                continue
            bucket.state["step"] = eager.increment_steps(ops, bucket.state["step"])
            corrections = None
            if rule.bias_correction:
                corrections = [c**0.5 for c in bucket.bias_corrections(ops, group["betas"][1])]
            bucket.map_rows(ops, move, [rule.momentum_key, "exp_avg_sq"], w, b, corrections)

    def _move(
        self, group: GroupOptions, lr: Coefficient, decay: Coefficient, clip: Tensor | None,
        theta: Operand, g: Operand, m: Operand, v: Operand, w: Coefficient, b: Coefficient, c: Coefficient,
    ) -> tuple[Operand, ...]:  # fmt: skip
        """Return theta, m, v after the step; w weighs g, b multiplies m, and c corrects v."""
        ops, rule = self.ops, self.rule
        decays = isinstance(decay, Tensor) or decay != 0
        if group["maximize"]:
            g = ops.neg(g)
        if clip is not None:
            g = ops.mul(g, clip)
        if decays and not rule.decoupled:
            g = ops.axpy(g, theta, decay)
        m = ops.axpy_(ops.mul_(m, b), g, w)
        if not rule.adaptive:
            return ops.axpy_(theta, m, -lr), m
        beta2 = group["betas"][1]
        v = ops.axpy_(ops.mul_(v, beta2), ops.mul(g, g), 1 - beta2)
        denominator = ops.sqrt(v)
        if rule.bias_correction:
            denominator = ops.div_(denominator, c)
        denominator = ops.add_(denominator, group["eps"])
        if decays and rule.decoupled:
            theta = ops.mul_(theta, 1 - lr * decay)
        return ops.addcdiv_(theta, m, denominator, -lr), m, v
