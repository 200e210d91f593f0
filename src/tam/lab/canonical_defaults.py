"""The option values that a trial's key leaves out, per optimizer of the registry.

A trial's folder is named after a hash of its config without default options. This table fixes those defaults,
so published trials keep their names when a class here or in torch changes a default or its signature.

Never change an entry: it renames trials. If the default of a class changes, configs that use the new default
have to state it. Add an entry for a new option whose default computes what was computed before the option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SGD: dict[str, Any] = {
    "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False,
    "maximize": False, "differentiable": False,
}  # fmt: skip
_ADAM: dict[str, Any] = {
    "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False,
    "maximize": False, "capturable": False, "differentiable": False,
}  # fmt: skip
_TAM: dict[str, Any] = {
    "momentum": 0.9, "smoothing": 0.9, "floor": 1e-8, "weight_decay": 0.0, "scope": "global", "gain": 1.0,
    "maximize": False, "capturable": False, "differentiable": False,
}  # fmt: skip
_ADATAM: dict[str, Any] = {
    "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "smoothing": 0.9, "floor": 1e-8,
    "scope": "global", "gain": 1.0, "ema": False, "bias_correction": False,
    "maximize": False, "capturable": False, "differentiable": False,
}  # fmt: skip
_ANGULARGRAD: dict[str, Any] = {
    "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "method": "cos", "vote": False,
    "maximize": False, "capturable": False, "differentiable": False,
}  # fmt: skip

# As JSON writes them. None is no entry: it always means "not given" (`canonical_options`).
CANONICAL_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sgd": _SGD,
    "sgdm": {**_SGD, "momentum": 0.9},
    "tam": _TAM,
    "adam": {**_ADAM, "decoupled_weight_decay": False},
    "adamw": {**_ADAM, "weight_decay": 0.01},
    "angulargrad": _ANGULARGRAD,
    "adatam": _ADATAM,
    "adatamw": {**_ADATAM, "weight_decay": 0.01},
}


def canonical_options(optimizer: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as JSON writes them, without defaults and without None."""
    defaults = CANONICAL_DEFAULTS.get(optimizer, {})
    written = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items() if v is not None}
    return {k: v for k, v in written.items() if k not in defaults or defaults[k] != v}
