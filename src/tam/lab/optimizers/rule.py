"""The rules that the lab compares, written once for a stack of runs.

The parameters of the runs are stacked: a tensor of shape [...] becomes one of shape [runs, ...]. Every run
has its own rule and lr, and one call moves all of them. A single network is a stack of one run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from tam.options import below_one, check_options, finite_number, one_of


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one run turns gradients into a step.

    The defaults are TAM's. `torque=False` leaves out the damping: SGD with momentum, or with `adaptive`
    AdamW. s is computed in any case, since it can be recorded.

    Attributes:
        adaptive: Divide m by the root of v. Weight decay is then decoupled.
        torque: Weigh gradients by d.
        momentum: beta, or beta1.
        scope: "global" for one cosine over all tensors, "tensor" for one per tensor.
        min_damping: The lower bound on d.
        max_damping: The upper bound on d; 1/2 never lets d exceed its neutral value.
        soft_restart: Multiply the momentum by min(1, 2 d) as well: m <- beta min(1, 2 d) m + d g.
        preconditioned: Take the cosine in Adam's metric, <g, m / sqrt(v)>.
        bias_correction: Divide v by 1 - beta2^t.
        cautious: Drop the coordinates of the step whose sign differs from the gradient's, and scale up the
            others (C-AdamW, Liang et al. 2024).
        hypergradient: Multiply lr by 1 + `hypergradient` cos(g, last step) at every step (Baydin et al. 2018,
            the multiplicative form).
    """

    adaptive: bool = False
    torque: bool = True
    momentum: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    smoothing: float = 0.9
    floor: float = 1e-8
    scope: str = "global"
    gain: float = 1.0
    min_damping: float = 0.0
    max_damping: float = 1.0
    soft_restart: bool = False
    preconditioned: bool = False
    bias_correction: bool = False
    cautious: bool = False
    hypergradient: float = 0.0
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        check_options(asdict(self))
        below_one("beta2", self.beta2)
        one_of("global", "tensor")("scope", self.scope)
        finite_number("hypergradient", self.hypergradient)
        if not 0 <= self.min_damping <= self.max_damping <= 1:
            bounds = f"got {self.min_damping} and {self.max_damping}"
            raise ValueError(f"0 <= min_damping <= max_damping <= 1 must hold, {bounds}")
        if (self.preconditioned or self.cautious or self.hypergradient) and not self.adaptive:
            raise ValueError("preconditioned, cautious and hypergradient need an adaptive rule")

    def damping(self, s: Tensor) -> Tensor:
        """Return d."""
        return ((1 + (self.gain * s).clamp(-1, 1)) / 2).clamp(self.min_damping, self.max_damping)

    def alignment_at_mean_damping(self, s: Tensor) -> Tensor:
        """Return the s whose d is the mean of d over these steps."""
        is_bounded = (self.min_damping, self.max_damping) != (0, 1)
        if self.gain == 0 or (self.gain == 1 and not is_bounded):  # d is constant, or linear in s
            return s.mean(0)
        return (2 * self.damping(s).mean(0) - 1) / self.gain


