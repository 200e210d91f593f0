"""The states of the pure steps, and how each begins."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tam.functional.forms import T, Tensors, as_list, in_form_of
from tam.options import Scope, check_options, refuse_half
from tam.step.eager import full_like_param


class TAMState(NamedTuple):
    """State of `tam`.

    Attributes:
        momentum_buffer: m, in the form of the parameters
        alignment: s, 0-dim, or one value per parameter with `scope="tensor"`
    """

    momentum_buffer: Tensors
    alignment: Tensor


class AdaTAMState(NamedTuple):
    """State of `adatam` and `adatamw`.

    Attributes:
        step: the number of steps done, 0-dim
        exp_avg: m, in the form of the parameters
        exp_avg_sq: v, in the form of the parameters
        alignment: s, 0-dim, or one value per parameter with `scope="tensor"`
    """

    step: Tensor
    exp_avg: Tensors
    exp_avg_sq: Tensors
    alignment: Tensor


class AngularGradState(NamedTuple):
    """State of `angular_grad`.

    Attributes:
        step: the number of steps done, 0-dim
        exp_avg: m, in the form of the parameters, as are all that follow
        exp_avg_sq: v
        previous_grad: the gradient of the last step
        angle: the angle of the last step or, with `vote`, the angle kept by the vote
        coefficient: the coefficient kept by the vote; empty without `vote`
    """

    step: Tensor
    exp_avg: Tensors
    exp_avg_sq: Tensors
    previous_grad: Tensors
    angle: Tensors
    coefficient: Tensors = ()


def init_tam(params: Tensors, *, scope: Scope = "global") -> TAMState:
    """Return the state of `tam` before the first step.

    Args:
        params: the parameters, a dict, list or tuple of tensors
        scope: the scope that the steps will have

    Examples:
        >>> import torch
        >>> from tam.functional import init_tam
        >>> init_tam([torch.ones(2)])
        TAMState(momentum_buffer=[tensor([0., 0.])], alignment=tensor(0.))
    """
    return TAMState(_full(params, 0.0), _zero_alignment(params, scope))


def init_adatam(params: Tensors, *, scope: Scope = "global") -> AdaTAMState:
    """Return the state of `adatam` and `adatamw` before the first step.

    Args:
        params: the parameters, a dict, list or tuple of tensors; float16 is refused
        scope: the scope that the steps will have

    Examples:
        >>> import torch
        >>> from tam.functional import init_adatam
        >>> init_adatam({"w": torch.ones(2), "b": torch.ones(1)}, scope="tensor").alignment
        tensor([0., 0.])
    """
    refuse_half("adatam", as_list(params))
    return AdaTAMState(
        _zero_count(params), _full(params, 0.0), _full(params, 0.0), _zero_alignment(params, scope)
    )


def init_angular_grad(params: Tensors, *, vote: bool = False) -> AngularGradState:
    """Return the state of `angular_grad` before the first step.

    Args:
        params: the parameters, a dict, list or tuple of tensors; float16 is refused
        vote: the `vote` that the steps will have

    Examples:
        >>> import torch
        >>> from tam.functional import init_angular_grad
        >>> init_angular_grad([torch.ones(1)]).angle
        [tensor([1.5708])]
    """
    refuse_half("angular_grad", as_list(params))
    m, v, previous = (_full(params, 0.0) for _ in range(3))
    angle = _full(params, 0.0 if vote else torch.pi / 2)
    return AngularGradState(_zero_count(params), m, v, previous, angle, _full(params, 0.0) if vote else ())


def is_by_tensor(scope: Scope) -> bool:
    """Return True for one alignment per tensor: a pure step has one group, so "group" is "global"."""
    check_options({"scope": scope})
    return scope == "tensor"


def check_state(state: object, kind: type, init: str) -> None:
    """Raise if the state is of another function."""
    if not isinstance(state, kind):
        article = "a" if kind is TAMState else "an"
        raise ValueError(f"state must be {article} {kind.__name__} from {init}, got {type(state).__name__}")


def _full(params: T, value: float) -> T:
    return in_form_of(params, [full_like_param(p, value) for p in as_list(params)])


def _zero_count(params: Tensors) -> Tensor:
    return torch.zeros((), device=as_list(params)[0].device)


def _zero_alignment(params: Tensors, scope: Scope) -> Tensor:
    tensors = as_list(params)
    double = all(p.dtype in (torch.float64, torch.complex128) for p in tensors)
    shape = (len(tensors),) if is_by_tensor(scope) else ()
    dtype = torch.float64 if double else torch.float32
    return torch.zeros(shape, dtype=dtype, device=tensors[0].device)
