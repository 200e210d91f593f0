r"""Torque-aware momentum for JAX: the optimizers of this library as optax transformations.

    import optax, tam.optax

    optimizer = tam.optax.tam(learning_rate=0.2)
    state = optimizer.init(params)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    optax.tree_utils.tree_get(state, "alignment")  # s

`scale_by_torque` is the damped momentum alone, to be chained with what else optax has. Everything
works under jit, vmap and grad. Reference: Malviya et al. 2024, "Torque-Aware Momentum",
arXiv:2412.18790.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tam._extras import missing
from tam.optimizers.options import CHECKS, below_one, nonnegative, one_of

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax  # type: ignore[import-untyped]
except ImportError as error:
    raise missing("tam.optax", "jax", error) from error

__all__ = ["AdaTAMState", "TAMState", "adatam", "adatamw", "scale_by_torque", "tam"]

Leaves = list[jax.Array]  # of the parameters that have a gradient, as reals of at least 32 bits
Number = float | jax.Array


class TAMState(NamedTuple):
    """m, a tree like the parameters, and s: 0-dim, or one entry a leaf with scope "tensor"."""

    momentum: Any
    alignment: jax.Array


class AdaTAMState(NamedTuple):
    """`TAMState` with v and the number of steps."""

    step: jax.Array
    momentum: Any
    second_moment: Any
    alignment: jax.Array


def scale_by_torque(
    momentum: Number = 0.9,
    smoothing: Number = 0.9,
    floor: Number = 1e-8,
    *,
    scope: str = "global",
    ema: bool = False,
    weight_decay: Number = 0.0,
    max_grad_norm: Number | None = None,
) -> optax.GradientTransformation:
    r"""The momentum m, in which a gradient counts by its agreement with the momentum before it.

    .. math::
        S_t &= \langle m_{t-1}, g_t \rangle / (|m_{t-1}| |g_t|) \\
        s_t &= \gamma s_{t-1} + (1 - \gamma) S_t, \qquad d_t = (1 + s_t) / 2 \\
        m_t &= \beta m_{t-1} + (\epsilon + d_t) (k g_t + \lambda \theta_{t-1})

    A gradient along the momentum has a weight near 1, one against it a weight near 0. S is 0 where
    either norm is 0, and sums that are not finite leave s as it was. Clipping (k) and weight decay
    lie outside the cosine, which is why they are options here and not links of a chain before it.

    Args:
        momentum: beta
        smoothing: gamma, of the smoothed cosine s; 1 keeps s at 0
        floor: epsilon, the least weight of a new gradient
        scope: what one cosine is taken over: "global" all leaves of the tree, "tensor" each leaf
        ema: m <- (1 - w) m + w g with w = epsilon + d; momentum is then unused
        weight_decay: lambda, coupled (added to the gradient); `update` then needs `params`
        max_grad_norm: clip the gradient to this norm over all leaves

    Example:
        >>> import jax.numpy as jnp
        >>> torque = scale_by_torque(smoothing=0.0)  # s is then S
        >>> state = torque.init(jnp.zeros(2))
        >>> update, state = torque.update(jnp.array([2.0, 0.0]), state)  # no momentum yet: S = 0
        >>> update.tolist(), float(state.alignment)
        ([1.0, 0.0], 0.0)
        >>> update, state = torque.update(jnp.array([-2.0, 0.0]), state)  # against it: S = -1
        >>> round(float(update[0]), 6), float(state.alignment)
        (0.9, -1.0)
    """
    torque = _Torque(momentum, smoothing, floor, weight_decay, scope, ema, max_grad_norm)

    def update(updates: Any, state: TAMState, params: Any = None) -> tuple[Any, TAMState]:
        rows = _Rows(updates, state.momentum)
        _, m, s = torque.step(rows, state, params)
        return rows.put(m, updates), TAMState(rows.put(m, state.momentum), s)

    return optax.GradientTransformation(torque.init, update)


def tam(
    learning_rate: Number | Callable[[Any], Any] = 0.2,
    momentum: Number = 0.9,
    smoothing: Number = 0.9,
    floor: Number = 1e-8,
    weight_decay: Number = 0.0,
    *,
    scope: str = "global",
    max_grad_norm: Number | None = None,
) -> optax.GradientTransformation:
    r"""TAM: SGD with torque-aware momentum, :math:`\theta_t = \theta_{t-1} - \eta m_t`.

    m is that of `scale_by_torque`, as are the options; `learning_rate` may be a schedule. Coming
    from `optax.sgd` with momentum: double the learning rate. With `smoothing=1, floor=0.5` it is
    `optax.sgd`.

    Example:
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
    _check(learning_rate=learning_rate)
    torque = scale_by_torque(
        momentum, smoothing, floor, scope=scope, weight_decay=weight_decay, max_grad_norm=max_grad_norm
    )
    return optax.chain(torque, optax.scale_by_learning_rate(learning_rate))


