"""The rules of a hand-over: which options, groups and buffers the new optimizer gets, and what is refused.

They decide from options and the form of the buffers. Nothing changes, and nothing is read from the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from tam._messages import describe_parameter
from tam.options import REFUSED, turn_off
from tam.sharding.shard_group import shards_of
from tam.switching.carry import BUFFER_KEYS, Buffers, has_buffers
from tam.switching.plan import Plan, T
from tam.switching.schedulers import GROUP_RATES, Schedulers, convert_schedulers, find_schedulers
from tam.switching.transfer import ParamGroup, check_alignment, family, is_decoupled, is_torque, settled_steps

WARMUP_KEYS = ("warmup_steps", "warmup_step", "warmup_ratio")  # what a Warmup keeps in every group
_WHY_REFUSED = {
    "nesterov": "its step is not the momentum",
    "dampening": "it weighs gradients differently",
    "amsgrad": "its denominator is a maximum over the run",
}
_OR_FRESH = ', or leave the buffers behind (lr=..., buffers="fresh")'
_ON_FOLDED_CORRECTIONS = (
    "without bias_correction, v forgets Adam's first steps slowly: in the first thousand steps of a run give "
    "bias_correction=True"
)
_ON_MISSING_CORRECTIONS = "bias_correction=True: there are no corrections of Adam's to fold in"


class NoRuleError(ValueError):
    """There is no rule for this, but there is a way out. `option` is the option without a rule, if any."""

    def __init__(self, reason: str, remedy: str, option: str = "") -> None:
        super().__init__(f"{reason}: {remedy}")
        self.reason, self.option = reason, option


def explain_handover(
    optimizer: Optimizer, to: type[T], *, buffers: Buffers | None = None, lr: float | Tensor | None = None,
    alignment: float | Tensor = 0.0, scheduler: Schedulers | None = None, **options: object,
) -> Plan[T]:  # fmt: skip
    """Plan a hand-over and change nothing.

    A REPL or a notebook shows the plan, which says what `handover` would do, and why. In a script, print it.

    Args:
        optimizer: as for `handover`, like all other arguments
        to: the class to change to
        buffers: what happens to the buffers
        lr: the lr of all groups, instead of the transferred one
        alignment: $s^*$
        scheduler: the scheduler to re-attach
        options: options of the new optimizer

    Returns:
        The plan, whose `repr` explains it.

    Raises:
        TypeError: where `handover` would
        ValueError: where `handover` would

    Examples:
        >>> import torch, tam
        >>> sgd = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), lr=0.1, momentum=0.9)
        >>> tam.explain_handover(sgd, tam.TAM)
        SGD -> TAM
          group 0, 2 parameters
            lr 0.1 -> 0.2: times 2
              so the effective lr stays the same: 10 x 0.1 before, 5 x 0.2 after, with s* = 0
            momentum 0.9: carried
            weight_decay 0: carried
            TAM's own: smoothing=0.9, floor=1e-08, scope='global', gain=1, max_grad_norm=None
          buffers: none to carry
          alignment: starts at 0
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got a {type(optimizer).__name__}")
    if not (isinstance(to, type) and issubclass(to, Optimizer)):
        raise TypeError(f"to must be an optimizer class such as tam.TAM, got {_kind_of(to)}")
    source = type(optimizer)
    if isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        raise TypeError(f"{source.__name__} wraps another optimizer: hand over its `.optimizer`")
    alignment = check_alignment(alignment)
    buffers = choose_buffers(source, to, buffers)
    if not has_rule(source, to) and lr is None:
        raise NoRuleError(f"no rule gives the lr of {to.__name__} from that of {source.__name__}", "give lr=")
    defaults = _default_options(to)
    unknown = [name for name in options if name not in defaults]
    if unknown:
        hint = f": {turn_off('optimizer.param_groups', unknown[0])}" if unknown[0] in REFUSED else ""
        raise TypeError(
            f"options must be those of {to.__name__} ({', '.join(defaults)}), got {unknown[0]}={hint}"
        )
    buffer_count = sum(map(has_buffers, optimizer.state.values()))
    carries_buffers = buffers != "fresh" and buffer_count > 0
    if carries_buffers:
        refuse_sparse_buffers(optimizer, to)
    options, notes = _complete_options(optimizer, to, options, carries_buffers)
    schedulers = [] if scheduler is None else find_schedulers(scheduler, optimizer)
    arguments: list[ParamGroup] = []
    factors: list[float] = []
    for i, group in enumerate(optimizer.param_groups):
        new = _carry_options(optimizer, group, to, defaults, options)
        change = _GroupChange(i, source, group, to, {**defaults, **options, **new}, alignment, lr)
        if has_rule(source, to) and (lr is None or buffers != "fresh"):
            refuse_options(
                i, source, group, lambda name: turn_off("optimizer.param_groups", name) + _OR_FRESH
            )
            refuse_options(i, to, change.after, lambda name: f"leave {name}= out{_OR_FRESH}")
        if buffers == "rescale":  # what cannot be rescaled is known before anything changes
            settled_steps((source, group), (to, change.after), alignment)
        if lr is None or schedulers:
            factors.append(change.factor())
            new |= {key: group[key] * factors[-1] for key in GROUP_RATES if key in group}
        new["lr"] = change.new_lr(is_scheduled=bool(schedulers))
        if "weight_decay" in defaults and "weight_decay" not in options:
            new["weight_decay"] = change.new_weight_decay()
        arguments.append(new)
    # A group that is added later has the options of the first.
    options = {k: v for k, v in arguments[0].items() if k in defaults} | options
    after = tuple({**defaults, **options, **group} for group in arguments)
    before = tuple(dict(group) for group in optimizer.param_groups)
    return Plan(
        source=source, to=to, before=before, after=after, arguments=tuple(arguments), options=options,
        lr=lr, factors=tuple(factors), alignment=alignment, buffers=buffers, buffer_count=buffer_count,
        schedulers=convert_schedulers(schedulers, factors, before, after),
        shards=shards_of(optimizer), notes=tuple(notes),
    )  # fmt: skip


