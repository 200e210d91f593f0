"""The loss on the straight line between two models, and its barrier (linear mode connectivity).

Both functions take two modules of one architecture or two state dicts.
"""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Model = TypeVar("Model", bound=nn.Module | dict[str, Any])

Baseline = Literal["mean", "linear"]
BASELINES: tuple[Baseline, ...] = get_args(Baseline)


@dataclass(frozen=True)
class Barrier:
    r"""The losses on the line from a ($t = 0$) to b ($t = 1$), and their largest rise above the baseline.

    Attributes:
        height: the largest $L(t) - \mathrm{base}(t)$ of all points, the ends included
        t: the first point with that rise
        ts: the points, ascending from 0 to 1
        losses: the loss at each of `ts`
        baseline: "mean" or "linear"
    """

    height: float
    t: float
    ts: tuple[float, ...]
    losses: tuple[float, ...]
    baseline: Baseline


@torch.no_grad()
def interpolate(a: Model, b: Model, t: float, *, batches: Iterable[object] | None = None) -> Model:
    """Return the model $(1 - t) a + t b$.

    - At $t = 0$ the result equals a, at $t = 1$ it equals b, to the bit.
    - Floating-point and complex parameters and buffers are interpolated. Those of fewer than 32 bits are
      interpolated in float32 and rounded once.
    - Integer and bool tensors are taken from the nearer end (from a at $t = 1/2$).
    - Everything else (a module's attributes and extra state) is a's. Tied parameters stay tied.

    Args:
        a: a module or a state dict
        b: a module of the same architecture, or a state dict with the same names, shapes and dtypes
        t: the point on the line. Outside of [0, 1] it extrapolates
        batches: for modules: inputs from which the statistics of the batch-norm layers are estimated, at
            $t = 0$ and $t = 1$ too, as the plain average over the batches, with every other layer in
            evaluation mode. A batch is a tensor, a tuple or list whose first entry is the input, or a dict of
            keyword arguments. Its tensors are moved to the device of the model's first parameter. A layer
            that no batch reaches keeps its interpolated statistics

    Returns:
        A new module with a's device, modes and `requires_grad`, or a new state dict.

    Raises:
        TypeError: if a and b are not two modules or two state dicts, or `t` or `batches` has the wrong type
        ValueError: if the parameters of a and b do not match, `t` is not finite or `batches` is empty

    Examples:
        >>> import torch
        >>> from tam.landscape import interpolate
        >>> a, b = {"x": torch.tensor([0.0, 1.0])}, {"x": torch.tensor([4.0, 1.0])}
        >>> interpolate(a, b, 0.25)
        {'x': tensor([1., 1.])}
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
    made: dict[object, Tensor] = {}
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
    baseline: Baseline = "mean",
    batches: Iterable[object] | None = None,
) -> Barrier:
    r"""Return how far the loss on the line from a to b rises above the losses of its ends.

    $$
    \begin{aligned}
    \mathrm{height} &= \max_t \; L(t) - \mathrm{base}(t) \\
    L(t) &= \mathrm{evaluate}((1 - t) a + t b)
    \end{aligned}
    $$

    | `baseline` | $\mathrm{base}(t)$ |
    |---|---|
    | "mean" | $(L(0) + L(1)) / 2$ (Frankle et al. 2020) |
    | "linear" | $(1 - t) L(0) + t L(1)$ |

    The maximum is over the evaluated points, so it is a lower bound of the maximum over the line. The ends
    take part: the height is at least 0, and with "mean" at least $|L(0) - L(1)| / 2$. The height is inf if a
    loss between the ends is inf. It is NaN if any loss is NaN or -inf, or if an end is not finite. `t` is
    then the first such point.

    Args:
        a: a module or a state dict
        b: a module of the same architecture, or a state dict with the same names, shapes and dtypes
        evaluate: returns the loss of a model, a number or a 0-dim tensor. It gets a fresh copy each time, in
            the modes of a (call `a.eval()` first, unless you want the loss in training mode), and runs under
            `torch.no_grad()`
        points: the number of equally spaced points, the ends included, or the points in [0, 1]; the ends are
            added
        baseline: what the loss is compared with
        batches: see `interpolate`. They are read once per point, so they must not be an iterator

    Returns:
        The height, where it is, and all losses.

    Raises:
        TypeError: if `batches` is an iterator, `evaluate` does not return a number, or see `interpolate`
        ValueError: if `baseline` or `points` is out of range, or see `interpolate`

    Examples:
        >>> import torch
        >>> from tam.landscape import barrier
        >>> a, b = {"x": torch.tensor(-1.0)}, {"x": torch.tensor(1.0)}
        >>> line = barrier(a, b, lambda state: (state["x"] ** 2 - 1) ** 2, points=5)
        >>> line.height, line.t, line.losses
        (1.0, 0.5, (0.0, 0.5625, 1.0, 0.5625, 0.0))
    """
    if baseline not in BASELINES:
        raise ValueError(f'baseline must be "mean" or "linear", got "{baseline}"')
    if isinstance(batches, Iterator):
        raise TypeError("batches must be a list or a loader, got an iterator, which one point exhausts")
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
    """Return (1 - t) first + t last, exact at both ends and where they are equal."""
    rise = last - first
    return first + t * rise if t < 0.5 else last - (1 - t) * rise


def _points(points: int | Iterable[float]) -> tuple[float, ...]:
    """Return the points in ascending order, without repetitions, the ends included."""
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


def _number(x: object, what: str) -> float:
    value = x.item() if isinstance(x, Tensor) and x.ndim == 0 else x
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        got = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) and x.ndim else repr(x)
        raise TypeError(f"{what} must be a real number or a 0-dim tensor of one, got {got}")
    return float(value)


def _tensors(model: nn.Module | dict[str, Any]) -> dict[str, Tensor]:
    """Return all parameters and buffers by name: a tied one under each of its names."""
    if isinstance(model, nn.Module):
        named = dict(model.named_parameters(remove_duplicate=False))
        return {**named, **dict(model.named_buffers(remove_duplicate=False))}
    found = {name: x for name, x in model.items() if not name.endswith("_extra_state")}
    for name, x in found.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"a state dict must have tensors only, got {name!r}, a {type(x).__name__}")
    return found


def _place(x: Tensor) -> tuple[object, ...]:
    """Return a key that tied entries of a state dict share: different tensors over the same memory."""
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
    # Equal entries stay equal: rounding could change them, and inf - inf in a mask would be NaN.
    return torch.where(x == y, x, mixed, out=mixed).to(a.dtype)


def _estimate_statistics(model: nn.Module, batches: Iterable[object]) -> None:
    for m in model.modules():
        if isinstance(m, torch.jit.ScriptModule) and "BatchNorm" in m.original_name:
            raise TypeError("batches must be None with scripted batch norms, which cannot be estimated")
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
        raise ValueError("batches must have at least one batch for the batch-norm statistics, got none")
    for m, training in modes:
        m.training = training
    for m, momentum, buffers in before:
        m.momentum = momentum
        if not m.num_batches_tracked:
            m.load_state_dict(buffers, strict=False)


def _moved(x: object, device: torch.device) -> object:
    return x.to(device) if isinstance(x, Tensor) else x


def _check_kinds(a: object, b: object, batches: object) -> None:
    both_modules = isinstance(a, nn.Module) and isinstance(b, nn.Module)
    if not both_modules and not (isinstance(a, dict) and isinstance(b, dict)):
        got = f"{type(a).__name__} and {type(b).__name__}"
        raise TypeError(f"a and b must be two modules or two state dicts (dict), got {got}")
    if batches is not None and not both_modules:
        raise TypeError("batches must be None with state dicts, which cannot be run: give two modules")
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
    """Raise if tensors are tied in a, but not in b: one parameter cannot become two values."""
    names: dict[int, str] = {}
    for name, x in a.items():
        first = names.setdefault(id(x), name)
        if b[first] is not b[name]:
            raise ValueError(f"{first!r} and {name!r} are one tensor in a, but not in b")
