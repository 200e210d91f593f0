"""The buffers of one optimizer, moved to another on the same parameters. Nothing is read from the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from tam.switching.transfer import GroupOfClass, ParamGroup, is_torque, settled_steps

Buffers = Literal["keep", "rescale", "fresh"]

BUFFER_KEYS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "step")


def has_buffers(state: Mapping[str, object]) -> bool:
    """Return True if there is something to carry in a parameter's state."""
    return any(state.get(key) is not None for key in BUFFER_KEYS)


def carry_buffers(
    source: Optimizer, target: Optimizer, buffers: Buffers, *, alignment: float = 0.0, release: bool = False
) -> None:
    """Give `target`, on the same parameters, the state of `source`.

    With `release` the tensors themselves change hands, and `source` is left without state.
    """
    scopes = [optimizer.param_groups[0].get("scope") for optimizer in (source, target)]
    keeps_alignment = is_torque(type(source)) and scopes[0] == scopes[1]
    alignment_by_param: dict[Tensor, Tensor] = {}
    for before, after in zip(source.param_groups, target.param_groups, strict=True):
        has_momentum = not isinstance(target, SGD) or after["momentum"] != 0  # without it SGD has no buffers
        for p in after["params"]:
            old_state = source.state.get(p, {})
            if buffers != "fresh" and has_momentum and has_buffers(old_state):
                state = {k: x if release else x.clone() for k, x in old_state.items() if k in BUFFER_KEYS}
                if buffers == "rescale":
                    _rescale(state, (type(source), before), (type(target), after), alignment)
                if "step" in state and isinstance(target, (Adam, AdamW)):
                    on_device = after["capturable"] or after["fused"]
                    state["step"] = state["step"].to(p.device if on_device else "cpu")
                target.state[p] = state
                alignment_by_param[p] = torch.full((), alignment, dtype=torch.float64, device=p.device)
                if keeps_alignment:
                    alignment_by_param[p] = old_state["alignment"]
            if release:
                source.state.pop(p, None)
    if is_torque(type(target)):
        target.segments.share_alignments(alignment_by_param)  # type: ignore[attr-defined]


def _rescale(state: dict[str, Tensor], before: GroupOfClass, after: GroupOfClass, alignment: float) -> None:
    """Bring m, and Adam's v, to what the new optimizer would have if it had taken the old one's step."""
    old_step, new_step = settled_steps(before, after, alignment)
    factor = new_step / old_step
    if "momentum_buffer" in state:
        state["momentum_buffer"].mul_(factor)
        return
    # What the old optimizer divides by goes in, what the new one will divide by comes out.
    old_m, old_v = _bias_corrections(*before, state["step"])
    new_m, new_v = _bias_corrections(*after, state["step"])
    state["exp_avg"].mul_(factor * new_m / old_m)
    state["exp_avg_sq"].mul_(new_v / old_v)


def _bias_corrections(
    cls: type[Optimizer], group: ParamGroup, step: Tensor
) -> tuple[float | Tensor, float | Tensor]:
    """Return what the optimizer divides m and v by at this step count: 1 - beta^t, or 1."""
    beta1, beta2 = group["betas"]
    if is_torque(cls):
        return 1.0, _bias_correction(beta2, step) if group["bias_correction"] else 1.0
    return _bias_correction(beta1, step), _bias_correction(beta2, step)


def _bias_correction(beta: float, step: Tensor) -> float | Tensor:
    """Return a number where the count lies on the CPU, else a tensor: no step waits for the device."""
    if step.device.type == "cpu":
        return 1 - beta ** float(step) if step > 0 else 1.0
    wide = step if step.device.type == "mps" else step.double()
    return torch.where(step > 0, 1 - beta**wide, 1.0)  # no step yet: m and v are 0
