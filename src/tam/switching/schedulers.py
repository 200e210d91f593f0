"""Learning rate schedulers across a hand-over: what they keep in units of lr, and whose lr they set."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer, lr_scheduler, swa_utils
from torch.optim.lr_scheduler import LRScheduler

from tam._warnings import warn_user
from tam.switching.transfer import ParamGroup

Schedulers = LRScheduler | Sequence[LRScheduler]
Rates = dict[str, float | Tensor | list[float | Tensor]]  # attributes of a scheduler, in units of lr

# What schedulers put into a group in units of lr.
GROUP_RATES = ("initial_lr", "max_lr", "min_lr", "swa_lr")

# What a scheduler keeps itself in units of lr: a list has one value per group, a number is for all groups.
_COMMON_RATES = ("base_lrs", "_last_lr")
_RATES_BY_CLASS: dict[type[LRScheduler], tuple[str, ...]] = {
    lr_scheduler.CosineAnnealingLR: ("eta_min",),
    lr_scheduler.CosineAnnealingWarmRestarts: ("eta_min",),
    lr_scheduler.CyclicLR: ("max_lrs",),
    lr_scheduler.ReduceLROnPlateau: ("min_lrs", "default_min_lr", "eps"),
}
_WITHOUT_OTHER_RATES = (
    lr_scheduler.ChainedScheduler, lr_scheduler.ConstantLR, lr_scheduler.ExponentialLR, lr_scheduler.LambdaLR,
    lr_scheduler.LinearLR, lr_scheduler.MultiplicativeLR, lr_scheduler.MultiStepLR, lr_scheduler.OneCycleLR,
    lr_scheduler.PolynomialLR, lr_scheduler.SequentialLR, lr_scheduler.StepLR, swa_utils.SWALR,
)  # fmt: skip


def find_schedulers(scheduler: Schedulers, optimizer: Optimizer) -> list[LRScheduler]:
    """Return the scheduler, or those of a list, and all inside them; raise if one cannot be re-attached."""
    schedulers: list[LRScheduler] = []
    for outer in scheduler if isinstance(scheduler, (list, tuple)) else [scheduler]:
        kind = type(outer).__name__
        if not isinstance(outer, LRScheduler):
            raise TypeError(f"scheduler must be a torch LRScheduler or a list of them, got a {kind}")
        if type(outer) not in (*_RATES_BY_CLASS, *_WITHOUT_OTHER_RATES):
            raise ValueError(
                f"scheduler must be one of torch's own, got a {kind}, which may keep unknown values in units "
                "of lr: make a new one on the new optimizer, and give scheduler=[]"
            )
        if outer.optimizer is not optimizer:
            raise ValueError(
                f"scheduler must hold the optimizer that is handed over, but this {kind} holds another one, "
                f"a {type(outer.optimizer).__name__}"
            )
        inside = find_schedulers(list(getattr(outer, "_schedulers", ())), optimizer)
        schedulers += [each for each in (outer, *inside) if not any(each is other for other in schedulers)]
    return schedulers


def convert_schedulers(
    schedulers: Sequence[LRScheduler],
    factors: Sequence[float],
    before: Sequence[ParamGroup],
    after: Sequence[ParamGroup],
) -> tuple[tuple[LRScheduler, Rates], ...]:
    """Return what each scheduler will keep in units of lr, given the groups before and after."""
    for scheduler in schedulers:
        _check_cycled_momentum(scheduler, before, after)
    return tuple((scheduler, _convert_rates(scheduler, factors)) for scheduler in schedulers)


def _convert_rates(scheduler: LRScheduler, factors: Sequence[float]) -> Rates:
    """Return the scheduler's attributes in units of lr, times the factor of each group."""
    rates: Rates = {}
    for name in (*_COMMON_RATES, *_RATES_BY_CLASS.get(type(scheduler), ())):
        value = getattr(scheduler, name, None)
        if isinstance(value, (list, tuple)):
            # New lists of new values: a SequentialLR shares its list with a scheduler inside, and torch 2.6
            # its tensors with the groups. After add_param_group the list may be too short.
            rates[name] = [x * factor for x, factor in zip(value, factors, strict=False)]
        elif value and name == "eps":
            rates[name] = value * min(factors)  # a change of lr that is too small to make
        elif value:
            if not all(math.isclose(factor, factors[0], rel_tol=1e-9) for factor in factors):
                raise ValueError(
                    f"{type(scheduler).__name__} has one {name}={value!r} for all groups, but the groups' lr "
                    f"are multiplied by {', '.join(f'{factor:.6g}' for factor in factors)}: set "
                    f"scheduler.{name} = 0, or make a new scheduler and give scheduler=[]"
                )
            rates[name] = value * factors[0]
    return rates


def _check_cycled_momentum(
    scheduler: LRScheduler, before: Sequence[ParamGroup], after: Sequence[ParamGroup]
) -> None:
    """Raise if the scheduler cycles a momentum that the new groups do not have, or have another value of."""
    key = cycled_option(scheduler)
    if key is None:
        return
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        values = [group.get(key) for group in (old, new)]
        if key == "betas":
            values = [betas and betas[0] for betas in values]
        if values[0] != values[1]:
            raise ValueError(
                f"{type(scheduler).__name__} cycles the momentum, so group {i} must keep "
                f"{key}={old[key]!r}, got {new.get(key)!r}: leave {key}= out, or set "
                "scheduler.cycle_momentum = False"
            )


def cycled_option(scheduler: LRScheduler) -> str | None:
    """Return the option that holds the momentum the scheduler cycles, or None if it cycles none."""
    if not getattr(scheduler, "cycle_momentum", False):
        return None
    return "betas" if getattr(scheduler, "use_beta1", False) else "momentum"


def reattach(schedulers: Sequence[tuple[LRScheduler, Rates]], old: Optimizer, new: Optimizer) -> None:
    """Let the schedulers set the new optimizer's lr, with the converted values."""
    if any(hasattr(scheduler, "_step_count") for scheduler, _ in schedulers):
        _Counter(new)
        new._opt_called = getattr(old, "_opt_called", False)  # type: ignore[attr-defined]
    for scheduler, rates in schedulers:
        scheduler.optimizer = new
        vars(scheduler).update(rates)


class _Counter(LRScheduler):
    """Wraps `optimizer.step` as this version of torch does for any scheduler, and does nothing else.

    Without that, a scheduler's first step would warn that it came before `optimizer.step()`.
    """

    def step(self, epoch: int | None = None) -> None:
        """Leave the lr alone."""


def has_scheduler(groups: Sequence[ParamGroup]) -> bool:
    """Return True if a scheduler was made for the optimizer of these; a ReduceLROnPlateau leaves no trace."""
    return any("initial_lr" in group for group in groups)


def warn_if_scheduled(optimizer: Optimizer, to: type[Optimizer]) -> None:
    """Warn that a scheduler stays behind."""
    if has_scheduler(optimizer.param_groups):
        warn_user(
            f"a scheduler sets the lr of this {type(optimizer).__name__} and will not set that of the new "
            f"{to.__name__}, whose lr stays as it is now: give scheduler= to re-attach it, or scheduler=[] "
            "if you make a new one"
        )
