"""A planned hand-over in words: what changes, from what to what, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from tam.optimizers.torque import TorqueOptimizer
from tam.options import REFUSED
from tam.switching.schedulers import RATES, cycled_option, is_held
from tam.switching.transfer import family

if TYPE_CHECKING:
    from tam.switching.handover import Plan


def describe(plan: Plan) -> Iterator[str]:
    """Yield the lines of an explanation."""
    source, to = type(plan.source), plan.to
    yield f"{source.__name__} -> {to.__name__}"
    for i, (old, new) in enumerate(zip(plan.source.param_groups, plan.groups, strict=True)):
        yield f"  group {i}, {len(new['params'])} parameters"
        if plan.lr is not None:
            yield f"    lr {_show(old['lr'])} -> {_show(new['lr'])}: as given"
        else:
            before, after = plan.settled_steps(i)
            yield f"    lr {_show(old['lr'])} -> {_show(new['lr'])}: times {before / after:.6g}"
            stays = f"{before:.6g} lr before, {after:.6g} lr after, with s* = {plan.alignment:g}"
            yield f"      so that the effective lr stays: {stays}"
        yield from _describe_options(to, old, plan.view(i))
    yield f"  buffers: {_about_buffers(plan)}"
    if issubclass(to, TorqueOptimizer):
        same = isinstance(plan.source, TorqueOptimizer) and plan.buffers != "fresh"
        same = same and plan.source.param_groups[0]["scope"] == plan.view(0)["scope"]
        yield f"  alignment: {'carried' if same else f'starts at {plan.alignment:g}'}"
    if plan.schedulers:
        names = ", ".join(type(scheduler).__name__ for scheduler, _ in plan.schedulers)
        factors = _list([plan.factor(i) for i in range(len(plan.groups))])
        yield f"  scheduler: {names} re-attached; its values in units of lr times {factors}"
        if plan.lr is None and any(cycled_option(scheduler) == "betas" for scheduler, _ in plan.schedulers):
            yield "    it cycles beta1; the factor stays that of beta1 as it is now"
    elif is_held(plan.source):
        yield "  scheduler: stays behind, so the new lr does not change; give scheduler= to re-attach it"
    yield from (f"  {note}" for note in plan.notes)


def _describe_options(to: type[Optimizer], old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """What becomes of a group's options, but for lr and those that say how the step is computed."""
    unsaid = {"params", "param_names", "lr", "foreach", "fused", "capturable", "differentiable", "maximize"}
    unsaid |= {"decoupled_weight_decay", "shard_group", "whole_tensors", *REFUSED}
    for name in sorted(set(old) - unsaid):
        if name not in new:
            yield f"    {name} {_show(old[name])}: dropped, {to.__name__} has none"
        elif old[name] == new[name]:
            yield f"    {name} {_show(old[name])}: carried"
        else:
            why = "lr times weight_decay stays" if name == "weight_decay" else "as given"
            why = "goes with lr" if name in RATES else why
            yield f"    {name} {_show(old[name])} -> {_show(new[name])}: {why}"
    own = [f"{name}={_show(new[name])}" for name in new if name not in {*old, *unsaid}]
    if own:
        yield f"    {to.__name__}'s own: {', '.join(own)}"


def _about_buffers(plan: Plan) -> str:
    count = sum(1 for state in plan.source.state.values() if any(v is not None for v in state.values()))
    if plan.buffers == "fresh":
        return f"fresh; those of {count} parameters are left behind"
    if plan.buffers == "keep":
        text = f"kept as they are, for {count} parameters"
        if family(plan.to) == "adam":
            return f"{text}; the step does not continue"
        if plan.lr is not None:
            return text
    places = range(len(plan.groups))
    factors = [after / before for before, after in map(plan.settled_steps, places)]
    if plan.buffers == "keep":
        # m was settled under the old weights: beta m + w g, in units of the settled momentum to come
        betas = [plan.view(i)["momentum"] for i in places]
        steps = [beta / f + (1 - beta) for f, beta in zip(factors, betas, strict=True)]
        return f"{text}; for a steady gradient the first step is {_list(steps)} of the one before"
    text = f"rescaled, for {count} parameters: momentum times {_list(factors)}"
    corrections = ", bias corrections folded in" if family(plan.to) == "adam" else ""
    return f"{text}{corrections}, so that the step continues"


def _list(numbers: list[float]) -> str:
    return ", ".join(f"{x:.4g}" for x in sorted(set(numbers)))


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)
