"""Another optimizer on the same parameters, which goes on where the first one stopped.

`plan` decides everything from options alone and touches nothing; `carry` moves the buffers, and schedulers
are re-attached last. Nothing is read from the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tam.optimizers import TAM, AdaTAM
from tam.optimizers.torque import TorqueOptimizer
from tam.options import REFUSED
from tam.sharding import set_shards, shards_of
from tam.switching.explain import describe
from tam.switching.schedulers import RATES, convert_schedulers, find_schedulers, reattach, warn_if_held
from tam.switching.transfer import check_alignment, family, settled_steps

BUFFERS = ("keep", "rescale", "fresh")
WARMUP = ("warmup_steps", "warmup_step", "warmup_ratio")  # what a Warmup keeps in every group
_CARRIED = ("momentum_buffer", "exp_avg", "exp_avg_sq", "step")
_WHY_REFUSED = {
    "nesterov": "its step is not the momentum",
    "dampening": "it weighs gradients otherwise",
    "amsgrad": "its denominator is a maximum over the run",
}


def handover(
    optimizer: Optimizer,
    to: type[Optimizer],
    *,
    buffers: str | None = None,
    lr: float | Tensor | None = None,
    alignment: float = 0.0,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    verbose: bool = False,
    **options: Any,
) -> Optimizer:
    """An optimizer of class `to` on the same parameters, with the first one's groups and buffers.

    lr, and with it decoupled weight decay, is transferred so that the effective learning rate stays:
    lr / (1 - momentum) for SGD, lr d* / (1 - momentum) for TAM, lr for Adam(W), lr d* / (1 - beta1) for
    AdaTAM(W) (lr with `ema=True`), where d* = (1 + clip(gain s*, -1, 1)) / 2. The first optimizer stays
    as it is; drop it to free its buffers.

    Args:
        optimizer: torch's SGD, Adam or AdamW, or TAM, AdaTAM, AdaTAMW
        to: the class to change to
        buffers: "keep" the momentum as it is (the paper's warm-up, and the default between SGD and TAM;
            the first steps after SGD are larger, those after TAM smaller), "rescale" it so that the step
            continues (the default between Adam(W) and AdaTAM(W), with Adam's bias corrections folded
            in), or start "fresh" (the default, and all there is, between optimizers that share nothing)
        lr: the lr of all groups, instead of the transferred one; needed where there is no rule. Decoupled
            weight decay goes with it, so that lr times weight_decay stays
        alignment: s*, the alignment TAM or AdaTAM is taken to have or starts with
        scheduler: the first optimizer's scheduler (one of torch's, or a list of them) to re-attach in place.
            It goes on with the new optimizer: every lr to come is what it would have been, times the factor
            by which lr changes. Without it, a scheduler is left behind with a warning; an empty list says
            that you make a new one
        verbose: print what `explain_handover` prints
        options: of the new optimizer, before those carried over

    Where Adam has not taken a step yet, or its buffers are left behind, there is no correction to fold in,
    and AdaTAM(W) gets `bias_correction=True` unless it is given.
    """
    planned = plan(
        optimizer, to, buffers=buffers, lr=lr, alignment=alignment, scheduler=scheduler, options=options
    )
    if verbose:
        print(planned)
    new = planned.build()
    carry(optimizer, new, planned.buffers, alignment=planned.alignment)
    reattach(planned.schedulers, optimizer, new)
    if scheduler is None:
        warn_if_held(optimizer, to)
    return new


def match(optimizer: Optimizer, to: type[Optimizer], **options: Any) -> Optimizer:
    """Hand over from an optimizer that was made for its hyperparameters alone."""
    try:
        return handover(optimizer, to, **options)
    except NoRuleError as error:
        # Its remedies are for an optimizer that the user has.
        raise ValueError(
            f"{to.__name__} cannot match this {type(optimizer).__name__}: {error.reason}"
        ) from None


def explain_handover(
    optimizer: Optimizer,
    to: type[Optimizer],
    *,
    buffers: str | None = None,
    lr: float | Tensor | None = None,
    alignment: float = 0.0,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    **options: Any,
) -> None:
    """Print what `handover` would do, and why; nothing is changed."""
    print(
        plan(optimizer, to, buffers=buffers, lr=lr, alignment=alignment, scheduler=scheduler, options=options)
    )


# ---------------------------------------------------------------------- the plan


class NoRuleError(ValueError):
    """There is no rule for this, but there is a way out.

    `setting` is the assignment to the first optimizer that would give a rule, where there is one.
    """

    def __init__(self, reason: str, remedy: str, setting: str = "") -> None:
        super().__init__(f"{reason}: {remedy}")
        self.reason, self.setting = reason, setting


@dataclass(frozen=True)
class Plan:
    """A hand-over, decided and not yet done. `str` explains it."""

    source: Optimizer
    to: type[Optimizer]
    buffers: str
    alignment: float
    lr: float | Tensor | None  # as it was given
    options: dict[str, Any]  # of the new optimizer
    notes: list[str]
    groups: list[dict[str, Any]] = field(default_factory=list)  # with parameters and all options carried over
    # The schedulers to re-attach, with what they keep in units of lr, converted.
    schedulers: list[tuple[LRScheduler, dict[str, Any]]] = field(default_factory=list)

    def view(self, i: int) -> dict[str, Any]:
        """Group i of the new optimizer, with all its options."""
        return {**_defaults(self.to), **self.options, **self.groups[i]}

    def settled_steps(self, i: int) -> tuple[float, float]:
        """Return group i's settled step before and after; the transferred lr is times their ratio."""
        source, group = type(self.source), self.source.param_groups[i]
        return settled_steps((source, group), (self.to, self.view(i)), self.alignment)

    def factor(self, i: int) -> float:
        """Return what the lr of group i, and everything in units of it, is multiplied by."""
        if self.lr is None:
            before, after = self.settled_steps(i)
            return before / after
        group = self.source.param_groups[i]
        if any(isinstance(x, Tensor) and x.device.type != "cpu" for x in (self.lr, group["lr"])):
            raise NoRuleError(
                f"group {i}: lr lies on a device and is not read, so neither weight_decay nor a scheduler "
                "can go with a given one",
                "give weight_decay=, and make a new scheduler",
            )
        # Where a scheduler has brought lr to 0, the given one takes the place of the lr it started from.
        base = float(group["lr"]) or float(group.get("initial_lr", 0.0))
        return float(self.lr) / base if base else 0.0

    def build(self) -> Optimizer:
        """The new optimizer, without state."""
        built = self.to(self.groups, **self.options)
        set_shards(built, shards_of(self.source))
        return built

    def __str__(self) -> str:
        return "\n".join(describe(self))


