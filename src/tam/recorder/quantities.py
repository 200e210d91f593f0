"""Which quantities can be recorded for which optimizer, and how they follow from the measurements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from torch.optim import SGD, Optimizer

from tam._wrappers import layers, unwrap
from tam.optimizers import AngularGrad
from tam.optimizers.torque import TorqueOptimizer
from tam.recorder.measure import NORMS, Measure, Total
from tam.recorder.outputs import Row, Value
from tam.recorder.ring import Block, Mark
from tam.step.rule import damping_of, smooth_cosine
from tam.switching.transfer import family, settled_step
from tam.switching.warmup import Warmup

Quantity = Literal[
    "alignment", "damping", "grad_norm", "momentum_norm", "update_norm", "update_ratio", "effective_lr"
]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)

_MEASURES: Mapping[Quantity, Measure] = {
    "alignment": "cosine", "damping": "cosine", "grad_norm": "cosine", "momentum_norm": "momentum",
    "update_norm": "update", "update_ratio": "update",
}  # fmt: skip


def choose_quantities(
    optimizer: Optimizer, quantities: Quantity | Sequence[Quantity] | None
) -> tuple[Quantity, ...]:
    """Return the quantities to record, after checking them."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    optimizers = _upcoming_optimizers(optimizer)
    for active in optimizers:
        if family(type(active)) is None and not isinstance(active, AngularGrad):
            allowed = "torch's SGD, Adam or AdamW, TAM, AdaTAM, AdaTAMW or AngularGrad"
            raise TypeError(f"optimizer must be {allowed}, got {type(active).__name__}")
    names = [quantities] if isinstance(quantities, str) else quantities
    for name in names or ():
        if name not in QUANTITIES:
            raise ValueError(f'quantities must be among {", ".join(QUANTITIES)}, got "{name}"')
    chosen = []
    for name in QUANTITIES if names is None else names:
        reasons = [why_not_recorded(type(o), o.param_groups, name) for o in optimizers]
        if None in reasons:
            chosen.append(name)
        elif names is not None:
            raise ValueError(f"{name} cannot be recorded: {reasons[0]}")
    return tuple(q for q in QUANTITIES if q in chosen)


def _upcoming_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that will take steps: both optimizers of a Warmup before its switch."""
    for layer in layers(optimizer):
        if isinstance(layer, Warmup) and not layer.switched:
            return list(layer.both)
    return [unwrap(optimizer)]


def required_measures(cls: type[Optimizer], quantities: Sequence[Quantity]) -> set[Measure]:
    """Return what must be measured around a step to know these quantities."""
    measures = {_MEASURES[quantity] for quantity in quantities if quantity in _MEASURES}
    # The step of our optimizers knows its cosine and |g|.
    return measures - {"cosine"} if issubclass(cls, TorqueOptimizer) else measures


def why_not_recorded(
    cls: type[Optimizer], groups: Sequence[Mapping[str, Any]], quantity: Quantity
) -> str | None:
    """Return why the optimizer has no such quantity, or None if it has one."""
    if quantity == "effective_lr" and issubclass(cls, AngularGrad):
        return "AngularGrad's differs from coordinate to coordinate"
    needs_momentum = quantity in ("alignment", "damping", "momentum_norm")
    if needs_momentum and issubclass(cls, SGD) and all(group["momentum"] == 0 for group in groups):
        return "SGD without momentum has nothing to compare the gradient with"
    return None


def read_alignments(block: Block, s: list[float], smoothing: float) -> list[list[float]]:
    """Return s of each row of a block, given the s before it.

    Our optimizers write s into the row. For others, this smooths the cosine of the sums like `settle`.
    """
    values = block.read_values().double()
    if issubclass(block.cls, TorqueOptimizer):
        return [row[: -NORMS - 1] for row in values.tolist()]
    sums, alignments = values[:, :3], []
    cosines = smooth_cosine(sums, sums.new_zeros(len(sums)), 0.0).tolist()
    for cosine, is_finite in zip(cosines, sums.isfinite().all(-1).tolist(), strict=True):
        if is_finite:
            s = [smoothing * sum(s) / len(s) + (1 - smoothing) * cosine]  # before it there may be several
        alignments.append(s)
    return alignments


def read_rows(block: Block, alignments: list[list[float]], quantities: Sequence[Quantity]) -> Iterator[Row]:
    """Yield the step and the quantities of each row of a block, given s of each row."""
    rows = zip(block.marks, block.read_values().tolist(), alignments, block.read_rates(), strict=True)
    for mark, row, s, rates in rows:
        values: Row = {q: _derive_quantity(q, row, s, block.cls, rates, mark) for q in quantities}
        yield {"step": mark.step, **values}


def _derive_quantity(
    quantity: Quantity, row: list[float], s: list[float], cls: type[Optimizer], rates: list[float], mark: Mark
) -> Value:
    """Return a quantity of one step: a number, or a list if there are several segments or groups."""
    momentum, update, theta = row[-NORMS:]
    if why_not_recorded(cls, [options for _, options in mark.groups], quantity) is not None:
        return math.nan
    if quantity == "alignment":
        return _unlist_single(s)
    if quantity == "damping":
        gain = mark.groups[0][1].get("gain", 1.0)  # one value for the whole optimizer
        return _unlist_single([damping_of(x, gain) for x in s])
    if quantity == "grad_norm":
        return row[-NORMS - 1] if issubclass(cls, TorqueOptimizer) else _sqrt_or_nan(row[Total.GG])
    ratio = update / theta if theta else math.nan
    squares = {"momentum_norm": momentum, "update_norm": update, "update_ratio": ratio}
    if quantity in squares:
        return _sqrt_or_nan(squares[quantity])
    return _unlist_single([
        lr * settled_step(cls, options, _group_alignment(s, i, mark))
        for i, (lr, (_, options)) in enumerate(zip(rates, mark.groups, strict=True))
    ])  # fmt: skip


def _sqrt_or_nan(x: float) -> float:
    return math.sqrt(x) if x >= 0 else math.nan


def _group_alignment(s: list[float], i: int, mark: Mark) -> float:
    """Return s of group i under its scope: of the optimizer, of the group, or the mean over its tensors."""
    scope = mark.groups[i][1].get("scope", "global")  # other optimizers than ours have one s and no scope
    if scope != "tensor":
        return s[i] if scope == "group" else s[0]
    sizes = [size for size, _ in mark.groups]
    members = s[sum(sizes[:i]) : sum(sizes[: i + 1])]
    return sum(members) / len(members) if members else 0.0


def _unlist_single(values: list[float]) -> Value:
    """Return the only number itself, or all of them."""
    return values[0] if len(values) == 1 else values
