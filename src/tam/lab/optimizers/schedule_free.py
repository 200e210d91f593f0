"""Schedule-free AdamW (Defazio et al. 2024) for a stack of runs, by the authors' package."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tam.lab.core.errors import missing_package
from tam.lab.optimizers.rule import Rule

COUNTERS = ("k", "weight_sum", "lr_max")  # what the package keeps as numbers


class ScheduleFreeStack:
    """One optimizer of the package per run, on views of the stacked parameters.

    The package computes with numbers of the host, so no CUDA graph can capture its steps. It needs no
    schedule: lr is constant after the warm-up. Otherwise this is like `RuleStack`; s stays 0.

    Args:
        params: Stacked parameters, [runs, ...] each.
        rules: One per run.
        decays: Which parameters weight decay applies to.
        lrs: One per run.
        warmup: Steps of the package's warm-up.
        later: From which step on other lrs replace them, and those. None: never.
    """

    def __init__(
        self, params: Sequence[Tensor], rules: Sequence[Rule], decays: Sequence[bool], lrs: Sequence[float],
        warmup: int, later: tuple[int, Sequence[float]] | None = None,
    ) -> None:  # fmt: skip
        try:
            from schedulefree import AdamWScheduleFree
        except ImportError as error:
            raise missing_package("a schedule-free variant", "schedulefree") from error
        self.params, self.rules = list(params), list(rules)
        self._lrs, self._later = list(lrs), later
        device = self.params[0].device
        self.s = torch.zeros(len(rules), len(self.params), device=device)
        self.grad_norm = torch.zeros(len(rules), device=device)
        self.steps = torch.zeros((), device=device)
        self._counters = torch.zeros(len(rules), len(COUNTERS), dtype=torch.float64)
        self._counters[:, -1] = -1.0  # the package's start of lr_max
        self._views = [[p.detach()[run].requires_grad_() for p in self.params] for run in range(len(rules))]
        self._optimizers: list[Any] = []
        for rule, lr, views in zip(rules, lrs, self._views, strict=True):
            groups = [
                {"params": [p for p, is_own in zip(views, decays, strict=True) if is_own is decayed],
                 "weight_decay": rule.weight_decay if decayed else 0.0}
                for decayed in (True, False)
            ]  # fmt: skip
            betas = rule.momentum, rule.beta2
            optimizer = AdamWScheduleFree(groups, lr=lr, betas=betas, eps=rule.eps, warmup_steps=warmup)
            for p in views:
                optimizer.state[p] = {"z": p.detach().clone(), "exp_avg_sq": torch.zeros_like(p)}
            optimizer.train()
            self._optimizers.append(optimizer)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor], lr: Tensor) -> None:
        """Move all runs. `lr` has no effect: the package has its own."""
        self.steps += 1
        squares = torch.stack([g.flatten(1).square().sum(1) for g in grads])
        self.grad_norm.copy_(squares.sum(0).sqrt())
        limits = [math.inf if rule.max_grad_norm is None else rule.max_grad_norm for rule in self.rules]
        clip = (torch.tensor(limits, device=lr.device) / (self.grad_norm + 1e-6)).clamp(max=1.0)
        for run, (optimizer, views) in enumerate(zip(self._optimizers, self._views, strict=True)):
            for p, g in zip(views, grads, strict=True):
                p.grad = g[run] * clip[run]
            counters = dict(zip(COUNTERS, self._counters[run].tolist(), strict=True))
            for group in optimizer.param_groups:
                group |= {**counters, "lr": self._lr(run, counters["k"])}
            optimizer.step()
            own = optimizer.param_groups[0]
            self._counters[run] = torch.tensor([float(own[name]) for name in COUNTERS])

    def _lr(self, run: int, step: float) -> float:
        if self._later is not None and step >= self._later[0]:
            return self._later[1][run]
        return self._lrs[run]

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Hold the averaged weights in the parameters inside."""
        for optimizer in self._optimizers:
            optimizer.eval()
        yield
        for optimizer in self._optimizers:
            optimizer.train()

    def tensors(self, run: int) -> list[Tensor]:
        """Return what a checkpoint of one run must hold, as views."""
        state = [
            self._optimizers[run].state[p][name] for p in self._views[run] for name in ("z", "exp_avg_sq")
        ]
        return [*(p[run] for p in self.params), *state, self._counters[run]]