class RuleStack:
    """The optimizer state of stacked runs, and the step that moves all of them.

    It never waits for the device, so a CUDA graph can capture its steps.

    Args:
        params: Stacked parameters, [runs, ...] each.
        rules: One per run. All are adaptive, or none is.
        decays: Which parameters weight decay applies to. None: all.
    """

    def __init__(
        self, params: Sequence[Tensor], rules: Sequence[Rule], decays: Sequence[bool] | None = None
    ) -> None:
        if len({rule.adaptive for rule in rules}) > 1:
            raise ValueError("a stack cannot mix adaptive rules with others")
        self.params, self.rules = list(params), list(rules)
        self.decays = [True] * len(self.params) if decays is None else list(decays)
        self.device = self.params[0].device
        self.adaptive = rules[0].adaptive
        self.m = [torch.zeros_like(p, requires_grad=False) for p in self.params]
        self.v = [torch.zeros_like(m) for m in self.m] if self.adaptive else []
        self.s = torch.zeros(len(rules), len(self.params), device=self.device)  # of every run and tensor
        self.steps = torch.zeros((), device=self.device)
        self.lr_factor = torch.ones(len(rules), device=self.device)  # of the hypergradient
        self.grad_norm = torch.zeros(len(rules), device=self.device)  # of the last step
        # What a control sets instead of min(1, 2 d); NaN: nothing.
        self.momentum_factor = torch.full_like(self.s, math.nan)
        self._momentum, self._beta2, self._eps = (self._column(n) for n in ("momentum", "beta2", "eps"))
        self._smoothing, self._gain, self._floor = (self._column(n) for n in ("smoothing", "gain", "floor"))
        self._low, self._high = self._column("min_damping"), self._column("max_damping")
        self._decay, self._hyper = self._column("weight_decay"), self._column("hypergradient")
        self._torque, self._restart, self._correction, self._preconditioned, self._cautious = (
            self._column(name).bool()
            for name in ("torque", "soft_restart", "bias_correction", "preconditioned", "cautious")
        )
        self._is_global = torch.tensor([[rule.scope == "global"] for rule in rules], device=self.device)
        limits = [math.inf if rule.max_grad_norm is None else rule.max_grad_norm for rule in rules]
        self._limit = torch.tensor(limits, device=self.device)[:, None]

    def _column(self, name: str) -> Tensor:
        """Return an option of all runs, [runs, 1]."""
        values = [float(getattr(rule, name)) for rule in self.rules]
        return torch.tensor(values, device=self.device)[:, None]

    def _any(self, name: str) -> bool:
        return any(getattr(rule, name) for rule in self.rules)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], lr: Tensor) -> None:
        """Move all runs.

        Args:
            grads: The gradients, stacked like the parameters.
            lr: The learning rate of each run, [runs].
        """
        self.steps += 1
        sums = [_sums(m, g) for m, g in zip(self.m, grads, strict=True)]
        dot, mm, gg = (torch.stack(column, 1) for column in zip(*sums, strict=True))
        self.grad_norm.copy_(gg.sum(1).sqrt())
        clip = (self._limit / (self.grad_norm[:, None] + 1e-6)).clamp(max=1.0)
        if self._any("preconditioned"):
            inner = [
                _sums(m, g, self._denominator(v, before=True))
                for m, v, g in zip(self.m, self.v, grads, strict=True)
            ]
            for total, column in zip((dot, mm, gg), zip(*inner, strict=True), strict=True):
                total.copy_(torch.where(self._preconditioned, torch.stack(column, 1), total))
        if self._any("hypergradient"):
            self._adapt_lr(grads)
        damping = self._settle(dot, mm, gg)
        weight = torch.where(
            self._torque, damping + self._floor, 1 - self._momentum if self.adaptive else 1.0
        )
        factor = torch.where(self._restart, (2 * damping).clamp(max=1.0), 1.0)
        factor = torch.where(self.momentum_factor.isnan(), factor, self.momentum_factor)
        step_size = lr[:, None] * self.lr_factor[:, None]
        for k, (p, g) in enumerate(zip(self.params, grads, strict=True)):
            self._move(
                k, p.flatten(1), g.flatten(1) * clip, weight[:, k, None], factor[:, k, None], step_size
            )

    def _settle(self, dot: Tensor, mm: Tensor, gg: Tensor) -> Tensor:
        """Write s of every run and tensor. Return d."""
        dot, mm, gg = (torch.where(self._is_global, x.sum(1, keepdim=True), x) for x in (dot, mm, gg))
        is_defined = (mm > 0) & (gg > 0)
        norms = torch.where(is_defined, mm, 1.0).sqrt() * torch.where(is_defined, gg, 1.0).sqrt()
        cosine = torch.where(is_defined, dot / norms, 0.0).clamp(-1.0, 1.0)
        smoothed = self._smoothing * self.s + (1 - self._smoothing) * cosine
        is_finite = dot.isfinite() & mm.isfinite() & gg.isfinite()
        self.s.copy_(torch.where(is_finite, smoothed, self.s))
        damping = (1 + (self._gain * self.s).clamp(-1.0, 1.0)) / 2
        return damping.clamp(self._low, self._high)

    def _denominator(self, v: Tensor, before: bool = False) -> Tensor:
        """Return the root of v, corrected for its bias, plus eps. `before`: with the v of the last step."""
        steps = (self.steps - 1).clamp(min=1) if before else self.steps
        correction = torch.where(self._correction, 1 - self._beta2**steps, 1.0)
        return v.flatten(1).sqrt() / correction.sqrt() + self._eps

    def _adapt_lr(self, grads: Sequence[Tensor]) -> None:
        """Multiply lr by 1 + h cos(g, last step)."""
        steps = [
            m.flatten(1) / self._denominator(v, before=True) for m, v in zip(self.m, self.v, strict=True)
        ]
        sums = [_sums(u, g) for u, g in zip(steps, grads, strict=True)]
        dot, uu, gg = (torch.stack(column, 1).sum(1) for column in zip(*sums, strict=True))
        norms = uu.sqrt() * gg.sqrt()
        cosine = torch.where(norms > 0, dot / norms, 0.0)
        self.lr_factor *= 1 + self._hyper[:, 0] * cosine

    def _move(self, k: int, p: Tensor, g: Tensor, weight: Tensor, factor: Tensor, step_size: Tensor) -> None:
        """Move the k-th tensor of all runs, flattened to [runs, elements]."""
        decay = self._decay if self.decays[k] else torch.zeros_like(self._decay)
        m = self.m[k].view(p.shape)
        if not self.adaptive:
            m.mul_(self._momentum * factor).add_((g + decay * p) * weight)
            p.sub_(step_size * m)
            return
        m.mul_(self._momentum * factor).add_(g * weight)
        v = self.v[k].view(p.shape)
        v.mul_(self._beta2).add_(g * g * (1 - self._beta2))
        # AdamW's m is an average that starts at 0. TAM's is a sum.
        start = torch.where(self._torque, 1.0, 1 - self._momentum**self.steps)
        move = m / self._denominator(v) / start
        if self._any("cautious"):
            mask = (m * g > 0).to(m.dtype)
            mask = mask / mask.mean(1, keepdim=True).clamp(min=1e-3)
            move = torch.where(self._cautious, move * mask, move)
        p.mul_(1 - step_size * decay).sub_(step_size * move)

    def evaluating(self) -> AbstractContextManager[None]:
        """Hold the weights to evaluate in the parameters inside. They are there already."""
        return nullcontext()

    def tensors(self, run: int) -> list[Tensor]:
        """Return what a checkpoint of one run must hold: parameters and state, as views."""
        own = [x[run] for x in (*self.params, *self.m, *self.v, self.s)]
        return [*own, self.lr_factor[run]]


def _sums(m: Tensor, g: Tensor, denominator: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return <m, g>, |m|^2 and |g|^2 of each run, in the metric of 1 / `denominator` if there is one."""
    m, g = m.flatten(1), g.flatten(1)
    inner = (m, g) if denominator is None else (m / denominator, g / denominator)
    return (inner[0] * g).sum(1), (inner[0] * m).sum(1), (inner[1] * g).sum(1)
