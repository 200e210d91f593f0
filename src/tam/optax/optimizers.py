"""TAM, AdaTAM and AdaTAMW as chains of transformations."""

# No `from __future__ import annotations` here: optax reads the annotation of `learning_rate` to see
# whether a factory accepts schedules, and a string is not `optax.ScalarOrSchedule`.
from collections.abc import Callable
from typing import TypeAlias

import optax  # type: ignore[import-untyped]

from tam.optax.options import DType, check, checked_dtype, resolve_bias_correction
from tam.optax.rule import Number, Rows, Scope, Torque, Tree
from tam.optax.transforms import TAMState, add_decay, scale_by_adatam, with_decay

Mask: TypeAlias = Tree | Callable[[Tree], Tree]  # of booleans


def scale_by_torque(
    momentum: Number = 0.9, *, smoothing: Number = 0.9, floor: Number = 1e-8, scope: Scope = "global",
    gain: Number = 1.0, ema: bool = False, weight_decay: optax.ScalarOrSchedule = 0.0,
    max_grad_norm: Number | None = None, accumulator_dtype: DType | None = None,
) -> optax.GradientTransformation:  # fmt: skip
    r"""Replace the gradient by a momentum that weights it by its agreement with the momentum so far.

    $$
    \begin{aligned}
    S_t &= \langle m_{t-1}, g_t \rangle / (|m_{t-1}| |g_t|) \\
    s_t &= \gamma s_{t-1} + (1 - \gamma) S_t \\
    d_t &= (1 + \mathrm{clip}(\mathrm{gain}\, s_t, -1, 1)) / 2 \\
    m_t &= \beta m_{t-1} + (\epsilon + d_t) (k g_t + \lambda \theta_{t-1})
    \end{aligned}
    $$

    With `gain=1` the weight d is 1 when the smoothed cosine s is 1, 1/2 when it is 0, and 0 when it is
    -1. S is 0 if either norm is 0, and sums that are not finite leave s unchanged. The cosine uses the
    raw gradient. Earlier in a chain, clipping (k) and weight decay would change it: use the options.

    Args:
        momentum: $\beta$
        smoothing: $\gamma$, the decay rate of the smoothed cosine s; 1 keeps s at 0. It should not be below
            `momentum`: a much shorter average can make training diverge, and warns
            ([theory](../how-it-works/theory.md))
        floor: $\epsilon$, the smallest weight of a new gradient
        scope: "global" for one cosine over all leaves of the tree, "tensor" for one per leaf
        gain: how strongly d responds to s; 1 is the paper's rule, 0 keeps d at 1/2
        ema: $m \leftarrow (1 - w) m + w g$ with $w = \epsilon + d$; `momentum` is then unused
        weight_decay: $\lambda$, added to the gradient (coupled): a number, or a schedule (a function of
            the number of steps done); `update` then needs `params`
        max_grad_norm: clip the gradient to this norm over all leaves
        accumulator_dtype: dtype of m in the state, as in `optax.trace`; None: that of the parameters

    Returns:
        The transformation; its state is a `TAMState`, in a `ScheduledDecayState` if `weight_decay` is a
        schedule.

    Examples:
        >>> import jax.numpy as jnp
        >>> torque = scale_by_torque(momentum=0.5, smoothing=0.0)  # s is then S
        >>> state = torque.init(jnp.zeros(2))
        >>> update, state = torque.update(jnp.array([2.0, 0.0]), state)  # no momentum yet: S = 0
        >>> update.tolist(), float(state.alignment)
        ([1.0, 0.0], 0.0)
        >>> update, state = torque.update(jnp.array([-2.0, 0.0]), state)  # against it: S = -1
        >>> round(float(update[0]), 6), float(state.alignment)
        (0.5, -1.0)
    """
    dtype = checked_dtype("accumulator_dtype", accumulator_dtype)
    torque = Torque(momentum, smoothing, floor, scope, gain, ema, max_grad_norm)

    def update(updates: Tree, state: TAMState, params: Tree | None, decay: Number) -> tuple[Tree, TAMState]:
        rows = Rows(updates, state.trace)
        _, m, s = torque.step(rows, state.alignment, params, decay)
        return rows.put(m, updates), TAMState(rows.put(m, state.trace), s)

    return with_decay(lambda params: TAMState(*torque.init(params, dtype)), update, weight_decay)


