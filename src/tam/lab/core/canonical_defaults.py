"""The option values that a trial's key leaves out, per optimizer of the registry.

A trial's folder is named after a hash of its config without default options. This table fixes those defaults,
so published trials keep their names when a class here or in torch changes a default or its signature.

Never change an entry: it renames trials. If the default of a class changes, configs that use the new default
have to state it. Add an entry for a new option whose default computes what was computed before the option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# As JSON writes them. None is no entry: it always means "not given" (`canonical_options`).
_ALL: dict[str, Any] = {"weight_decay": 0.0, "maximize": False, "differentiable": False}
_SGD = {**_ALL, "momentum": 0.0, "dampening": 0.0, "nesterov": False}
_ADAPTIVE = {**_ALL, "betas": [0.9, 0.999], "eps": 1e-8, "capturable": False}
_TORQUE: dict[str, Any] = {"smoothing": 0.9, "floor": 1e-8, "scope": "global", "gain": 1.0}
_ADATAM = {**_ADAPTIVE, **_TORQUE, "ema": False, "bias_correction": False}
CANONICAL_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sgd": _SGD,
    "sgdm": {**_SGD, "momentum": 0.9},
    "tam": {**_ALL, **_TORQUE, "momentum": 0.9, "capturable": False},
    "adam": {**_ADAPTIVE, "amsgrad": False, "decoupled_weight_decay": False},
    "adamw": {**_ADAPTIVE, "amsgrad": False, "weight_decay": 0.01},
    "angulargrad": {**_ADAPTIVE, "method": "cos", "vote": False},
    "adatam": _ADATAM,
    "adatamw": {**_ADATAM, "weight_decay": 0.01},
}


def canonical_options(optimizer: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as JSON writes them, without defaults and without None."""
    defaults = CANONICAL_DEFAULTS.get(optimizer, {})
    written = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items() if v is not None}
    return {k: v for k, v in written.items() if k not in defaults or defaults[k] != v}
