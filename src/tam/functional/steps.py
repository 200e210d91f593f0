"""The pure steps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tam.functional.forms import T, Tensors, as_list, column_of, in_form_of
from tam.functional.states import AdaTAMState, AngularGradState, TAMState, check_state, is_by_tensor
from tam.options import Method, Scope, check_options
from tam.step import angular, run_step
from tam.step.eager import PURE, Bucket, make_buckets
from tam.step.rule import EagerBackend, Rule


def tam(
    params: T, grads: T, state: TAMState, *, lr: float | Tensor = 0.2, momentum: float | Tensor = 0.9,
    smoothing: float | Tensor = 0.9, floor: float | Tensor = 1e-8, weight_decay: float | Tensor = 0.0,
    scope: Scope = "global", gain: float | Tensor = 1.0, max_grad_norm: float | None = None,
    maximize: bool = False,
) -> tuple[T, TAMState]:  # fmt: skip
    r"""Return the parameters and the state after one step of TAM.

    $$
    \begin{aligned}
    S_t &= \langle m_{t-1}, g_t \rangle / (|m_{t-1}| |g_t|) \\
    s_t &= \gamma s_{t-1} + (1 - \gamma) S_t \\
    d_t &= (1 + \mathrm{clip}(\mathrm{gain}\, s_t, -1, 1)) / 2 \\
    m_t &= \beta m_{t-1} + (\epsilon + d_t) (k g_t + \lambda \theta_{t-1}) \\
    \theta_t &= \theta_{t-1} - \eta m_t
    \end{aligned}
    $$

    Args:
        params: $\theta$, a dict, list or tuple of tensors
        grads: $g$, in the same form
        state: the state, from `init_tam` or the last step
        lr: $\eta$
        momentum: $\beta$
        smoothing: $\gamma$, the decay rate of the smoothed cosine s; 1 keeps s at 0. It should not be below
            `momentum`. These functions do not warn of that, unlike `tam.TAM`: see
            [theory](../how-it-works/theory.md)
        floor: $\epsilon$, the smallest weight of a new gradient
        weight_decay: $\lambda$, added to the gradient (coupled)
        scope: "global" for one cosine over all parameters, "tensor" for one per parameter; "group" is
            "global" here, because a pure step has one group
        gain: how strongly d responds to s; 1 is the paper's rule, 0 keeps d at 1/2
        max_grad_norm: clip the gradient to this norm over all parameters, with the factor k
        maximize: ascend instead of descend

    Returns:
        The new parameters, in the form of `params`, and the new state.

    Raises:
        ValueError: if an option has a wrong value, or parameters, gradients and state do not match

    Examples:
        >>> import torch
        >>> from tam.functional import init_tam, tam
        >>> params, grads = {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 0.0])}
        >>> params, state = tam(params, grads, init_tam(params), lr=0.2)  # no momentum yet: d = 1/2
        >>> params, state.alignment
        ({'w': tensor([0.9000, 1.0000])}, tensor(0.))
        >>> params, state = tam(params, grads, state, lr=0.2)  # along the momentum: S = 1
        >>> params, state.alignment
        ({'w': tensor([0.7000, 1.0000])}, tensor(0.1000))
    """
    group = {
        "lr": lr, "momentum": momentum, "floor": floor, "weight_decay": weight_decay, "maximize": maximize,
    }  # fmt: skip
    options = scope, smoothing, gain, max_grad_norm
    check_state(state, TAMState, "init_tam")
    theta, (m,), s = _torque_step(params, grads, state, group, ["momentum_buffer"], *options)
    return theta, TAMState(m, s)


def adatam(
    params: T, grads: T, state: AdaTAMState, *, lr: float | Tensor = 1e-4,
    betas: tuple[float, float] = (0.9, 0.999), smoothing: float = 0.9, eps: float = 1e-8,
    floor: float = 1e-8, weight_decay: float | Tensor = 0.0, scope: Scope = "global",
    gain: float | Tensor = 1.0, ema: bool = False, bias_correction: bool = False,
    max_grad_norm: float | None = None, maximize: bool = False, decoupled: bool = False,
) -> tuple[T, AdaTAMState]:  # fmt: skip
    r"""Return the parameters and the state after one step of AdaTAM.

    $$
    \begin{aligned}
    v_t &= \beta_2 v_{t-1} + (1 - \beta_2) (k g_t + \lambda \theta_{t-1})^2 \\
    \theta_t &= \theta_{t-1} - \eta m_t / (\sqrt{v_t} + c)
    \end{aligned}
    $$

    m, s, d and k are those of `tam`.

    Args:
        params: $\theta$, a dict, list or tuple of tensors
        grads: $g$, in the same form
        state: the state, from `init_adatam` or the last step
        lr: $\eta$
        betas: $\beta_1$, the momentum, and $\beta_2$
        smoothing: see `tam`, as for floor, scope, gain, max_grad_norm and maximize
        eps: $c$, added to the denominator
        floor: $\epsilon$
        weight_decay: $\lambda$
        scope: "global" or "tensor"
        gain: of s in the damping
        ema: $m \leftarrow (1 - w) m + w g$ with $w = \epsilon + d$, the paper's AdaTAM2;
            `betas[0]` is then unused
        bias_correction: divide v by $1 - \beta_2^t$, as Adam does
        max_grad_norm: clip the gradient to this norm
        maximize: ascend instead of descend
        decoupled: decay the weights as AdaTAMW does, see `adatamw`

    Returns:
        The new parameters, in the form of `params`, and the new state.

    Raises:
        ValueError: if an option has a wrong value, or parameters, gradients and state do not match

    Examples:
        >>> import torch
        >>> from tam.functional import adatam, init_adatam
        >>> params, grads = [torch.ones(2)], [torch.tensor([1.0, -1.0])]
        >>> params, state = adatam(params, grads, init_adatam(params), lr=0.1, bias_correction=True)
        >>> params, state.step
        ([tensor([0.9500, 1.0500])], tensor(1.))
    """
    group = {
        "lr": lr, "betas": betas, "eps": eps, "floor": floor, "weight_decay": weight_decay,
        "maximize": maximize,
    }  # fmt: skip
    options = scope, smoothing, gain, max_grad_norm, True, decoupled, ema, bias_correction
    check_state(state, AdaTAMState, "init_adatam")
    theta, (m, v), s = _torque_step(params, grads, state, group, ["exp_avg", "exp_avg_sq"], *options)
    return theta, AdaTAMState(state.step + 1, m, v, s)


def adatamw(
    params: T, grads: T, state: AdaTAMState, *, lr: float | Tensor = 1e-4,
    betas: tuple[float, float] = (0.9, 0.999), smoothing: float = 0.9, eps: float = 1e-8,
    floor: float = 1e-8, weight_decay: float | Tensor = 1e-2, scope: Scope = "global",
    gain: float | Tensor = 1.0, ema: bool = False, bias_correction: bool = False,
    max_grad_norm: float | None = None, maximize: bool = False,
) -> tuple[T, AdaTAMState]:  # fmt: skip
    r"""Return the parameters and the state after one step of AdaTAMW.

    It decays the weights first, $\theta \leftarrow \theta (1 - \eta \lambda)$, and then takes a step of
    `adatam` without weight decay.

    Args:
        params: $\theta$, a dict, list or tuple of tensors
        grads: $g$, in the same form
        state: the state, from `init_adatam` or the last step
        lr: $\eta$
        betas: see `adatam`, as for all that follows but weight_decay
        smoothing: $\gamma$
        eps: $c$
        floor: $\epsilon$
        weight_decay: $\lambda$, decoupled from the gradient
        scope: "global" or "tensor"
        gain: of s in the damping
        ema: the paper's AdaTAM2
        bias_correction: divide v by $1 - \beta_2^t$
        max_grad_norm: clip the gradient to this norm
        maximize: ascend instead of descend

    Returns:
        The new parameters, in the form of `params`, and the new state.

    Examples:
        >>> import torch
        >>> from tam.functional import adatamw, init_adatam
        >>> params, grads = [torch.ones(2)], [torch.zeros(2)]
        >>> params, state = adatamw(params, grads, init_adatam(params), lr=0.1, weight_decay=0.5)
        >>> params
        [tensor([0.9500, 0.9500])]
    """
    return adatam(
        params, grads, state, lr=lr, betas=betas, smoothing=smoothing, eps=eps, floor=floor,
        weight_decay=weight_decay, scope=scope, gain=gain, ema=ema, bias_correction=bias_correction,
        max_grad_norm=max_grad_norm, maximize=maximize, decoupled=True,
    )  # fmt: skip


def angular_grad(
    params: T, grads: T, state: AngularGradState, *, lr: float | Tensor = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float | Tensor = 0.0,
    method: Method = "cos", vote: bool = False, maximize: bool = False,
) -> tuple[T, AngularGradState]:  # fmt: skip
    r"""Return the parameters and the state after one step of AngularGrad (Roy et al. 2021).

    $$
    \begin{aligned}
    \theta_t &= \theta_{t-1} - \eta \phi_t \hat m_t / (\sqrt{\hat v_t} + c) \\
    \phi_t &= (1 + \tanh |\cos A_t|) / 2
    \end{aligned}
    $$

    $\hat m$ and $\hat v$ are Adam's. $\tan A = |(g' - g) / (1 + g' g)|$ per coordinate, where g' is the
    previous gradient; $A_t$ is the smaller of the last two angles.

    Args:
        params: $\theta$, a dict, list or tuple of tensors
        grads: $g$, in the same form
        state: the state, from `init_angular_grad` or the last step
        lr: $\eta$
        betas: $\beta_1$ and $\beta_2$, as in Adam
        eps: $c$, added to the denominator
        weight_decay: $\lambda$, added to the gradient (coupled)
        method: "cos" or "tan", the function of the angle in phi
        vote: do what the authors' public code does: a tensor keeps its stored angles unless most new ones
            are no larger
        maximize: ascend instead of descend

    Returns:
        The new parameters, in the form of `params`, and the new state.

    Raises:
        ValueError: if an option has a wrong value, or parameters, gradients and state do not match

    Examples:
        >>> import torch
        >>> from tam.functional import angular_grad, init_angular_grad
        >>> params, grads = [torch.zeros(2)], [torch.tensor([1e-3, 1.0])]  # A = 0 and 45 degrees
        >>> params, state = angular_grad(params, grads, init_angular_grad(params), lr=1.0, eps=0.0)
        >>> params
        [tensor([-0.8808, -0.8044])]
    """
    group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    check_options({"method": method, "vote": vote})
    keys = ["exp_avg", "exp_avg_sq", "previous_grad", "angle", *(["coefficient"] if vote else [])]
    check_state(state, AngularGradState, "init_angular_grad")
    buckets = _buckets_of(params, grads, state, group, keys)
    angular.take_step(PURE, method, vote, buckets)
    columns = [_collect(params, buckets, key) for key in keys]
    return _collect(params, buckets, None), AngularGradState(state.step + 1, *columns)


def _torque_step(
    params: T, grads: T, state: TAMState | AdaTAMState, group: Mapping[str, object], keys: list[str],
    scope: Scope, smoothing: float | Tensor, gain: float | Tensor, max_grad_norm: float | None,
    adaptive: bool = False, decoupled: bool = False, ema: bool = False, bias_correction: bool = False,
) -> tuple[T, list[T], Tensor]:  # fmt: skip
    """Return theta, the state of these keys and s after a step."""
    by_tensor = is_by_tensor(scope)
    options = {"smoothing": smoothing, "gain": gain, "max_grad_norm": max_grad_norm}
    _check({**options, "ema": ema, "bias_correction": bias_correction or False})  # None is False
    rule = Rule(
        scope="tensor" if by_tensor else "global", smoothing=smoothing, gain=gain,
        max_grad_norm=max_grad_norm, adaptive=adaptive, decoupled=decoupled, ema=ema,
        bias_correction=bias_correction, momentum_key=keys[0],
    )  # fmt: skip
    buckets = _buckets_of(params, grads, state, group, keys, scope)
    run_step(EagerBackend(PURE, rule, buckets))
    s = torch.stack(_ordered(buckets, "alignment")) if by_tensor else buckets[0].state["alignment"][0]
    return _collect(params, buckets, None), [_collect(params, buckets, key) for key in keys], s


def _check(options: Mapping[str, object]) -> None:
    """Check the options whose values are known; a tensor may be one of vmap's."""
    check_options({name: value for name, value in options.items() if not isinstance(value, Tensor)})


def _buckets_of(
    params: Tensors, grads: Tensors, state: object, group: Mapping[str, object], keys: list[str],
    scope: Scope = "global",
) -> list[Bucket]:  # fmt: skip
    """Return the buckets of a step. Raise if parameters, gradients and state do not match."""
    _check(group)
    theta = as_list(params)
    for name, tensors in (("grads", grads), *((f"state.{key}", getattr(state, key)) for key in keys)):
        if isinstance(params, Mapping) != isinstance(tensors, Mapping):
            forms = f"params is a {type(params).__name__} and {name} is a {type(tensors).__name__}"
            raise ValueError(f"{forms}: give both in the same form")
    gradients = column_of(params, grads, "gradient")
    columns = {key: column_of(params, getattr(state, key), key) for key in keys}
    if isinstance(state, (TAMState, AdaTAMState)):
        s, shape = state.alignment, (len(theta),) if is_by_tensor(scope) else ()
        if s.shape != shape:
            init = "init_tam" if isinstance(state, TAMState) else "init_adatam"
            raise ValueError(f'the state was made for another scope: use {init}(params, scope="{scope}")')
        columns["alignment"] = list(s.unbind()) if shape else [s] * len(theta)
    if hasattr(state, "step"):
        columns["step"] = [state.step] * len(theta)
    return make_buckets(dict(group), 0, theta, gradients, columns)


def _ordered(buckets: list[Bucket], key: str | None) -> list[Tensor]:
    """Return a column (None: theta) of all buckets, in the order of the parameters."""
    by_row: dict[int, Tensor] = {}
    for bucket in buckets:
        by_row.update(zip(bucket.rows, bucket.theta if key is None else bucket.state[key], strict=True))
    return [by_row[i] for i in range(len(by_row))]


def _collect(params: T, buckets: list[Bucket], key: str | None) -> T:
    """Return a column (None: theta) in the form of `params`."""
    return in_form_of(params, _ordered(buckets, key))
