"""What happens to a checkpoint before torch's own `load_state_dict` sees it.

Everything is checked here, before anything has changed: counts, shapes, options. A checkpoint of
torch's SGD or Adam is recognised by what it lacks and completed with the loading optimizer's options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tam._messages import describe_parameter
from tam.options import CHECKS, REFUSED, check_options, turn_off
from tam.sharding.dtensor import is_dtensor
from tam.step.eager import GroupOptions

# How the step is done, and over what s is defined: the loading optimizer's own affair.
OWN = ("scope", "foreach", "fused", "capturable", "differentiable")
# Options that came later: a checkpoint without them was written by what they are by default.
LATER = {"gain": 1.0}


def prepare_checkpoint(
    optimizer: Optimizer,
    checkpoint: dict[str, Any],
    mark: str | None,
    state_keys_of: Callable[[GroupOptions], tuple[str, ...]],
    shared_options: tuple[str, ...],
) -> tuple[dict[str, Any], str]:
    """Return the checkpoint as torch's `load_state_dict` should see it, and a remark for the user, or "".

    `mark` is the option by which a checkpoint of our own is recognised, or None.
    """
    for key in ("param_groups", "state"):
        if key not in checkpoint:
            raise ValueError(
                f"this is no optimizer's state_dict: it has no {key!r}, but {list(checkpoint)[:5]}"
            )
    _check_counts(optimizer, checkpoint["param_groups"])
    foreign = any(_is_foreign(saved, mark, optimizer.defaults) for saved in checkpoint["param_groups"])
    if foreign and any(_has_another_rule(saved) for saved in checkpoint["param_groups"]):
        raise ValueError(
            f"{type(optimizer).__name__} cannot load this checkpoint: it is of RMSprop, NAdam, Muon or a "
            "similar optimizer, whose buffers mean something else"
        )
    momentum = "betas" if "betas" in optimizer.defaults else "momentum"
    if not foreign and any(momentum not in saved for saved in checkpoint["param_groups"]):
        name = type(optimizer).__name__
        raise ValueError(
            f"{name} cannot load this checkpoint, whose groups have no {momentum!r}: load it into the class "
            f"that wrote it, then use tam.handover(optimizer, tam.{name}, lr=...)"
        )
    later = {} if foreign else {k: v for k, v in LATER.items() if k in optimizer.defaults}
    saved_groups = [{**later, **saved} for saved in checkpoint["param_groups"]]
    pairs = list(zip(optimizer.param_groups, saved_groups, strict=True))
    groups = [_merge(optimizer, i, own, saved, foreign) for i, (own, saved) in enumerate(pairs)]
    for name in shared_options:
        values = [group[name] for group in groups]
        if any(value != values[0] for value in values):
            raise ValueError(f"{name} must be the same in all groups; the checkpoint has {values}")
    state = dict(checkpoint["state"])
    for i, ((own, saved), group) in enumerate(zip(pairs, groups, strict=True)):
        for j, (p, key) in enumerate(zip(own["params"], saved["params"], strict=True)):
            entry, names = state.get(key), state_keys_of(group)
            if entry is not None and not isinstance(entry, Mapping):
                raise ValueError(
                    f"{describe_parameter(optimizer, i, j)}: its state in the checkpoint must be a dict, "
                    f"got {entry!r}"
                )
            if not entry or (foreign and entry.get(names[0], 0) is None):
                state.pop(key, None)  # torch's SGD writes None before the first step
                continue
            if not foreign and not any(name in entry for name in names):
                continue  # a user's own entries, from before the first gradient
            kept = names if foreign else [k for k in entry if k != "alignment"]
            checked = {k: _checked(describe_parameter(optimizer, i, j), p, k, entry) for k in names}
            state[key] = {k: checked.get(k, entry.get(k)) for k in kept}
    adopted = {**checkpoint, "param_groups": groups, "state": state}
    return adopted, _remark(optimizer, pairs, groups, foreign)


def _is_foreign(saved: Mapping[str, Any], mark: str | None, options: Mapping[str, Any]) -> bool:
    """Return True for a parameter group that an optimizer of another family wrote."""
    if mark is not None:
        return mark not in saved
    return any(name in saved and name not in options for name in (*CHECKS, *REFUSED))


def _has_another_rule(saved: Mapping[str, Any]) -> bool:
    """Return True for groups of optimizers whose buffers have the names of SGD's or Adam's.

    RMSprop and ASGD have `alpha`, Muon has `ns_steps`. NAdam and RAdam can decouple the weight decay, and
    lack Adam's `amsgrad`.
    """
    return (
        "alpha" in saved
        or "ns_steps" in saved
        or ("decoupled_weight_decay" in saved and "amsgrad" not in saved)
    )


def _check_counts(optimizer: Optimizer, saved: list[dict[str, Any]]) -> None:
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
    optimizer: Optimizer, i: int, own: dict[str, Any], saved: dict[str, Any], foreign: bool
) -> dict[str, Any]:
    """Return group i as the load will set it."""
    for name, harmless in REFUSED.items():
        if saved.get(name, harmless) != harmless:
            remedy = turn_off('checkpoint["param_groups"]', name)
            raise ValueError(
                f"group {i}: the checkpoint was written with {name}={saved[name]!r}, for which "
                f"{type(optimizer).__name__} has no rule. To load all else, {remedy}"
            )
    if foreign:
        # Only what means the same there: not lr, which belongs to another rule, nor what a scheduler
        # has added.
        taken = {k: saved[k] for k in optimizer.defaults if k in saved and k not in (*OWN, "lr")}
        names = {k: saved[k] for k in ("param_names",) if k in saved}
        merged = {**own, **taken, **names, "params": saved["params"]}
    else:
        merged = {**{k: own[k] for k in optimizer.defaults}, **saved, **{k: own[k] for k in OWN if k in own}}
    try:
        check_options(merged)
    except ValueError as error:
        raise ValueError(f"group {i} of the checkpoint: {error}") from None
    return merged


def _checked(parameter: str, p: Tensor, name: str, entry: Mapping[str, Any]) -> Tensor:
    value = entry.get(name)
    if name == "step" and isinstance(value, (int, float)) and value is not True and value is not False:
        # As torch's Adam kept it until 1.12.
        value = torch.tensor(float(value), device="cpu")
    if not isinstance(value, Tensor):
        found = ", ".join(sorted(entry))
        raise ValueError(f"{parameter}: the checkpoint has no {name} but {found}: is it another optimizer's?")
    if not is_dense_real(value) and not (p.is_complex() and value.is_complex() and name != "step"):
        raise ValueError(
            f"{parameter}: {name} in the checkpoint must be a dense tensor of the parameter's kind, got a "
            f"{value.dtype} tensor, {value.layout}, on {value.device}"
        )
    expected = () if name == "step" else tuple(p.shape)
    if tuple(value.shape) != expected:
        raise ValueError(
            f"{parameter}: {name} has shape {tuple(value.shape)} in the checkpoint, must be {expected}"
        )
    if name == "step" or is_dtensor(p) or (value.is_complex() == p.is_complex() and _is_writable(value)):
        return value
    return torch.empty_like(p, device=value.device).copy_(value)


def is_dense_real(x: Any) -> bool:
    """Return True for a plain tensor of real numbers: not sparse, quantized, complex or without values."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return False
    return not (x.is_quantized or x.is_complex() or x.is_meta)


