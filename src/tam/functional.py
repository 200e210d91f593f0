"""Pure steps: parameters, gradients and state in, new ones out; nothing is changed.

    state = functional.init_tam(params)
    params, state = functional.tam(params, grads, state, lr=0.2)

`params` and `grads` are dicts, lists or tuples of tensors; the result has the same form. Everything
works under `torch.func.vmap`, where lr, momentum, weight_decay, gain and, for `tam`, smoothing and floor may
be tensors, one entry for each member of a population, and autograd goes through:

    state = vmap(functional.init_tam)(stacked)  # stacked: {name: tensor of shape [members, ...]}
    step = lambda p, g, s, lr: functional.tam(p, g, s, lr=lr)
    stacked, state = vmap(step)(stacked, grads, state, torch.tensor([0.02, 0.2]))

The rule is the optimizers' own: they call the same code with `differentiable=True`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from tam.options import check_options, refuse_half
from tam.step import angular, run_step
from tam.step.eager import PURE, Bucket, full_like_param, make_buckets
from tam.step.rule import EagerBackend, Rule

Tensors = TypeVar("Tensors", bound=Mapping[str, Tensor] | Sequence[Tensor])


class TAMState(NamedTuple):
    """State of `tam`. `alignment` is 0-dim, or one entry a tensor with scope "tensor"."""

    momentum_buffer: Any
    alignment: Tensor


class AdaTAMState(NamedTuple):
    """State of `adatam` and `adatamw`."""

    step: Tensor
    exp_avg: Any
    exp_avg_sq: Any
    alignment: Tensor


class AngularGradState(NamedTuple):
    """State of `angular_grad`. `coefficient` is empty without `vote`."""

    step: Tensor
    exp_avg: Any
    exp_avg_sq: Any
    previous_grad: Any
    angle: Any
    coefficient: Any


def init_tam(params: Any, *, scope: str = "global") -> TAMState:
    """The state before the first step."""
    return TAMState(_full(params, 0.0), _alignment(params, scope))


def init_adatam(params: Any, *, scope: str = "global") -> AdaTAMState:
    """The state before the first step, for `adatam` and `adatamw`."""
    refuse_half("adatam", _list(params))
    zero = _count(params)
    return AdaTAMState(zero, _full(params, 0.0), _full(params, 0.0), _alignment(params, scope))


def init_angular_grad(params: Any, *, vote: bool = False) -> AngularGradState:
    """The state before the first step."""
    return AngularGradState(
        step=_count(params),
        exp_avg=_full(params, 0.0),
        exp_avg_sq=_full(params, 0.0),
        previous_grad=_full(params, 0.0),
        angle=_full(params, 0.0 if vote else torch.pi / 2),
        coefficient=_full(params, 0.0) if vote else (),
    )


def tam(
    params: Tensors,
    grads: Tensors,
    state: TAMState,
    *,
    lr: float | Tensor = 0.2,
    momentum: float | Tensor = 0.9,
    smoothing: float | Tensor = 0.9,
    floor: float | Tensor = 1e-8,
    weight_decay: float | Tensor = 0.0,
    scope: str = "global",
    gain: float | Tensor = 1.0,
    max_grad_norm: float | None = None,
    maximize: bool = False,
) -> tuple[Tensors, TAMState]:
    """One step of TAM."""
    group = {
        "lr": lr,
        "momentum": momentum,
        "floor": floor,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    rule = Rule(
        scope=_shared(scope),
        smoothing=_checked("smoothing", smoothing),
        gain=_checked("gain", gain),
        max_grad_norm=max_grad_norm,
        adaptive=False,
        decoupled=False,
        ema=False,
        bias_correction=False,
        momentum_key="momentum_buffer",
    )
    buckets = _buckets(params, grads, state, group, ["momentum_buffer"], scope)
    run_step(EagerBackend(PURE, rule, buckets))
    return (
        _collect(params, buckets, None),
        TAMState(_collect(params, buckets, "momentum_buffer"), _alignment_after(buckets, scope)),
    )


def adatam(
    params: Tensors,
    grads: Tensors,
    state: AdaTAMState,
    *,
    lr: float | Tensor = 1e-4,
    betas: tuple[float, float] = (0.9, 0.999),
    smoothing: float = 0.9,
    eps: float = 1e-8,
    floor: float = 1e-8,
    weight_decay: float | Tensor = 0.0,
    scope: str = "global",
    gain: float | Tensor = 1.0,
    ema: bool = False,
    bias_correction: bool = False,
    max_grad_norm: float | None = None,
    maximize: bool = False,
    decoupled: bool = False,
) -> tuple[Tensors, AdaTAMState]:
    """One step of AdaTAM; `decoupled=True` makes it AdaTAMW's."""
    group = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "floor": floor,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    rule = Rule(
        scope=_shared(scope),
        smoothing=_checked("smoothing", smoothing),
        gain=_checked("gain", gain),
        max_grad_norm=max_grad_norm,
        adaptive=True,
        decoupled=decoupled,
        ema=ema,
        bias_correction=bias_correction,
        momentum_key="exp_avg",
    )
    buckets = _buckets(params, grads, state, group, ["exp_avg", "exp_avg_sq"], scope)
    run_step(EagerBackend(PURE, rule, buckets))
    new = AdaTAMState(
        state.step + 1,
        _collect(params, buckets, "exp_avg"),
        _collect(params, buckets, "exp_avg_sq"),
        _alignment_after(buckets, scope),
    )
    return _collect(params, buckets, None), new


