"""What happens to a checkpoint before torch's own `load_state_dict` sees it.

Everything is checked here, before anything has changed: counts, shapes, options, and that the
checkpoint's alignments fit the optimizer's segments. A checkpoint of torch's SGD or Adam is
recognised by what it lacks and completed with the loading optimizer's own options.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor

from tam.optimizers.options import check_options

if TYPE_CHECKING:
    from tam.optimizers.base import Base

# How the step is done, and over what s is defined: the loading optimizer's own affair.
OWN = ("scope", "foreach", "fused", "capturable", "differentiable")
# Options of torch's optimizers for which the library has no counterpart. Harmless at these values.
NOT_OURS = {"nesterov": False, "dampening": 0, "amsgrad": False, "decoupled_weight_decay": None}


def adopt(optimizer: Base, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint as `torch.optim.Optimizer.load_state_dict` should see it."""
    _check_counts(optimizer, checkpoint["param_groups"])
    groups, lacking = [], set()
    for i, (own, saved) in enumerate(zip(optimizer.param_groups, checkpoint["param_groups"], strict=True)):
        group, missing = _merge(optimizer, i, own, saved)
        groups.append(group)
        lacking |= missing
    for name in optimizer.shared_options:
        values = [group[name] for group in groups]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} must be the same in all groups; the checkpoint has {values}")
    state = _check_state(optimizer, checkpoint, foreign=optimizer.mark in lacking)
    if lacking:
        _warn(optimizer, lacking)
    return {**checkpoint, "param_groups": groups, "state": state}


def _check_counts(optimizer: Base, saved: list[dict[str, Any]]) -> None:
    own = optimizer.param_groups
    if len(own) != len(saved):
        raise ValueError(f"the checkpoint has {len(saved)} parameter groups, this optimizer {len(own)}")
    for i, (a, b) in enumerate(zip(own, saved, strict=True)):
        if len(a["params"]) != len(b["params"]):
            raise ValueError(
                f"group {i}: the checkpoint has {len(b['params'])} parameters, "
                f"this optimizer {len(a['params'])}"
            )


def _merge(
    optimizer: Base, i: int, own: dict[str, Any], saved: dict[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """Group i as it will be, and the options the checkpoint lacks."""
    for name, harmless in NOT_OURS.items():
        if harmless is not None and saved.get(name, harmless) != harmless:
            raise ValueError(
                f"group {i}: the checkpoint was written with {name}={saved[name]!r}, "
                f"for which {type(optimizer).__name__} has no rule; only {name}={harmless!r} is taken"
            )
    options = [name for name in optimizer.defaults if name not in OWN]
    missing = {name for name in options if name not in saved}
    kept = {*OWN, *missing}
    if optimizer.mark in missing:
        kept |= {"lr", "initial_lr"}  # another rule's lr means another step size
    taken = {k: v for k, v in saved.items() if k not in kept and k not in NOT_OURS}
    merged = {**{k: v for k, v in own.items() if k in kept}, **taken}
    try:
        check_options(merged)
    except ValueError as error:
        raise ValueError(f"group {i} of the checkpoint: {error}") from None
    return merged, missing


def _check_state(optimizer: Base, checkpoint: dict[str, Any], *, foreign: bool) -> dict[Any, dict[str, Any]]:
    """The state of each parameter without its alignment, which torch would cast."""
    saved_state = checkpoint["state"]
    state = dict(saved_state)
    for i, (own, saved) in enumerate(zip(optimizer.param_groups, checkpoint["param_groups"], strict=True)):
        for j, (p, key) in enumerate(zip(own["params"], saved["params"], strict=True)):
            entry = saved_state.get(key)
            if not entry or (foreign and entry.get(optimizer.state_keys[0], 0) is None):
                state.pop(key, None)  # torch's SGD writes None before the first step
                continue
            for name in optimizer.state_keys:
                _check_tensor(optimizer.name_of(i, j), p, name, entry.get(name))
            known = optimizer.state_keys if foreign else [k for k in entry if k != "alignment"]
            state[key] = {k: entry[k] for k in known}
    return state


def _check_tensor(parameter: str, p: Tensor, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{parameter}: the checkpoint has no {name}")
    expected = () if name == "step" else tuple(p.shape)
    if tuple(value.shape) != expected:
        raise ValueError(
            f"{parameter}: {name} has shape {tuple(value.shape)} in the checkpoint, must be {expected}"
        )


def _warn(optimizer: Base, lacking: set[str]) -> None:
    group = optimizer.param_groups[0]
    kept = sorted(lacking | {"lr"} if optimizer.mark in lacking else lacking)
    warnings.warn(
        f"the checkpoint is not a whole {type(optimizer).__name__} checkpoint; kept from this "
        "optimizer: " + ", ".join(f"{name}={group[name]!r}" for name in kept),
        UserWarning,
        stacklevel=5,
    )