def _kind_of(x: object) -> str:
    """Return a few words for a message: an optimizer's repr has many lines."""
    return f"the class {x.__name__}" if isinstance(x, type) else f"a {type(x).__name__} object"


def has_rule(source: type[Optimizer], to: type[Optimizer]) -> bool:
    """Return True if there is a rule from one to the other."""
    return family(source) is not None and family(source) == family(to)


def choose_buffers(source: type[Optimizer], to: type[Optimizer], buffers: Buffers | None) -> Buffers:
    """Return what happens to the buffers, where None leaves the choice to us."""
    if buffers is not None and buffers not in get_args(Buffers):
        raise ValueError(f'buffers must be "keep", "rescale" or "fresh", got "{buffers}"')
    if not has_rule(source, to):
        if buffers in ("keep", "rescale"):
            raise ValueError(
                f'buffers must be "fresh" from {source.__name__} to {to.__name__}, which share none, '
                f'got "{buffers}"'
            )
        return "fresh"
    return buffers or ("keep" if family(source) == "sgd" else "rescale")


def refuse_options(i: int, cls: type[Optimizer], group: ParamGroup, remedy: Callable[[str], str]) -> None:
    """Raise if an option of the group leaves its buffers without a rule; `remedy` takes its name."""
    for name, harmless in REFUSED.items():
        if group.get(name, harmless) != harmless:
            raise NoRuleError(
                f"group {i}: {cls.__name__} has {name}={group[name]!r}, for which there is no rule "
                f"({_WHY_REFUSED[name]})",
                remedy(name),
                name,
            )


def refuse_sparse_buffers(optimizer: Optimizer, to: type[Optimizer]) -> None:
    """Raise if a buffer is sparse, as SGD's is after sparse gradients, and `to` needs dense ones."""
    if not is_torque(to):
        return
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            for name, buffer in optimizer.state.get(p, {}).items():
                is_dense = not isinstance(buffer, Tensor) or buffer.layout is torch.strided
                if is_dense or name not in BUFFER_KEYS:
                    continue
                raise ValueError(
                    f"{describe_parameter(optimizer, i, j)} has a sparse {name} ({buffer.layout}), but "
                    f"{to.__name__} does not support sparse buffers and gradients. For an embedding, use "
                    f"sparse=False. Then make the buffers dense (for state in optimizer.state.values(): "
                    f'state |= {{k: x.to_dense() for k, x in state.items() if k == "{name}"}}), '
                    'or leave them behind (buffers="fresh")'
                )


