"""Checks of option values. Each raises a ValueError that names the option, its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

Check = Callable[[str, Any], None]

SCOPES = ("global", "group", "tensor")


def _refuse(name: str, value: Any, allowed: str) -> None:
    raise ValueError(f"{name}={value!r}: must be {allowed}")


def _number(name: str, value: Any, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name}={value!r}: must be {allowed}")
    return float(value)


def learning_rate(name: str, value: Any) -> None:
    allowed = "a finite number >= 0, or a tensor with one"
    if isinstance(value, Tensor):
        if value.numel() != 1:
            _refuse(name, value, allowed)
        if value.device.type != "cpu":
            return  # its value is not read back from the device
        value = value.item()
    if not 0 <= _number(name, value, allowed) < math.inf:
        _refuse(name, value, allowed)


def nonnegative(name: str, value: Any) -> None:
    allowed = "a finite number >= 0"
    if not 0 <= _number(name, value, allowed) < math.inf:
        _refuse(name, value, allowed)


def finite_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a finite number, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")


def below_one(name: str, value: Any) -> None:
    allowed = "a number in [0, 1)"
    if not 0 <= _number(name, value, allowed) < 1:
        _refuse(name, value, allowed)


def up_to_one(name: str, value: Any) -> None:
    allowed = "a number in [0, 1]"
    if not 0 <= _number(name, value, allowed) <= 1:
        _refuse(name, value, allowed)


def two_betas(name: str, value: Any) -> None:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        _refuse(name, value, "a pair of numbers in [0, 1)")
    for i, beta in enumerate(value):
        below_one(f"{name}[{i}]", beta)


def optional_norm(name: str, value: Any) -> None:
    allowed = "None or a number >= 0"
    if value is not None and not _number(name, value, allowed) >= 0:
        _refuse(name, value, allowed)


def one_of(*choices: str) -> Check:
    def check(name: str, value: Any) -> None:
        if value not in choices:
            _refuse(name, value, "one of " + ", ".join(map(repr, choices)))

    return check


def flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        _refuse(name, value, "True or False")


def optional_flag(name: str, value: Any) -> None:
    if value is not None:
        flag(name, value)


# One entry for each option any optimizer of the library has.
CHECKS: Mapping[str, Check] = {
    "lr": learning_rate,
    "momentum": below_one,
    "betas": two_betas,
    "smoothing": up_to_one,
    "eps": nonnegative,
    "floor": nonnegative,
    "weight_decay": nonnegative,
    "scope": one_of(*SCOPES),
    "gain": finite_number,
    "ema": flag,
    "bias_correction": flag,
    "max_grad_norm": optional_norm,
    "method": one_of("cos", "tan"),
    "vote": flag,
    "maximize": flag,
    "foreach": optional_flag,
    "fused": optional_flag,
    "capturable": flag,
    "differentiable": flag,
}


def check_options(options: Mapping[str, Any]) -> None:
    """Checks every known option among these, and the ways of doing the step against each other."""
    for name, value in options.items():
        if name in CHECKS:
            CHECKS[name](name, value)
    for other in ("differentiable", "foreach"):
        if options.get("fused") and options.get(other):
            raise ValueError(f"fused=True does not go with {other}=True: choose one")
