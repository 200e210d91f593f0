"""A planned hand-over, and the plan in words: what changes, from what to what, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tam.options import REFUSED
from tam.sharding.shard_group import ShardGroup, set_shards
from tam.switching.carry import Buffers
from tam.switching.schedulers import GROUP_RATES, Rates, cycled_option, has_scheduler
from tam.switching.transfer import ParamGroup, family, is_torque, settled_steps

T = TypeVar("T", bound=Optimizer)

# Options that say how the step is computed, or that an explanation mentions elsewhere.
_UNMENTIONED = {
    "params", "param_names", "lr", "foreach", "fused", "capturable", "differentiable", "maximize",
    "decoupled_weight_decay", "shard_group", "whole_tensors", *REFUSED,
}  # fmt: skip


@dataclass(frozen=True, repr=False, eq=False)
class Plan(Generic[T]):
    """A hand-over, decided and not yet done. Its `repr` explains it."""

    source: type[Optimizer]
    to: type[T]
    before: tuple[ParamGroup, ...]  # the groups of the first optimizer
    after: tuple[ParamGroup, ...]  # the groups of the new one, with all their options
    arguments: tuple[ParamGroup, ...]  # the groups it is made from: parameters, and options of each group
    options: ParamGroup  # the other options it is made with
    lr: float | Tensor | None  # as it was given
    factors: tuple[float, ...]  # what each lr is multiplied by; empty if lr is given and nothing goes with it
    alignment: float
    buffers: Buffers
    buffer_count: int  # parameters whose buffers there are to carry
    schedulers: tuple[tuple[LRScheduler, Rates], ...]  # to re-attach, with their values converted
    shards: ShardGroup | None
    notes: tuple[str, ...]

    def settled_steps(self, i: int) -> tuple[float, float]:
        """Return group i's settled step before and after; the transferred lr is times their ratio."""
        return settled_steps((self.source, self.before[i]), (self.to, self.after[i]), self.alignment)

    def build(self) -> T:
        """Return the new optimizer, without state."""
        optimizer = self.to([dict(group) for group in self.arguments], **self.options)
        set_shards(optimizer, self.shards)
        return optimizer

    def __repr__(self) -> str:
        return "\n".join(_describe(self))


def _describe(plan: Plan[T]) -> Iterator[str]:
    """Yield the lines of an explanation."""
    yield f"{plan.source.__name__} -> {plan.to.__name__}"
    for i, (before, after) in enumerate(zip(plan.before, plan.after, strict=True)):
        yield f"  group {i}, {len(after['params'])} parameters"
        if plan.lr is not None:
            yield f"    lr {_show(before['lr'])} -> {_show(after['lr'])}: as given"
        else:
            old, new = plan.settled_steps(i)
            yield f"    lr {_show(before['lr'])} -> {_show(after['lr'])}: times {old / new:.6g}"
            lrs = f"{old:.6g} x {_show(before['lr'])} before, {new:.6g} x {_show(after['lr'])} after"
            yield f"      so the effective lr stays the same: {lrs}, with s* = {plan.alignment:g}"
        yield from _describe_options(plan.to, before, after)
    yield f"  buffers: {_describe_buffers(plan)}"
    if is_torque(plan.to):
        yield f"  alignment: {_describe_alignment(plan)}"
    if plan.schedulers:
        names = ", ".join(type(scheduler).__name__ for scheduler, _ in plan.schedulers)
        yield f"  scheduler: {names} re-attached; its values in units of lr times {_join(plan.factors)}"
        if plan.lr is None and any(cycled_option(scheduler) == "betas" for scheduler, _ in plan.schedulers):
            yield "    it cycles beta1; the factor stays that of beta1 as it is now"
    elif has_scheduler(plan.before):
        yield "  scheduler: stays behind, so the new lr does not change; give scheduler= to re-attach it"
    yield from (f"  {note}" for note in plan.notes)


def _describe_options(to: type[Optimizer], before: ParamGroup, after: ParamGroup) -> Iterator[str]:
    """Yield what becomes of a group's options."""
    for name in sorted(set(before) - _UNMENTIONED):
        if name not in after:
            yield f"    {name} {_show(before[name])}: dropped, {to.__name__} has none"
        elif before[name] == after[name]:
            yield f"    {name} {_show(before[name])}: carried"
        else:
            why = "lr times weight_decay stays" if name == "weight_decay" else "as given"
            why = "goes with lr" if name in GROUP_RATES else why
            yield f"    {name} {_show(before[name])} -> {_show(after[name])}: {why}"
    new_options = [f"{name}={_show(after[name])}" for name in after if name not in {*before, *_UNMENTIONED}]
    if new_options:
        yield f"    {to.__name__}'s own: {', '.join(new_options)}"


def _describe_buffers(plan: Plan[T]) -> str:
    if plan.buffer_count == 0:
        return "none to carry"
    if plan.buffers == "fresh":
        return f"fresh; those of {plan.buffer_count} parameters are left behind"
    if plan.buffers == "keep":
        text = f"kept as they are, for {plan.buffer_count} parameters"
        if family(plan.to) == "adam":
            return f"{text}; the step does not continue"
        if plan.lr is not None:
            return text
    factors = [new / old for old, new in map(plan.settled_steps, range(len(plan.after)))]
    if plan.buffers == "keep":
        # m was settled under the old weights: beta m + w g, in units of the settled momentum to come
        betas = [group["momentum"] for group in plan.after]
        steps = [beta / factor + (1 - beta) for factor, beta in zip(factors, betas, strict=True)]
        return f"{text}; for a steady gradient the first step is {_join(steps)} of the one before"
    text = f"rescaled, for {plan.buffer_count} parameters: momentum times {_join(factors)}"
    corrections = ", bias corrections folded in" if family(plan.to) == "adam" else ""
    return f"{text}{corrections}, so the step continues"


def _describe_alignment(plan: Plan[T]) -> str:
    if plan.buffers == "fresh" or plan.buffer_count == 0:
        return "starts at 0"  # no state, no alignment
    if is_torque(plan.source) and plan.before[0]["scope"] == plan.after[0]["scope"]:
        return "carried"
    return f"starts at {plan.alignment:g}"


def _join(numbers: Sequence[float]) -> str:
    return ", ".join(f"{x:.4g}" for x in sorted(set(numbers)))


def _show(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