def adatam(
    learning_rate: Number | Callable[[Any], Any] = 1e-4,
    b1: Number = 0.9,
    b2: Number = 0.999,
    smoothing: Number = 0.9,
    eps: Number = 1e-8,
    floor: Number = 1e-8,
    weight_decay: Number = 0.0,
    *,
    scope: str = "global",
    ema: bool = False,
    bias_correction: bool = False,
    max_grad_norm: Number | None = None,
) -> optax.GradientTransformation:
    r"""AdaTAM: Adam with torque-aware momentum.

    .. math::
        v_t &= \beta_2 v_{t-1} + (1 - \beta_2) (k g_t + \lambda \theta_{t-1})^2 \\
        \theta_t &= \theta_{t-1} - \eta m_t / (\sqrt{v_t} + c)

    with m and k as in `scale_by_torque`. m is a sum, not an average: at the same learning rate the
    settled step is about 5 times Adam's, and without bias correction early steps are larger still.
    Coming from `optax.adam`: `bias_correction=True` and a fifth of the learning rate.

    Args, besides those of `scale_by_torque`:
        learning_rate: a number or a schedule
        b1: beta1, the momentum; unused with `ema`, which makes this the paper's AdaTAM2
        b2: beta2
        eps: c, added to the denominator
        bias_correction: divide v by 1 - b2^t, as Adam does; the paper does not
    """
    _check(learning_rate=learning_rate)
    torque = (smoothing, floor, weight_decay, scope, ema, max_grad_norm)
    return optax.chain(
        _scale_by_adatam(b1, b2, eps, bias_correction, *torque),
        optax.scale_by_learning_rate(learning_rate),
    )