def plan(
    optimizer: Optimizer,
    to: type[Optimizer],
    *,
    buffers: str | None = None,
    lr: float | Tensor | None = None,
    alignment: float = 0.0,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    options: dict[str, Any],
) -> Plan:
    """Decide a hand-over; raise NoRuleError where there is no rule for it."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    if not (isinstance(to, type) and issubclass(to, Optimizer)):
        raise TypeError(f"to must be an optimizer class, got {to!r}")
    source = type(optimizer)
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise TypeError(f"{source.__name__} wraps another optimizer: hand over its `.optimizer`")
    alignment = check_alignment(alignment)
    buffers = choose_buffers(source, to, buffers)
    if not shares(source, to) and lr is None:
        raise NoRuleError(f"no rule gives the lr of {to.__name__} from that of {source.__name__}", "give lr=")
    known = _parameters(to)
    unknown = [name for name in options if name not in known]
    if unknown:
        raise TypeError(f"options must be those of {to.__name__} ({', '.join(known)}), got {unknown[0]}=")
    notes: list[str] = []
    options = _complete(optimizer, to, buffers, options, notes)
    found = Plan(optimizer, to, buffers, alignment, lr, options, notes)
    schedulers = [] if scheduler is None else find_schedulers(scheduler, optimizer)
    for i in range(len(optimizer.param_groups)):
        found.groups.append(_carried_options(found, i, known))
        _convert(found, i, known, rescheduled=bool(schedulers))
    if schedulers:
        places = range(len(found.groups))
        factors, views = [found.factor(i) for i in places], [found.view(i) for i in places]
        found.schedulers.extend(convert_schedulers(schedulers, factors, optimizer.param_groups, views))
    # A group that is added later has the options of the first.
    found.options.update({k: v for k, v in found.groups[0].items() if k in known and k not in options})
    return found


def _complete(
    optimizer: Optimizer, to: type[Optimizer], buffers: str, options: dict[str, Any], notes: list[str]
) -> dict[str, Any]:
    """The options with those that the buffers ask for, and notes on them."""
    options = dict(options)
    if isinstance(optimizer, TorqueOptimizer) and issubclass(to, TorqueOptimizer) and optimizer.shards:
        options = {
            "shard_group": optimizer.shard_group,
            "whole_tensors": optimizer.shards.whole_tensors,
        } | options
    chosen = "bias_correction" in options or "bias_correction" not in _parameters(to)
    if not chosen and isinstance(optimizer, (Adam, AdamW)) and issubclass(to, AdaTAM):
        if buffers == "fresh" or not any(optimizer.state.values()):
            options["bias_correction"] = True
            notes.append("bias_correction=True: there are no corrections of Adam's to fold in")
        else:
            options["bias_correction"] = False
            notes.append(
                "without bias_correction, v forgets Adam's first steps slowly: in the first thousand steps "
                "of a run give bias_correction=True"
            )
    for name in _device_count(optimizer, to, options):
        options[name] = True
        notes.append(f"{name}=True: the step count stays on the device, so that nothing waits for it")
    still = isinstance(optimizer, SGD) and all(group["momentum"] == 0 for group in optimizer.param_groups)
    if still and issubclass(to, TAM) and "momentum" not in options:
        notes.append("momentum=0 is carried; TAM is meant to have one: give momentum=")
    return options


def _carried_options(plan: Plan, i: int, known: list[str]) -> dict[str, Any]:
    """Return group i of the new optimizer with the options as they are in the first one."""
    to, group = plan.to, plan.source.param_groups[i]
    new = {k: v for k, v in group.items() if k in known and k not in plan.options}
    # What users and schedulers have put there; a Warmup's own count is not carried.
    new |= {k: v for k, v in group.items() if k not in {*plan.source.defaults, *known, *WARMUP, *RATES}}
    if issubclass(to, TorqueOptimizer) and new.get("fused"):
        new["fused"] = None  # where it can be: torch's kernels and ours do not take the same tensors
    if (
        new.get("capturable")
        and issubclass(to, (Adam, AdamW))
        and not all(p.is_cuda for p in group["params"])
    ):
        new["capturable"] = False  # ours accept it anywhere, torch's do not
    names = new.pop("param_names", None)
    new["params"] = list(zip(names, group["params"], strict=True)) if names else list(group["params"])
    return new


def _convert(plan: Plan, i: int, known: list[str], rescheduled: bool) -> None:
    """Give group i of the new optimizer its lr, what goes with lr, and its weight decay."""
    source, group, new = type(plan.source), plan.source.param_groups[i], plan.groups[i]
    if shares(source, plan.to) and (plan.lr is None or plan.buffers != "fresh"):
        refuse(i, source, group, 'set optimizer.{setting}, or give lr=... and buffers="fresh"')
        refuse(i, plan.to, plan.view(i), 'leave {name}= out, or give lr=... and buffers="fresh"')
    if plan.lr is None:
        new["lr"] = group["lr"] * plan.factor(i)
    elif rescheduled:
        if plan.factor(i) == 0:
            raise ValueError(
                f"group {i}: no factor leads from lr={group['lr']!r} to lr={plan.lr!r}, so the scheduler "
                "cannot go with it: give scheduler=[] and make a new one"
            )
        # An lr of 0 stays 0 until the scheduler changes it. A tensor is copied: the scheduler writes to it.
        new["lr"] = plan.lr * (0.0 if group["lr"] == 0 else 1.0)
    else:
        new["lr"] = plan.lr
    if plan.lr is None or rescheduled:
        new |= {k: group[k] * plan.factor(i) for k in RATES if k in group}
    if "weight_decay" not in plan.options and "weight_decay" in known:
        new["weight_decay"] = _decay(plan, i)


def shares(source: type[Optimizer], to: type[Optimizer]) -> bool:
    """Return True if there is a rule from one to the other."""
    return family(source) is not None and family(source) == family(to)


def choose_buffers(source: type[Optimizer], to: type[Optimizer], buffers: str | None) -> str:
    """Return what happens to the buffers, where None leaves the choice to us."""
    if buffers is not None and buffers not in BUFFERS:
        raise ValueError(f'buffers must be "keep", "rescale" or "fresh", got "{buffers}"')
    if not shares(source, to):
        if buffers in ("keep", "rescale"):
            raise ValueError(
                f'buffers must be "fresh" from {source.__name__} to {to.__name__}, which share none, '
                f'got "{buffers}"'
            )
        return "fresh"
    return buffers or ("keep" if family(source) == "sgd" else "rescale")


def decoupled(cls: type[Optimizer], group: dict[str, Any]) -> bool:
    """Return True if weight decay is outside the gradient."""
    own = getattr(cls, "decoupled", issubclass(cls, AdamW))
    return bool(own or group.get("decoupled_weight_decay", False))


def _decay(plan: Plan, i: int) -> Any:
    """Return the weight decay of group i: a decoupled one decays by lr times lambda, which stays."""
    source, group = type(plan.source), plan.source.param_groups[i]
    decay = group.get("weight_decay", 0.0)
    before, after = decoupled(source, group), decoupled(plan.to, plan.view(i))
    if decay == 0 or not (before or after):
        return decay
    if before != after:
        kinds = {True: "decoupled", False: "coupled (part of the gradient)"}
        raise NoRuleError(
            f"group {i}: weight_decay={decay!r} is {kinds[before]} in {source.__name__} and {kinds[after]} "
            f"in {plan.to.__name__}, and no rule leads from one to the other",
            "give weight_decay=",
        )
    factor = plan.factor(i)
    return decay / factor if factor else decay


def refuse(i: int, cls: type[Optimizer], group: dict[str, Any], remedy: str) -> None:
    """Raise if an option of the group leaves its buffers without a rule.

    The remedy may name the option, its `harmless` value and the `setting` that turns it off in the group.
    """
    for name, harmless in REFUSED.items():
        if group.get(name, harmless) != harmless:
            setting = f'param_groups[{i}]["{name}"] = {harmless!r}'
            raise NoRuleError(
                f"group {i}: {cls.__name__} has {name}={group[name]!r}, for which there is no rule "
                f"({_WHY_REFUSED[name]})",
                remedy.format(name=name, harmless=harmless, setting=setting),
                setting,
            )


def _device_count(optimizer: Optimizer, to: type[Optimizer], options: dict[str, Any]) -> list[str]:
    """The option torch's Adam needs to keep its step count on an accelerator, where it lies there."""
    if not issubclass(to, (Adam, AdamW)) or any(options.get(k) for k in ("fused", "capturable")):
        return []
    group = optimizer.param_groups[0]
    if group.get("fused") or group.get("capturable") or "foreach" in options:
        return []
    params = [p for group in optimizer.param_groups for p in group["params"]]
    steps = [optimizer.state[p]["step"] for p in params if "step" in optimizer.state.get(p, {})]
    if all(step.device.type == "cpu" for step in steps) or not shares(type(optimizer), to):
        return []
    return ["fused"] if all(p.is_cuda and p.is_floating_point() for p in params) else ["capturable"]


