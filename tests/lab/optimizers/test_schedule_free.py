"""Schedule-free AdamW for a stack of runs: what the authors' package computes for each run alone."""

from __future__ import annotations

import schedulefree
import torch
from torch import Tensor

from tam.lab.optimizers import rule_of
from tam.lab.optimizers.schedule_free import ScheduleFreeStack

OPTIONS = {"betas": (0.9, 0.95), "weight_decay": 0.1}
LRS = (0.01, 0.03)


LATER = (20, (0.001, 0.03))


def make_stack(params: list[Tensor]) -> ScheduleFreeStack:
    rules = [rule_of("schedule-free-adamw", {**OPTIONS, "max_grad_norm": norm}) for norm in (None, 1.0)]
    return ScheduleFreeStack(params, rules, [True, False], LRS, 5, LATER)


def test_runs_are_those_of_the_package() -> None:
    torch.manual_seed(0)
    start = [torch.randn(4, 3), torch.randn(3)]
    stacked = [torch.stack([p, p]) for p in start]
    stack = make_stack(stacked)
    alone = []
    for lr in LRS:
        params = [torch.nn.Parameter(p.clone()) for p in start]
        groups = [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}]
        optimizer = schedulefree.AdamWScheduleFree(groups, lr=lr, betas=(0.9, 0.95), warmup_steps=5)
        optimizer.train()
        alone.append((params, optimizer))
    for step in range(30):
        noise = [torch.randn_like(p) for p in start]
        grads = [2 * p + n for p, n in zip(stacked, noise, strict=True)]
        for run, (params, optimizer) in enumerate(alone):
            for p, n in zip(params, noise, strict=True):
                p.grad = 2 * p.detach() + n
            if run == 1:
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = LRS[run] if step < LATER[0] else LATER[1][run]
            optimizer.step()
        stack.step(grads, torch.zeros(2))
    for is_evaluating in (False, True):
        for run, (params, optimizer) in enumerate(alone):
            if is_evaluating:
                optimizer.eval()
                with stack.evaluating():
                    own = [p[run].clone() for p in stacked]
            else:
                own = [p[run] for p in stacked]
            torch.testing.assert_close(own, [p.detach() for p in params], rtol=1e-5, atol=1e-6)


def test_a_copy_of_the_tensors_continues_to_the_same_bits() -> None:
    torch.manual_seed(0)
    params = [torch.randn(2, 4, 3), torch.randn(2, 3)]
    first = make_stack(params)
    for _ in range(7):
        first.step([p.clone() for p in params], torch.zeros(2))
    others = [torch.zeros_like(p) for p in params]
    second = make_stack(others)
    for run in range(2):
        for own, stored in zip(second.tensors(run), first.tensors(run), strict=True):
            own.copy_(stored)
    for stack, tensors in ((first, params), (second, others)):
        for _ in range(7):
            stack.step([p.clone() for p in tensors], torch.zeros(2))
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
