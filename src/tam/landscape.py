"""The loss on the straight line between two models, and its barrier (linear mode connectivity).

    a.eval(), b.eval()
    found = barrier(a, b, lambda model: loss(model(x), y))
    found.height, found.t, found.losses

Both functions take two modules of one architecture or two state dicts.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Model = TypeVar("Model", bound=nn.Module | dict[str, Any])

BASELINES = ("mean", "linear")


@dataclass(frozen=True)
class Barrier:
    """The losses on the line from a (t = 0) to b (t = 1), and how far they rise above the baseline."""

    height: float  # the largest loss(t) - baseline(t) of all points, the ends included
    t: float  # where that is, the first such point
    ts: tuple[float, ...]  # ascending, from 0 to 1
    losses: tuple[float, ...]  # one for each of ts
    baseline: str  # "mean" or "linear"


@torch.no_grad()
def interpolate(a: Model, b: Model, t: float, *, batches: Iterable[Any] | None = None) -> Model:
    """(1 - t) a + t b, as a new module (a's device, modes and `requires_grad`) or a new state dict.

    At t = 0 it is a and at t = 1 it is b, to the bit; a t outside [0, 1] extrapolates. All floating-point
    and complex parameters and buffers are interpolated, those of fewer than 32 bits in float32 with one
    rounding at the end. Integer and bool ones are those of the nearer end (of a at t = 1/2). What is no
    tensor (a module's attributes and extra state) is a's. Tied parameters stay tied.

    `batches`, for modules: inputs over which the statistics of the batch-norm layers are estimated anew,
    at t = 0 and t = 1 too, as the plain average over the batches, with every other layer in evaluation
    mode. A batch is a tensor, a tuple or list whose first entry is the input, or a dict of keyword
    arguments; its tensors are moved to the device of the model's first parameter. A layer that no batch
    reaches keeps its interpolated statistics. A model without such statistics is left as it is.
    """
    t = _number(t, "t")
    if not math.isfinite(t):
        raise ValueError(f"t must be finite, got {t}")
    _check_kinds(a, b, batches)
    left, right = _tensors(a), _tensors(b)
    _check_match(left, right)
    if isinstance(a, nn.Module):
        _check_ties(left, right)
        model = copy.deepcopy(a)
        for name, x in _tensors(model).items():
            x.data = _mix(left[name], right[name], t)
        if batches is not None:
            _estimate_statistics(model, batches)
        return model
    state = copy.copy(a)  # shallow; keeps torch's versions of the layers, an attribute of its state dicts
    made: dict[Any, Tensor] = {}
    for name, x in left.items():
        place = _place(x), _place(right[name])
        if place not in made:
            made[place] = _mix(x, right[name], t)
        state[name] = made[place]
    return state


def barrier(
    a: Model,
    b: Model,
    evaluate: Callable[[Model], float | Tensor],
    *,
    points: int | Iterable[float] = 11,
    baseline: str = "mean",
    batches: Iterable[Any] | None = None,
) -> Barrier:
    """How far the loss on the line from a to b rises above the losses of its ends.

        height = max over t of  L(t) - base(t),    L(t) = evaluate(interpolate(a, b, t, batches=batches))

    base(t) is (L(0) + L(1)) / 2 with "mean" (Frankle et al. 2020) and (1 - t) L(0) + t L(1) with "linear".
    The maximum is over `points` equally spaced t, the ends included, or over the given t in [0, 1] and the
    ends: a lower bound of the supremum over the line. As the ends take part, height >= 0 in both cases; with
    "mean" it is at least |L(0) - L(1)| / 2. At a single point L(t) - base(t) may be negative.

    The height is inf if L is inf between the ends, and NaN if any L is NaN or -inf or an end is not finite;
    t is then the first point with such a difference.

    `evaluate` gets a fresh copy each time, in the modes of a (so call `a.eval()` first, unless the loss in
    training mode is meant), and runs under `torch.no_grad()`. `batches` is gone through once for each t, so
    it must not be an iterator.
    """
    if baseline not in BASELINES:
        raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {baseline!r}")
    if isinstance(batches, Iterator):
        raise TypeError("batches is an iterator, which the first point would use up: give a list or a loader")
    ts = _points(points)
    with torch.no_grad():
        losses = tuple(
            _number(evaluate(interpolate(a, b, t, batches=batches)), "what evaluate returns") for t in ts
        )
    first, last = losses[0], losses[-1]
    rises = []
    for t, loss in zip(ts, losses, strict=True):
        base = 0.5 * first + 0.5 * last if baseline == "mean" else _line(first, last, t)
        rises.append(loss - base if loss > -math.inf else math.nan)
    i = max(range(len(ts)), key=lambda i: (math.isnan(rises[i]), rises[i]))
    return Barrier(rises[i], ts[i], ts, losses, baseline)


def _line(first: float, last: float, t: float) -> float:
    """(1 - t) first + t last, exact at both ends and where they are equal."""
    rise = last - first
    return first + t * rise if t < 0.5 else last - (1 - t) * rise


def _points(points: int | Iterable[float]) -> tuple[float, ...]:
    """Ascending, without repetitions, the ends included."""
    if isinstance(points, numbers.Integral):
        if points < 2:
            raise ValueError(f"points must be at least 2, the ends, got {points}")
        return tuple(i / (int(points) - 1) for i in range(int(points)))
    if not isinstance(points, Iterable):
        raise TypeError(f"points must be an integer or a sequence of numbers in [0, 1], got {points!r}")
    given = [_number(t, "a point") for t in points]
    for t in given:
        if not 0 <= t <= 1:
            raise ValueError(f"points must be in [0, 1], got {t}")
    return tuple(sorted({0.0, 1.0, *given}))


def _number(x: Any, what: str) -> float:
    value = x.item() if isinstance(x, Tensor) and x.ndim == 0 else x
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        got = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) and x.ndim else repr(x)
        raise TypeError(f"{what} must be a real number or a 0-dim tensor of one, got {got}")
    return float(value)


def _tensors(model: nn.Module | dict[str, Any]) -> dict[str, Tensor]:
    """All parameters and buffers by name: a tied one under each of its names."""
    if isinstance(model, nn.Module):
        named = dict(model.named_parameters(remove_duplicate=False))
        return {**named, **dict(model.named_buffers(remove_duplicate=False))}
    found = {name: x for name, x in model.items() if not name.endswith("_extra_state")}
    for name, x in found.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"a state dict has tensors only, but its {name!r} is a {type(x).__name__}")
    return found


def _place(x: Tensor) -> tuple[Any, ...]:
    """Equal for tied entries of a state dict, which are different tensors over the same memory."""
    return x.device, x.data_ptr(), x.dtype, x.shape, x.stride()


def _mix(a: Tensor, b: Tensor, t: float) -> Tensor:
    b = b.to(a.device)
    if t in (0, 1) or not (a.is_floating_point() or a.is_complex()):
        return (a if t <= 0.5 else b).detach().clone()
    if a.is_complex():  # as reals: a complex product turns inf into NaN
        real = [torch.view_as_real(x.resolve_conj()) for x in (a, b)]
        return torch.view_as_complex(_mix(real[0], real[1], t))
    x, y = (v.float() if v.dtype.itemsize < 4 else v for v in (a, b))
    mixed = torch.mul(x, 1 - t).add_(y, alpha=t)
    # What is equal stays so, which rounding would not grant, nor arithmetic a mask's inf beyond the ends.
    return torch.where(x == y, x, mixed, out=mixed).to(a.dtype)


def _estimate_statistics(model: nn.Module, batches: Iterable[Any]) -> None:
    for m in model.modules():
        if isinstance(m, torch.jit.ScriptModule) and "BatchNorm" in m.original_name:
            raise TypeError("batches: the statistics of a scripted batch norm cannot be estimated anew")
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return
    modes = [(m, m.training) for m in model.modules()]
    before = [(m, m.momentum, copy.deepcopy(dict(m.named_buffers()))) for m in norms]
    for m, _ in modes:  # not by eval(), which models override to keep layers as they are
        m.training = m in norms
    for m in norms:
        m.reset_running_stats()
        m.momentum = None  # torch's sign for the plain average
    device = next(iter(_tensors(model).values())).device
    count = 0
    for batch in batches:
        count += 1
        if isinstance(batch, Mapping):
            model(**{key: _moved(x, device) for key, x in batch.items()})
        else:
            model(_moved(batch[0] if isinstance(batch, (tuple, list)) else batch, device))
    if not count:
        raise ValueError("batches is empty: there is nothing to estimate the batch-norm statistics from")
    for m, training in modes:
        m.training = training
    for m, momentum, buffers in before:
        m.momentum = momentum
        if not m.num_batches_tracked:
            m.load_state_dict(buffers, strict=False)


def _moved(x: Any, device: torch.device) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x


def _check_kinds(a: Any, b: Any, batches: Any) -> None:
    both_modules = isinstance(a, nn.Module) and isinstance(b, nn.Module)
    if not both_modules and not (isinstance(a, dict) and isinstance(b, dict)):
        got = f"{type(a).__name__} and {type(b).__name__}"
        raise TypeError(f"expected two modules or two state dicts (dict), got {got}")
    if batches is not None and not both_modules:
        raise TypeError("batches needs modules: a state dict cannot be run")
    if isinstance(batches, (Tensor, Mapping)):
        raise TypeError(
            f"batches must be an iterable of batches, got one {type(batches).__name__}: put it in a list"
        )


def _check_match(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    sides = {"a": [name for name in b if name not in a], "b": [name for name in a if name not in b]}
    lacks = [
        f"{side} lacks {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        for side, names in sides.items()
        if names
    ]
    if lacks:
        raise ValueError(f"a and b have different parameters or buffers: {'; '.join(lacks)}")
    for name, x in a.items():
        y = b[name]
        if x.shape != y.shape:
            raise ValueError(f"{name!r} has shape {tuple(x.shape)} in a, {tuple(y.shape)} in b")
        if x.dtype != y.dtype:
            raise ValueError(f"{name!r} is {x.dtype} in a, {y.dtype} in b")


def _check_ties(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """What is one parameter in a cannot become two values of b."""
    names: dict[int, str] = {}
    for name, x in a.items():
        first = names.setdefault(id(x), name)
        if b[first] is not b[name]:
            raise ValueError(f"{first!r} and {name!r} are one tensor in a, but not in b")