def adatamw(
    learning_rate: Number | Callable[[Any], Any] = 1e-4,
    b1: Number = 0.9,
    b2: Number = 0.999,
    smoothing: Number = 0.9,
    eps: Number = 1e-8,
    floor: Number = 1e-8,
    weight_decay: Number = 1e-2,
    mask: Any = None,
    *,
    scope: str = "global",
    ema: bool = False,
    bias_correction: bool = False,
    max_grad_norm: Number | None = None,
) -> optax.GradientTransformation:
    r"""AdaTAM with decoupled weight decay: :math:`\theta \leftarrow \theta (1 - \eta \lambda)` first.

    `mask` says which leaves decay, as in `optax.adamw`: a tree of booleans, or a function of the
    parameters that gives one. The other options are `adatam`'s.
    """
    _check(learning_rate=learning_rate, weight_decay=weight_decay)
    torque = (smoothing, floor, 0.0, scope, ema, max_grad_norm)
    return optax.chain(
        _scale_by_adatam(b1, b2, eps, bias_correction, *torque),
        _add_decay(weight_decay, learning_rate, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


# The rule. It acts on lists of real arrays; `_Rows` is the way from trees to them and back.


@dataclass(frozen=True)
class _Torque:
    """The options of `scale_by_torque`, and its step."""

    momentum: Number
    smoothing: Number
    floor: Number
    weight_decay: Number
    scope: str
    ema: bool
    max_grad_norm: Number | None

    def __post_init__(self) -> None:
        _check(**vars(self))

    def init(self, params: Any) -> TAMState:
        dtypes = [jnp.result_type(x) for x in jax.tree.leaves(params)]
        wide = bool(dtypes) and all(x in (jnp.float64, jnp.complex128) for x in dtypes)
        shape = (len(dtypes),) if self.scope == "tensor" else ()
        s = jnp.zeros(shape, jnp.float64 if wide else jnp.float32)
        return TAMState(jax.tree.map(jnp.zeros_like, params), s)

    def step(self, rows: _Rows, state: Any, params: Any) -> tuple[Leaves, Leaves, jax.Array]:
        """What m takes of the gradients, k g + lambda theta; m and s after the step."""
        m, s = rows.of(state.momentum), state.alignment
        if not m:
            return [], [], s
        sums = jnp.stack([_measure(*row) for row in zip(m, rows.grads, strict=True)])
        if self.scope == "global":
            s = _settle(sums.sum(0), s, self.smoothing)
            alignment = [s] * len(m)
        else:
            index = jnp.array(rows.index)
            alignment = list(_settle(sums, s[index], self.smoothing))
            s = s.at[index].set(jnp.stack(alignment))
        g = self.take(rows, sums[:, 2].sum(), params)
        return g, [self.move(*row) for row in zip(m, g, alignment, strict=True)], s

    def take(self, rows: _Rows, squared: jax.Array, params: Any) -> Leaves:
        g = rows.grads
        if self.max_grad_norm is not None:
            # The root of 0 has no derivative.
            norm = jnp.where(squared == 0, 0.0, jnp.sqrt(jnp.where(squared == 0, 1.0, squared)))
            k = jnp.minimum(_number(self.max_grad_norm, norm) / (norm + 1e-6), 1.0)
            g = [k.astype(x.dtype) * x for x in g]
        if isinstance(self.weight_decay, (int, float)) and self.weight_decay == 0:
            return g
        if params is None:
            raise ValueError(f"weight_decay={self.weight_decay!r}: needs update(grads, state, params)")
        return [x + _number(self.weight_decay, x) * p for x, p in zip(g, rows.of(params), strict=True)]

    def move(self, m: jax.Array, g: jax.Array, s: jax.Array) -> jax.Array:
        w = _number(self.floor, m) + (1 + s.astype(m.dtype)) / 2
        return (1 - w if self.ema else _number(self.momentum, m)) * m + w * g


def _measure(m: jax.Array, g: jax.Array) -> jax.Array:
    """<m, g>, |m|^2 and |g|^2. No vdot: some devices give a matrix product fewer digits."""
    return jnp.stack([jnp.sum(m * g), jnp.sum(m * m), jnp.sum(g * g)])


def _settle(sums: jax.Array, s: jax.Array, smoothing: Number) -> jax.Array:
    """s after the step, from the sums [..., 3] and the s before it [...]."""
    dot, mm, gg = sums[..., 0], sums[..., 1], sums[..., 2]
    defined = (mm > 0) & (gg > 0)
    # Undefined cosines are computed with norms of 1, so that differentiation meets no 0/0.
    norms = jnp.sqrt(jnp.where(defined, mm, 1.0)) * jnp.sqrt(jnp.where(defined, gg, 1.0))
    cosine = jnp.clip(jnp.where(defined, dot / norms, 0.0), -1.0, 1.0)
    gamma = _number(smoothing, sums)
    smoothed = gamma * s + (1 - gamma) * cosine
    return jnp.where(jnp.isfinite(sums).all(-1), smoothed.astype(s.dtype), s)


def _scale_by_adatam(
    b1: Number, b2: Number, eps: Number, bias_correction: bool, *options: Any
) -> optax.GradientTransformation:
    """m / (sqrt(v) + c)."""
    _check(b1=b1, b2=b2, eps=eps, bias_correction=bias_correction)
    torque = _Torque(b1, *options)

    def init(params: Any) -> AdaTAMState:
        m, s = torque.init(params)
        return AdaTAMState(jnp.zeros((), jnp.int32), m, jax.tree.map(jnp.zeros_like, params), s)

    def move(v: jax.Array, g: jax.Array) -> jax.Array:
        beta2 = _number(b2, v)
        return beta2 * v + (1 - beta2) * (g * g)

    def scale(m: jax.Array, v: jax.Array, t: jax.Array) -> jax.Array:
        if bias_correction:
            # 1 - b2^t, which would keep few digits at first if b2^t were a float32.
            constant = isinstance(b2, (int, float)) and b2 > 0
            log = math.log(b2) if constant else jnp.log(_number(b2, v))
            v = v / -jnp.expm1(t.astype(v.dtype) * log)
        return m / (jnp.sqrt(v) + _number(eps, v))

    def update(updates: Any, state: AdaTAMState, params: Any = None) -> tuple[Any, AdaTAMState]:
        rows = _Rows(updates, state.momentum)
        g, m, s = torque.step(rows, state, params)
        v = [move(*row) for row in zip(rows.of(state.second_moment), g, strict=True)]
        t = optax.safe_increment(state.step)
        scaled = [scale(*row, t) for row in zip(m, v, strict=True)]
        new = AdaTAMState(t, rows.put(m, state.momentum), rows.put(v, state.second_moment), s)
        return rows.put(scaled, updates), new

    return optax.GradientTransformation(init, update)


def _add_decay(weight_decay: Number, learning_rate: Any, mask: Any) -> optax.GradientTransformation:
    """Adds lambda theta to the updates.

    torch multiplies theta by 1 - lr lambda, rounded to float32, which adds up to 1e-6 in fifty steps. To
    take the same path where both are constants, lambda is what that factor makes of it.
    """
    constant = all(isinstance(x, (int, float)) for x in (weight_decay, learning_rate))
    rounded = weight_decay
    if constant and learning_rate > 0:
        rounded = (1 - float(np.float32(1 - learning_rate * weight_decay))) / learning_rate

    def decay(g: Any, p: Any) -> Any:
        wide = jnp.result_type(p) in (jnp.float64, jnp.complex128)
        return None if g is None else g + _number(weight_decay if wide else rounded, p) * p

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError(f"weight_decay={weight_decay!r}: needs update(grads, state, params)")
        return jax.tree.map(decay, updates, params, is_leaf=lambda x: x is None), state

    added = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    return added if mask is None else optax.masked(added, mask)


class _Rows:
    """The leaves that have a gradient (None: a parameter that takes no part), as reals."""

    def __init__(self, updates: Any, momentum: Any) -> None:
        self.tree: Any = jax.tree.structure(momentum)
        self.index = [i for i, g in enumerate(self.leaves(updates)) if g is not None]
        self.grads = self.of(updates)

    def leaves(self, tree: Any) -> list[Any]:
        return self.tree.flatten_up_to(tree)  # type: ignore[no-any-return]

    def of(self, tree: Any) -> Leaves:
        leaves = self.leaves(tree)
        return [_parts(leaves[i]) for i in self.index]

    def put(self, rows: Leaves, tree: Any) -> Any:
        """The tree with these rows in the place of its own, in its own dtypes."""
        leaves = self.leaves(tree)
        for i, x in zip(self.index, rows, strict=True):
            dtype = jnp.result_type(leaves[i])
            pair = jnp.issubdtype(dtype, jnp.complexfloating)
            leaves[i] = (jax.lax.complex(x[0], x[1]) if pair else x).astype(dtype)
        return jax.tree.unflatten(self.tree, leaves)


def _parts(x: Any) -> jax.Array:
    """A real array of at least 32 bits: of a complex one, the pair of its parts."""
    x = jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))
    return jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x


def _number(a: Number, like: jax.Array) -> Number:
    """An option as a coefficient that leaves the dtype as it is: 1 - a keeps a number's digits."""
    return float(a) if isinstance(a, (int, float)) else jnp.asarray(a, like.dtype)


_CHECKS = {
    **CHECKS, "learning_rate": nonnegative, "b1": below_one, "b2": below_one,
    "scope": one_of("global", "tensor"),
}  # fmt: skip


def _check(**options: Any) -> None:
    for name, value in options.items():
        schedule = name == "learning_rate" and callable(value)
        # An array may be traced, and has no value yet.
        if not schedule and not isinstance(value, (jax.Array, np.ndarray)):
            _CHECKS[name](name, value)