def tam(
    learning_rate: optax.ScalarOrSchedule = 0.2, momentum: Number = 0.9, *,
    smoothing: Number = 0.9, floor: Number = 1e-8, scope: Scope = "global", gain: Number = 1.0,
    weight_decay: optax.ScalarOrSchedule = 0.0, max_grad_norm: Number | None = None,
    accumulator_dtype: DType | None = None,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    r"""Return TAM, SGD with torque-aware momentum: $\theta_t = \theta_{t-1} - \eta m_t$.

    m is that of `scale_by_torque`. Coming from `optax.sgd` with momentum, double the learning rate. With
    `smoothing=1, floor=0.5`, `tam` equals `optax.sgd`.

    Args:
        learning_rate: $\eta$, a number or a schedule
        momentum: $\beta$; for all that follows see `scale_by_torque`
        smoothing: $\gamma$
        floor: $\epsilon$
        scope: "global" or "tensor"
        gain: how strongly d responds to s
        weight_decay: $\lambda$, a number or a schedule
        max_grad_norm: clip the gradient to this norm
        accumulator_dtype: dtype of m in the state

    Returns:
        The optimizer, a chain of `scale_by_torque` and the learning rate.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> params = {"w": jnp.array([1.0, -2.0])}
        >>> optimizer = tam(learning_rate=0.2)
        >>> state = optimizer.init(params)
        >>> for _ in range(3):
        ...     grads = jax.grad(lambda p: (p["w"] ** 2).sum())(params)
        ...     updates, state = optimizer.update(grads, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> s = optax.tree_utils.tree_get(state, "alignment")  # of S = 0, 1, 1
        >>> f"s = {s:.2f}, d = {(1 + s) / 2:.3f}"
        's = 0.19, d = 0.595'
    """
    check(learning_rate=learning_rate)
    torque = scale_by_torque(
        momentum, smoothing=smoothing, floor=floor, scope=scope, gain=gain, weight_decay=weight_decay,
        max_grad_norm=max_grad_norm, accumulator_dtype=accumulator_dtype,
    )  # fmt: skip
    return optax.chain(torque, optax.scale_by_learning_rate(learning_rate))


def adatam(
    learning_rate: optax.ScalarOrSchedule = 1e-4, b1: Number = 0.9, b2: Number = 0.999,
    eps: Number = 1e-8, *, smoothing: Number = 0.9, floor: Number = 1e-8, scope: Scope = "global",
    gain: Number = 1.0, ema: bool = False, bias_correction: bool | None = None, mu_dtype: DType | None = None,
    weight_decay: optax.ScalarOrSchedule = 0.0, max_grad_norm: Number | None = None,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    r"""Return AdaTAM, Adam with torque-aware momentum.

    $$
    \begin{aligned}
    v_t &= \beta_2 v_{t-1} + (1 - \beta_2) (k g_t + \lambda \theta_{t-1})^2 \\
    \theta_t &= \theta_{t-1} - \eta m_t / (\sqrt{v_t} + c)
    \end{aligned}
    $$

    m and k are those of `scale_by_torque`. m is a sum, not an average: at the same learning rate the
    settled step is about 5 times Adam's, and without bias correction early steps are larger still.
    Coming from `optax.adam`, use `bias_correction=True` and a fifth of the learning rate.

    Args:
        learning_rate: $\eta$, a number or a schedule
        b1: $\beta_1$, the momentum; unused with `ema`, which makes this the paper's AdaTAM2
        b2: $\beta_2$
        eps: $c$, added to the denominator
        smoothing: see `scale_by_torque`, as for floor, scope, gain, ema, weight_decay and max_grad_norm
        floor: $\epsilon$
        scope: "global" or "tensor"
        gain: how strongly d responds to s
        ema: $m \leftarrow (1 - w) m + w g$ with $w = \epsilon + d$
        bias_correction: True divides v by $1 - \beta_2^t$, as Adam does; False, the paper's rule, does not.
            None is False, with a warning if `learning_rate` is a number >= 1e-3, the scale of Adam's.
        mu_dtype: dtype of m in the state, as in `optax.adam`; None: that of the parameters
        weight_decay: $\lambda$, a number or a schedule
        max_grad_norm: clip the gradient to this norm

    Returns:
        The optimizer; the first state of its chain is an `AdaTAMState`.

    Examples:
        >>> import jax.numpy as jnp
        >>> optimizer = adatam(learning_rate=2e-4, bias_correction=True)  # for optax.adam(1e-3)
        >>> updates, state = optimizer.update(jnp.ones(2), optimizer.init(jnp.zeros(2)))
        >>> [round(float(x), 6) for x in updates]  # no momentum yet: d = 1/2
        [-0.0001, -0.0001]
    """
    check(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    corrected = resolve_bias_correction(bias_correction, learning_rate)
    torque = Torque(b1, smoothing, floor, scope, gain, ema, max_grad_norm)
    scaled = scale_by_adatam(torque, b2, eps, corrected, weight_decay, checked_dtype("mu_dtype", mu_dtype))
    return optax.chain(scaled, optax.scale_by_learning_rate(learning_rate))


def adatamw(
    learning_rate: optax.ScalarOrSchedule = 1e-4, b1: Number = 0.9, b2: Number = 0.999,
    eps: Number = 1e-8, *, smoothing: Number = 0.9, floor: Number = 1e-8, scope: Scope = "global",
    gain: Number = 1.0, ema: bool = False, bias_correction: bool | None = None, mu_dtype: DType | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-2, mask: Mask | None = None,
    max_grad_norm: Number | None = None,
) -> optax.GradientTransformationExtraArgs:  # fmt: skip
    r"""Return AdaTAMW, AdaTAM with decoupled weight decay.

    It decays the weights first, $\theta \leftarrow \theta (1 - \eta \lambda)$, and then takes a step of
    `adatam` without weight decay. Coming from `optax.adamw`, use `bias_correction=True`, a fifth of the
    learning rate and 5 times the weight decay.

    Args:
        learning_rate: $\eta$, a number or a schedule
        b1: $\beta_1$; see `adatam` for all but weight_decay and mask
        b2: $\beta_2$
        eps: $c$
        smoothing: $\gamma$
        floor: $\epsilon$
        scope: "global" or "tensor"
        gain: how strongly d responds to s
        ema: $m \leftarrow (1 - w) m + w g$ with $w = \epsilon + d$
        bias_correction: whether v is divided by $1 - \beta_2^t$
        mu_dtype: dtype of m in the state
        weight_decay: $\lambda$, a number or a schedule of the number of steps done
        mask: which leaves decay, as in `optax.adamw`: a tree of booleans, or a function that returns
            one from the parameters
        max_grad_norm: clip the gradient to this norm

    Returns:
        The optimizer; the first state of its chain is an `AdaTAMState`.

    Examples:
        >>> import jax.numpy as jnp
        >>> optimizer = adatamw(learning_rate=0.1, weight_decay=0.5, bias_correction=True)
        >>> params = jnp.ones(2)
        >>> updates, state = optimizer.update(jnp.zeros(2), optimizer.init(params), params)
        >>> [round(float(x), 6) for x in updates]  # only the decay, of lr lambda
        [-0.05, -0.05]
    """
    check(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps)
    corrected = resolve_bias_correction(bias_correction, learning_rate)
    torque = Torque(b1, smoothing, floor, scope, gain, ema, max_grad_norm)
    scaled = scale_by_adatam(torque, b2, eps, corrected, 0.0, checked_dtype("mu_dtype", mu_dtype))
    decay = add_decay(weight_decay, learning_rate)
    decay = decay if mask is None else optax.masked(decay, mask)
    return optax.chain(scaled, decay, optax.scale_by_learning_rate(learning_rate))