@dataclass(frozen=True)
class _GroupChange:
    """One group before, and after but for lr and what goes with it."""

    index: int
    source: type[Optimizer]
    before: ParamGroup
    to: type[Optimizer]
    after: ParamGroup
    alignment: float
    lr: float | Tensor | None  # as it was given

    def factor(self) -> float:
        """Return what lr, and everything in units of it, is multiplied by."""
        old_lr = self.before["lr"]
        if self.lr is None:
            old, new = settled_steps((self.source, self.before), (self.to, self.after), self.alignment)
            return old / new
        if any(isinstance(x, Tensor) and x.device.type != "cpu" for x in (self.lr, old_lr)):
            raise NoRuleError(
                f"group {self.index}: lr lies on a device and is not read, so neither weight_decay nor a "
                "scheduler can go with a given one",
                "give weight_decay=, and make a new scheduler",
            )
        # Where a scheduler has brought lr to 0, the given one takes the place of the lr it started from.
        base = float(old_lr) or float(self.before.get("initial_lr", 0.0))
        return float(self.lr) / base if base else 0.0

    def new_lr(self, *, is_scheduled: bool) -> float | Tensor:
        """Return the lr of the new group."""
        old_lr: float | Tensor = self.before["lr"]
        if self.lr is None:
            return old_lr * self.factor()
        if not is_scheduled:
            return self.lr
        if self.factor() == 0:
            raise ValueError(
                f"group {self.index}: no factor leads from lr={old_lr!r} to lr={self.lr!r}, so the scheduler "
                "cannot go with it: give scheduler=[] and make a new one"
            )
        # An lr of 0 stays 0 until the scheduler changes it. A tensor is copied: the scheduler writes to it.
        return self.lr * (0.0 if old_lr == 0 else 1.0)

    def new_weight_decay(self) -> float | Tensor:
        """Return the new weight decay: a decoupled one decays by lr times lambda, which stays."""
        decay: float | Tensor = self.before.get("weight_decay", 0.0)
        was_decoupled, is_now = is_decoupled(self.source, self.before), is_decoupled(self.to, self.after)
        if decay == 0 or not (was_decoupled or is_now):
            return decay
        if was_decoupled != is_now:
            kinds = {True: "decoupled", False: "coupled (part of the gradient)"}
            raise NoRuleError(
                f"group {self.index}: weight_decay={decay!r} is {kinds[was_decoupled]} in "
                f"{self.source.__name__} and {kinds[is_now]} in {self.to.__name__}, and no rule leads from "
                "one to the other",
                "give weight_decay=",
                "weight_decay",
            )
        factor = self.factor()
        return decay / factor if factor else decay


def _complete_options(
    optimizer: Optimizer, to: type[Optimizer], options: ParamGroup, carries_buffers: bool
) -> tuple[ParamGroup, list[str]]:
    """Return the options with those that the hand-over needs, and notes on them."""
    options, notes = dict(options), list[str]()
    source, shards = type(optimizer), shards_of(optimizer)
    if is_torque(source) and is_torque(to) and shards:
        options = {"shard_group": shards.group, "whole_tensors": shards.whole_tensors} | options
    comes_from_torch = not is_torque(source) and is_torque(to) and has_rule(source, to)
    takes_correction = "bias_correction" in _default_options(to)
    if comes_from_torch and takes_correction and "bias_correction" not in options:
        options["bias_correction"] = not carries_buffers
        notes.append(_ON_FOLDED_CORRECTIONS if carries_buffers else _ON_MISSING_CORRECTIONS)
    if name := _option_for_device_count(optimizer, to, options):
        options[name] = True
        notes.append(f"{name}=True: the step count stays on the device, so nothing waits for it")
    has_momentum = any(group.get("momentum") != 0 for group in optimizer.param_groups)
    if comes_from_torch and not has_momentum and "momentum" not in options:
        notes.append(f"momentum=0 is carried; {to.__name__} is meant to have one: give momentum=")
    return options, notes


def _carry_options(
    optimizer: Optimizer, group: ParamGroup, to: type[Optimizer], defaults: ParamGroup, options: ParamGroup
) -> ParamGroup:
    """Return a group of the new optimizer with the options as they are in the first one."""
    new = {k: v for k, v in group.items() if k in defaults and k not in options}
    # What users and schedulers have put there; a Warmup's own count is not carried.
    not_users = {*optimizer.defaults, *defaults, *WARMUP_KEYS, *GROUP_RATES}
    new |= {k: v for k, v in group.items() if k not in not_users}
    if is_torque(to) and new.get("fused"):
        new["fused"] = None  # where it can be: torch's kernels and ours do not take the same tensors
    takes_capturable = not issubclass(to, (Adam, AdamW)) or all(p.is_cuda for p in group["params"])
    if new.get("capturable") and not takes_capturable:
        new["capturable"] = False  # ours accept it anywhere, torch's do not
    names = new.pop("param_names", None)
    new["params"] = list(zip(names, group["params"], strict=True)) if names else list(group["params"])
    return new


def _option_for_device_count(optimizer: Optimizer, to: type[Optimizer], options: ParamGroup) -> str | None:
    """Return the option torch's Adam needs to keep its step count on an accelerator, where it lies there."""
    first = optimizer.param_groups[0]
    is_set = any(options.get(name) or first.get(name) for name in ("fused", "capturable"))
    carries_count = issubclass(to, (Adam, AdamW)) and has_rule(type(optimizer), to)
    if is_set or not carries_count or "foreach" in options:
        return None
    params = [p for group in optimizer.param_groups for p in group["params"]]
    steps = [optimizer.state[p]["step"] for p in params if "step" in optimizer.state.get(p, {})]
    if all(step.device.type == "cpu" for step in steps):
        return None
    return "fused" if all(p.is_cuda and p.is_floating_point() for p in params) else "capturable"


def _default_options(cls: type[Optimizer]) -> ParamGroup:
    """Return the options of the class and their defaults; those of its bases too where it passes them on."""
    defaults: ParamGroup = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
            defaults = {p.name: p.default for p in parameters if p.default is not p.empty} | defaults
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return defaults