def adatamw(
    params: Tensors,
    grads: Tensors,
    state: AdaTAMState,
    *,
    weight_decay: float | Tensor = 1e-2,
    **options: Any,
) -> tuple[Tensors, AdaTAMState]:
    """One step of AdaTAMW; options as `adatam` has them."""
    return adatam(params, grads, state, weight_decay=weight_decay, decoupled=True, **options)


def angular_grad(
    params: Tensors,
    grads: Tensors,
    state: AngularGradState,
    *,
    lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float | Tensor = 0.0,
    method: str = "cos",
    vote: bool = False,
    maximize: bool = False,
) -> tuple[Tensors, AngularGradState]:
    """One step of AngularGrad."""
    group = {
        "lr": lr,
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    check_options({"method": method, "vote": vote})
    keys = ["exp_avg", "exp_avg_sq", "previous_grad", "angle", *(["coefficient"] if vote else [])]
    buckets = _buckets(params, grads, state, group, keys, None)
    angular.take_step(PURE, method, vote, buckets)
    columns = [_collect(params, buckets, key) for key in keys]
    new = AngularGradState._make([state.step + 1, *columns, *([] if vote else [()])])
    return _collect(params, buckets, None), new


def _checked(name: str, value: float | Tensor) -> float | Tensor:
    if not isinstance(value, Tensor):
        check_options({name: value})
    return value


def _shared(scope: str) -> str:
    """A pure step has one group, so that "group" is "global"."""
    check_options({"scope": scope})
    return "tensor" if scope == "tensor" else "global"


def _list(tensors: Any) -> list[Tensor]:
    found = list(tensors.values()) if isinstance(tensors, Mapping) else tensors
    if not isinstance(found, (list, tuple)) or not found:
        raise TypeError(
            f"expected a dict, list or tuple of tensors with something in it, got {type(tensors)}"
        )
    return list(found)


def _like(params: Any, tensors: list[Tensor]) -> Any:
    """The tensors in the form of `params`."""
    if isinstance(params, Mapping):
        return dict(zip(params, tensors, strict=True))
    return tuple(tensors) if isinstance(params, tuple) else tensors


def _full(params: Any, value: float) -> Any:
    return _like(params, [full_like_param(p, value) for p in _list(params)])


def _count(params: Any) -> Tensor:
    return torch.zeros((), device=_list(params)[0].device)


def _alignment(params: Any, scope: str) -> Tensor:
    tensors = _list(params)
    double = all(p.dtype in (torch.float64, torch.complex128) for p in tensors)
    shape = (len(tensors),) if _shared(scope) == "tensor" else ()
    dtype = torch.float64 if double else torch.float32
    return torch.zeros(shape, dtype=dtype, device=tensors[0].device)


def _buckets(
    params: Any, grads: Any, state: Any, group: dict[str, Any], keys: list[str], scope: str | None
) -> list[Bucket]:
    check_options({k: v for k, v in group.items() if not isinstance(v, Tensor)})
    theta = _list(params)
    columns = {"gradient": _column(params, grads, "gradient")}
    columns |= {key: _column(params, getattr(state, key), key) for key in keys}
    if scope is not None:
        s, shape = state.alignment, (len(theta),) if _shared(scope) == "tensor" else ()
        if s.shape != shape:
            raise ValueError(f"alignment has shape {tuple(s.shape)}: that is another scope than {scope!r}")
        columns["alignment"] = list(s.unbind()) if shape else [s] * len(theta)
    if hasattr(state, "step"):
        columns["step"] = [state.step] * len(theta)
    return make_buckets(group, 0, theta, columns.pop("gradient"), columns)


def _column(params: Any, tensors: Any, what: str) -> list[Tensor]:
    """The tensors in the order of the parameters."""
    names: Any = list(params) if isinstance(params, Mapping) else list(range(len(params)))
    if len(tensors) != len(names):
        raise ValueError(f"{len(names)} parameters, but {len(tensors)} of {what}")
    found = []
    for name in names:
        if isinstance(params, Mapping) and name not in tensors:
            raise ValueError(f"parameter {name!r} has no {what}; there are {list(tensors)[:5]}")
        x = tensors[name]
        if not isinstance(x, Tensor) or x.shape != params[name].shape:
            shape = tuple(x.shape) if isinstance(x, Tensor) else x
            raise ValueError(f"parameter {name!r} has shape {tuple(params[name].shape)}, its {what} {shape}")
        found.append(x)
    return found


def _collect(params: Any, buckets: list[Bucket], key: str | None) -> Any:
    """A column (None: theta) of all buckets, in the order and form of `params`."""
    found: dict[int, Tensor] = {}
    for bucket in buckets:
        column = bucket.theta if key is None else bucket.state[key]
        found.update(zip(bucket.rows, column, strict=True))
    return _like(params, [found[i] for i in range(len(found))])


def _alignment_after(buckets: list[Bucket], scope: str) -> Tensor:
    if _shared(scope) != "tensor":
        return buckets[0].state["alignment"][0]
    rows = [(row, s) for b in buckets for row, s in zip(b.rows, b.state["alignment"], strict=True)]
    return torch.stack([s for _, s in sorted(rows, key=lambda pair: pair[0])])
