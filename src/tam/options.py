"""Checks of option values. Each raises an error that names the option, its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Literal, NoReturn, get_args

import torch
from torch import Tensor

Check = Callable[[str, object], None]

Scope = Literal["global", "group", "tensor"]
Method = Literal["cos", "tan"]  # of AngularGrad

# Options of torch's optimizers for which the library has a rule at this value alone.
REFUSED = {"nesterov": False, "dampening": 0, "amsgrad": False}


def turn_off(groups: str, name: str) -> str:
    """Return what a message says to turn a refused option off in all groups: code that can be copied."""
    return f'turn it off first (for group in {groups}: group["{name}"] = {REFUSED[name]!r})'


# Warn where the cosine's average is this many times shorter than the momentum's; theory.md measures it.
SHORT_AVERAGE = 2.5


def _refuse(name: str, value: object, allowed: str, kind: type[Exception] = ValueError) -> NoReturn:
    shown = f'"{value}"' if isinstance(value, str) else repr(value)
    raise kind(f"{name} must be {allowed}, got {shown}")


def _number(name: str, value: object, allowed: str, kind: type[Exception] = ValueError) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        _refuse(name, value, allowed, kind)
    return float(value)


def learning_rate(name: str, value: object) -> None:
    allowed = "a finite number >= 0, or a tensor with one"
    if isinstance(value, Tensor):
        if value.numel() != 1:
            _refuse(name, value, allowed)
        if value.is_meta or value.layout is not torch.strided or value.is_quantized:
            _refuse(name, value, f"{allowed}: a dense one, and not on the meta device, where it has no value")
        if value.device.type != "cpu":
            return  # its value is not read back from the device
        value = value.item()
    if not 0 <= _number(name, value, allowed) < math.inf:
        _refuse(name, value, allowed)


def nonnegative(name: str, value: object) -> None:
    allowed = "a finite number >= 0"
    if not 0 <= _number(name, value, allowed) < math.inf:
        _refuse(name, value, allowed)


def finite_number(name: str, value: object) -> None:
    allowed = "a finite number"
    if not math.isfinite(_number(name, value, allowed, TypeError)):
        _refuse(name, value, allowed)


def below_one(name: str, value: object) -> None:
    allowed = "a number in [0, 1)"
    if not 0 <= _number(name, value, allowed) < 1:
        _refuse(name, value, allowed)


def up_to_one(name: str, value: object) -> None:
    allowed = "a number in [0, 1]"
    if not 0 <= _number(name, value, allowed) <= 1:
        _refuse(name, value, allowed)


def two_betas(name: str, value: object) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        _refuse(name, value, "a pair of numbers in [0, 1)")
    for i, beta in enumerate(value):
        below_one(f"{name}[{i}]", beta)


def optional_norm(name: str, value: object) -> None:
    allowed = "None or a number >= 0"
    if value is not None and not _number(name, value, allowed) >= 0:
        _refuse(name, value, allowed)


def one_of(*choices: str) -> Check:
    def check(name: str, value: object) -> None:
        if value not in choices:
            *others, last = [f'"{choice}"' for choice in choices]
            _refuse(name, value, f"{', '.join(others)} or {last}")

    return check


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(name, value, "True or False")


def optional_flag(name: str, value: object) -> None:
    if value is not None:
        flag(name, value)


def refuse_half(name: str, params: Iterable[Tensor]) -> None:
    """Refuse float16 parameters, in which v underflows: steps would be up to thousands of times too long.

    State in float32 instead would be more memory than Adam's.
    """
    for p in params:
        if p.dtype == torch.float16:
            raise ValueError(
                f"{name} does not support float16 parameters, got one of shape {tuple(p.shape)}: squares of "
                "its gradients underflow. Keep parameters in float32 (with torch.autocast) or bfloat16"
            )


def warning_of_short_average(
    name: str, momentum: float, smoothing: float, gain: float, momentum_name: str
) -> str | None:
    """Return what to tell the user if s is averaged over a much shorter time than m; None if it is not.

    A gain below 1 shrinks what s does to the damping, and one of 0 or less cannot accelerate.
    """
    # The tolerance is for differences like 1 - 0.9, which are not exact.
    if min(gain, 1.0) * (1 - smoothing) <= SHORT_AVERAGE * (1 - momentum) * (1 + 1e-9):
        return None
    steps = [f"{1 / (1 - decay):.3g}" for decay in (smoothing, momentum)]
    return (
        f"{name} with smoothing={smoothing:g} averages the cosine over about {steps[0]} steps, and with "
        f"{momentum_name}={momentum:g} the momentum over about {steps[1]}. The damping then follows each "
        "oscillation: it weighs accelerating gradients more than braking ones. On quadratic losses TAM then "
        f"diverges at learning rates where constant damping converges. Use smoothing={momentum:g} or more "
        "(docs/how-it-works/theory.md has the measurements), or smoothing=1 for constant damping"
    )


# One entry for each option any optimizer of the library has.
CHECKS: Mapping[str, Check] = {
    "lr": learning_rate, "momentum": below_one, "betas": two_betas, "smoothing": up_to_one,
    "eps": nonnegative, "floor": nonnegative, "weight_decay": nonnegative,
    "scope": one_of(*get_args(Scope)), "gain": finite_number, "ema": flag, "bias_correction": flag,
    "max_grad_norm": optional_norm, "method": one_of(*get_args(Method)), "vote": flag, "maximize": flag,
    "foreach": optional_flag, "fused": optional_flag, "capturable": flag, "differentiable": flag,
}  # fmt: skip


def check_options(options: Mapping[str, object]) -> None:
    """Check every known option among these, and that the chosen backends go together."""
    for name, value in options.items():
        if name in CHECKS:
            CHECKS[name](name, value)
    for other in ("differentiable", "foreach"):
        if options.get("fused") and options.get(other):
            raise ValueError(f"fused=True does not go with {other}=True: choose one")