def _is_writable(x: Tensor) -> bool:
    """Return True if a step can write to each element by itself."""
    overlaps = any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return not (overlaps or x.is_conj() or x.is_neg())


def _show(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else repr(value)


def _remark(
    optimizer: Optimizer,
    pairs: list[tuple[dict[str, Any], dict[str, Any]]],
    groups: list[dict[str, Any]],
    foreign: bool,
) -> str:
    """Return what a user should know about a checkpoint that another optimizer or version wrote."""
    parts = []
    for i, ((own, saved), group) in enumerate(zip(pairs, groups, strict=True)):
        lacking = [k for k in optimizer.defaults if k not in saved and k not in OWN]
        kept = [*(["lr"] if foreign else []), *lacking]
        if not kept:
            continue
        changed = [k for k in optimizer.defaults if k not in kept and k not in OWN and own[k] != group[k]]
        part = f"group {i} keeps " + ", ".join(f"{k}={_show(group[k])}" for k in kept)
        if changed:
            part += "; the checkpoint sets " + ", ".join(
                f"{k}={_show(group[k])} (was {_show(own[k])})" for k in changed
            )
        # Until torch 2.6, checkpoints of Adam and AdamW look the same.
        unsaid = None if "betas" in saved else False
        here, there = getattr(optimizer, "decoupled", False), saved.get("decoupled_weight_decay", unsaid)
        if foreign and "initial_lr" in saved:
            part += (
                f"; a scheduler had moved its lr from {_show(saved['initial_lr'])} to "
                f"{_show(saved.get('lr'))}, which is lost here. To keep the scheduler, load both checkpoints "
                "into the classes that wrote them, then use tam.handover(..., scheduler=scheduler)"
            )
        if foreign and here != there and group["weight_decay"] != 0:
            kinds = {True: "decoupled", False: "coupled", None: "coupled (Adam) or decoupled (AdamW)"}
            part += f"; its weight decay was {kinds[there]} and is {kinds[here]} here"
        parts.append(part)
    if not parts:
        return ""
    what = "of another optimizer" if foreign else "of another version"
    return f"a checkpoint {what} was loaded into {type(optimizer).__name__}: " + ". ".join(parts)