def _parameters(cls: type[Optimizer]) -> list[str]:
    """The options the class takes."""
    return [*_defaults(cls)]


def _defaults(cls: type[Optimizer]) -> dict[str, Any]:
    """The options the class takes, and their defaults; those of its bases too where it passes them on."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            found = {p.name: p.default for p in parameters if p.default is not p.empty} | found
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return found


# ---------------------------------------------------------------------- the buffers


def carry(
    source: Optimizer, target: Optimizer, buffers: str, *, alignment: float = 0.0, release: bool = False
) -> None:
    """Gives `target`, on the same parameters, the state of `source`.

    With `release` the tensors themselves change hands, and `source` is left without state.
    """
    aligned: dict[Tensor, Tensor] = {}
    for old, new in zip(source.param_groups, target.param_groups, strict=True):
        for p in new["params"]:
            state = source.state.get(p, {})
            kept = buffers != "fresh" and any(state.get(key) is not None for key in _CARRIED)
            if kept and not (isinstance(target, SGD) and new["momentum"] == 0):  # that one keeps none
                own = {k: x if release else x.clone() for k, x in state.items() if k in _CARRIED}
                if buffers == "rescale":
                    _rescale(source, target, old, new, own, alignment)
                if "step" in own and isinstance(target, (Adam, AdamW)):
                    own["step"] = own["step"].to(p.device if new["capturable"] or new["fused"] else "cpu")
                target.state[p] = own
                aligned[p] = torch.full((), alignment, dtype=torch.float64, device=p.device)
                if isinstance(source, TorqueOptimizer) and _same_scope(source, target):
                    aligned[p] = state["alignment"]
            if release:
                source.state.pop(p, None)
    if isinstance(target, TorqueOptimizer):
        target.segments.share_alignments(aligned)


def _same_scope(a: Optimizer, b: Optimizer) -> bool:
    return bool(a.param_groups[0].get("scope") == b.param_groups[0].get("scope"))


def _rescale(
    source: Optimizer,
    target: Optimizer,
    old: dict[str, Any],
    new: dict[str, Any],
    state: dict[str, Tensor],
    alignment: float,
) -> None:
    """Brings m, and Adam's v, to what the target would have where the source's step is the same."""
    before, after = settled_steps((type(source), old), (type(target), new), alignment)
    factor = after / before
    if "momentum_buffer" in state:
        state["momentum_buffer"].mul_(factor)
        return
    # What the source divides by goes in, what the target will divide by comes out.
    divided, divides = (_corrections(o, g, state["step"]) for o, g in ((source, old), (target, new)))
    state["exp_avg"].mul_(factor * divides[0] / divided[0])
    state["exp_avg_sq"].mul_(divides[1] / divided[1])


def _corrections(optimizer: Optimizer, group: dict[str, Any], step: Tensor) -> tuple[Any, Any]:
    """What the optimizer divides m and v by at this step count: 1 - beta^t, or 1."""
    beta1, beta2 = group["betas"]
    if isinstance(optimizer, AdaTAM):
        return 1.0, _correction(beta2, step) if group["bias_correction"] else 1.0
    return _correction(beta1, step), _correction(beta2, step)


def _correction(beta: float, step: Tensor) -> Any:
    """A number where the count lies on the CPU, else a tensor: no step waits for the device."""
    if step.device.type == "cpu":
        return 1 - beta ** float(step) if step > 0 else 1.0
    wide = step if step.device.type == "mps" else step.double()
    return torch.where(step > 0, 1 - beta**wide, 1.0)  # no step yet: m and v are 0
