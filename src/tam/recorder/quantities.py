"""What can be recorded, of which optimizer, and how it follows from what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from tam._wrappers import layers, unwrap
from tam.optimizers import AngularGrad
from tam.optimizers.torque import TorqueOptimizer
from tam.recorder.measure import NORMS
from tam.recorder.ring import Block, Mark
from tam.step.rule import damping_of, settle
from tam.switching.transfer import family, settled_step
from tam.switching.warmup import Warmup

QUANTITIES = (
    "alignment", "damping", "grad_norm", "momentum_norm", "update_norm", "update_ratio", "effective_lr",
)  # fmt: skip


def choose_quantities(optimizer: Optimizer, quantities: Sequence[str] | None) -> tuple[str, ...]:
    """The quantities to record, checked."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"a Recorder records a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    optimizers = to_come(optimizer)
    for one in optimizers:
        if family(type(one)) is None and not isinstance(one, AngularGrad):
            known = "torch's SGD, Adam and AdamW, TAM, AdaTAM, AdaTAMW and AngularGrad"
            raise TypeError(f"a Recorder knows {known}, not {type(one).__name__}")
    if quantities is None:
        return tuple(q for q in QUANTITIES if any(_obstacle_of(o, q) is None for o in optimizers))
    quantities = [quantities] if isinstance(quantities, str) else quantities
    for quantity in quantities:
        check_quantity(optimizer, quantity)
    return tuple(q for q in QUANTITIES if q in quantities)


def to_come(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers whose steps there will be: two of a Warmup before its switch."""
    for layer in layers(optimizer):
        if isinstance(layer, Warmup) and not layer.switched:
            return list(layer.both)
    return [unwrap(optimizer)]


def measured(quantities: Sequence[str]) -> set[str]:
    """What must be measured to know these quantities."""
    found = {
        "alignment": "cosine", "damping": "cosine", "grad_norm": "cosine", "momentum_norm": "momentum",
        "update_norm": "update", "update_ratio": "update",
    }  # fmt: skip
    return {found[quantity] for quantity in quantities if quantity in found}


def check_quantity(optimizer: Optimizer, quantity: str) -> None:
    """Raises where none of the optimizers to come has the quantity."""
    if quantity not in QUANTITIES:
        raise ValueError(f'quantities must be among {", ".join(QUANTITIES)}, got "{quantity}"')
    obstacles = [_obstacle_of(one, quantity) for one in to_come(optimizer)]
    if None not in obstacles:
        raise ValueError(f"{quantity} cannot be recorded: {obstacles[0]}")


def _obstacle_of(optimizer: Optimizer, quantity: str) -> str | None:
    return obstacle(type(optimizer), optimizer.param_groups, quantity)


def obstacle(cls: type[Optimizer], groups: Sequence[Mapping[str, Any]], quantity: str) -> str | None:
    """Why an optimizer has no such quantity; None where it has."""
    still = issubclass(cls, SGD) and all(group["momentum"] == 0 for group in groups)
    if still and quantity in ("alignment", "damping", "momentum_norm"):
        return "SGD without momentum has nothing to compare the gradient with"
    if quantity == "effective_lr" and issubclass(cls, AngularGrad):
        return "AngularGrad's differs from coordinate to coordinate"
    return None


def settled(block: Block, s: list[float], smoothing: float) -> list[list[float]]:
    """s of each row of a block, given the s before it.

    Our optimizers say it themselves. Of others the cosine is in the sums, and smoothed here as `settle` does.
    """
    values = block.values().double()
    if issubclass(block.cls, TorqueOptimizer):
        return [row[: -NORMS - 1] for row in values.tolist()]
    sums, found = values[:, :3], []
    cosines = settle(sums, torch.zeros(len(sums), dtype=sums.dtype), 0.0).tolist()
    for cosine, finite in zip(cosines, sums.isfinite().all(-1).tolist(), strict=True):
        if finite:
            s = [smoothing * sum(s) / len(s) + (1 - smoothing) * cosine]  # before it there may be several
        found.append(s)
    return found


def derive(
    quantity: str, row: list[float], s: list[float], cls: type[Optimizer], rates: list[float], mark: Mark
) -> Any:
    """A quantity of one step from its row: a number, or a list where there are several."""
    momentum, update, theta = row[-NORMS:]
    if obstacle(cls, [options for _, options in mark.groups], quantity) is not None:
        return math.nan
    if quantity == "alignment":
        return _one(s)
    if quantity == "damping":
        gain = mark.groups[0][1].get("gain", 1.0)  # one value for the whole optimizer
        return _one([damping_of(x, gain) for x in s])
    if quantity == "grad_norm":
        return row[-NORMS - 1] if issubclass(cls, TorqueOptimizer) else _root(row[2])
    if quantity == "momentum_norm":
        return _root(momentum)
    if quantity == "update_norm":
        return _root(update)
    if quantity == "update_ratio":
        return _root(update / theta) if theta else math.nan
    return _one([
        lr * settled_step(cls, options, _of_group(s, i, [size for size, _ in mark.groups]))
        for i, (lr, (_, options)) in enumerate(zip(rates, mark.groups, strict=True))
    ])  # fmt: skip


def _root(x: float) -> float:
    return math.sqrt(x) if x >= 0 else math.nan


def _of_group(s: list[float], i: int, sizes: list[int]) -> float:
    """The alignment of group i: the optimizer's, the group's, or the mean of its tensors'."""
    if len(s) == 1:
        return s[0]
    if len(s) == len(sizes):
        return s[i]
    own = s[sum(sizes[:i]) : sum(sizes[: i + 1])]
    return sum(own) / len(own) if own else 0.0


def _one(values: list[float]) -> Any:
    return values[0] if len(values) == 1 else values
