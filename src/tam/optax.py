r"""Torque-aware momentum for JAX: TAM, AdaTAM and AdaTAMW as optax gradient transformations.

    import optax, tam.optax

    optimizer = tam.optax.tam(learning_rate=0.2)
    state = optimizer.init(params)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    optax.tree_utils.tree_get(state, "alignment")  # s

`scale_by_torque` is the damped momentum alone, for chains with other transformations. Everything
works under jit, vmap and grad. Reference: Malviya et al. 2024, "Torque-Aware Momentum",
arXiv:2412.18790.
"""

# No `from __future__ import annotations` here: optax reads the annotation of `learning_rate` to see
# whether a factory accepts schedules, and a string is not `optax.ScalarOrSchedule`.
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from tam._extras import missing
from tam._warnings import warn_user
from tam.options import CHECKS, below_one, nonnegative, one_of, optional_flag, warning_of_short_average

try:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax  # type: ignore[import-untyped]
except ImportError as error:
    raise missing("tam.optax", "jax", error) from error

__all__ = ["AdaTAMState", "ScheduledDecayState", "TAMState", "adatam", "adatamw", "scale_by_torque", "tam"]

Leaves = list[jax.Array]  # of the parameters that have a gradient, as reals of at least 32 bits
Number = float | jax.Array
Scope = Literal["global", "tensor"]
DType = jax.typing.DTypeLike
Tree: TypeAlias = optax.Params  # of parameters, gradients, updates or buffers
Mask: TypeAlias = Tree | Callable[[Tree], Tree]  # of booleans
Update: TypeAlias = Callable[[Tree, optax.OptState, Tree | None, Number], tuple[Tree, optax.OptState]]


# The names are those of `optax.TraceState` and `optax.ScaleByAdamState`, for `optax.tree_utils.tree_get`.
class TAMState(NamedTuple):
    """State of `scale_by_torque` and `tam`.

    Attributes:
        trace: m, a tree like the parameters
        alignment: s, 0-dim, or one value per leaf with `scope="tensor"`
    """

    trace: optax.Updates
    alignment: jax.Array


class AdaTAMState(NamedTuple):
    """State of `adatam` and `adatamw`.

    Attributes:
        count: the number of steps done, 0-dim
        mu: m, a tree like the parameters
        nu: v, a tree like the parameters, float32 for float16 parameters
        alignment: s, 0-dim, or one value per leaf with `scope="tensor"`
    """

    count: jax.Array  # type: ignore[assignment]  # a tuple has a method `count`
    mu: optax.Updates
    nu: optax.Updates
    alignment: jax.Array


class ScheduledDecayState(NamedTuple):
    """State of a transformation whose weight decay follows a schedule.

    Attributes:
        count: the number of steps done, 0-dim
        inner_state: the state of the transformation itself
    """

    count: jax.Array  # type: ignore[assignment]
    inner_state: optax.OptState


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
    dtype = _dtype("accumulator_dtype", accumulator_dtype)
    torque = _Torque(momentum, smoothing, floor, scope, gain, ema, max_grad_norm)

    def update(updates: Tree, state: TAMState, params: Tree | None, decay: Number) -> tuple[Tree, TAMState]:
        rows = _Rows(updates, state.trace)
        _, m, s = torque.step(rows, state.alignment, params, decay)
        return rows.put(m, updates), TAMState(rows.put(m, state.trace), s)

    return _with_decay(lambda params: TAMState(*torque.init(params, dtype)), update, weight_decay)


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
    _check(learning_rate=learning_rate)
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
    _check(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    corrected = _bias_correction(bias_correction, learning_rate)
    torque = _Torque(b1, smoothing, floor, scope, gain, ema, max_grad_norm)
    scaled = _scale_by_adatam(torque, b2, eps, corrected, weight_decay, _dtype("mu_dtype", mu_dtype))
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
    _check(learning_rate=learning_rate, b1=b1, b2=b2, eps=eps)
    corrected = _bias_correction(bias_correction, learning_rate)
    torque = _Torque(b1, smoothing, floor, scope, gain, ema, max_grad_norm)
    scaled = _scale_by_adatam(torque, b2, eps, corrected, 0.0, _dtype("mu_dtype", mu_dtype))
    decay = _add_decay(weight_decay, learning_rate)
    decay = decay if mask is None else optax.masked(decay, mask)
    return optax.chain(scaled, decay, optax.scale_by_learning_rate(learning_rate))


# The rule. It acts on lists of real arrays; `_Rows` is the way from trees to them and back.


def damping_of(s: jax.Array, gain: Number = 1.0) -> jax.Array:
    """Return d = (1 + clip(gain s, -1, 1)) / 2."""
    # |s| <= 1, so a gain of 1 needs no clip, which has no derivative at s = 1.
    if not (isinstance(gain, (int, float)) and gain == 1):
        s = jnp.clip(_number(gain, s) * s, -1.0, 1.0)
    return (1 + s) / 2


@dataclass(frozen=True)
class _Torque:
    """The options of `scale_by_torque` but those of the weight decay and of dtypes, and its step."""

    momentum: Number
    smoothing: Number
    floor: Number
    scope: Scope
    gain: Number
    ema: bool
    max_grad_norm: Number | None

    def __post_init__(self) -> None:
        _check(**vars(self))
        self._warn_of_short_average()

    def _warn_of_short_average(self) -> None:
        """Warn if s is averaged over a much shorter time than m, where the options have values yet."""
        beta, smoothing, gain = self.momentum, self.smoothing, self.gain
        if self.ema or not all(isinstance(x, (int, float, np.number)) for x in (beta, smoothing, gain)):
            return
        message = warning_of_short_average(
            "torque-aware momentum", float(beta), float(smoothing), float(gain), "momentum"
        )
        if message is not None:
            warn_user(message)

    def init(self, params: Tree, dtype: DType | None) -> tuple[Tree, jax.Array]:
        """Return m and s before the first step; m has this dtype, or with None the parameters'."""
        dtypes = [jnp.result_type(x) for x in jax.tree.leaves(params)]
        wide = bool(dtypes) and all(x in (jnp.float64, jnp.complex128) for x in dtypes)
        shape = (len(dtypes),) if self.scope == "tensor" else ()
        s = jnp.zeros(shape, jnp.float64 if wide else jnp.float32)
        return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=dtype), params), s

    def step(
        self, rows: "_Rows", s: jax.Array, params: Tree | None, decay: Number
    ) -> tuple[Leaves, Leaves, jax.Array]:
        """Return what m takes of the gradients, k g + lambda theta, and m and s after the step."""
        g, m = rows.grads, rows.momentum
        if not m:
            return [], [], s
        sums = jnp.stack([_measure(*row) for row in zip(m, g, strict=True)])
        if self.scope == "global":
            s = _settle(sums.sum(0), s, self.smoothing)
            alignment = [s] * len(m)
        else:
            index = jnp.array(list(rows.dtypes))
            alignment = list(_settle(sums, s[index], self.smoothing))
            s = s.at[index].set(jnp.stack(alignment))
        g = self.clip(g, sums[:, 2].sum())
        # `optax.inject_hyperparams` makes an array of 0. Its value is read only if that helps: it waits.
        if params is None and not isinstance(decay, jax.core.Tracer) and decay == 0:
            decay = 0.0
        if not (isinstance(decay, (int, float)) and decay == 0):
            p = rows.of(_needed(params))
            g = [x + _number(decay, x) * y for x, y in zip(g, p, strict=True)]
        return g, [self.move(*row) for row in zip(m, g, alignment, strict=True)], s

    def clip(self, g: Leaves, squared: jax.Array) -> Leaves:
        if self.max_grad_norm is None:
            return g
        # The root of 0 has no derivative.
        norm = jnp.where(squared == 0, 0.0, jnp.sqrt(jnp.where(squared == 0, 1.0, squared)))
        k = jnp.minimum(_number(self.max_grad_norm, norm) / (norm + 1e-6), 1.0)
        return [k.astype(x.dtype) * x for x in g]

    def move(self, m: jax.Array, g: jax.Array, s: jax.Array) -> jax.Array:
        w = _number(self.floor, m) + damping_of(s.astype(m.dtype), self.gain)
        return (1 - w if self.ema else _number(self.momentum, m)) * m + w * g


def _measure(m: jax.Array, g: jax.Array) -> jax.Array:
    """Return <m, g>, |m|^2 and |g|^2. No vdot: some devices give a matrix product fewer digits."""
    return jnp.stack([jnp.sum(m * g), jnp.sum(m * m), jnp.sum(g * g)])


def _settle(sums: jax.Array, s: jax.Array, smoothing: Number) -> jax.Array:
    """Return s after the step, from the sums [..., 3] and the s before it [...]."""
    dot, mm, gg = sums[..., 0], sums[..., 1], sums[..., 2]
    defined = (mm > 0) & (gg > 0)
    # Undefined cosines are computed with norms of 1, so differentiation meets no 0/0.
    norms = jnp.sqrt(jnp.where(defined, mm, 1.0)) * jnp.sqrt(jnp.where(defined, gg, 1.0))
    cosine = jnp.clip(jnp.where(defined, dot / norms, 0.0), -1.0, 1.0)
    gamma = _number(smoothing, sums)
    smoothed = gamma * s + (1 - gamma) * cosine
    return jnp.where(jnp.isfinite(sums).all(-1), smoothed.astype(s.dtype), s)


def _scale_by_adatam(
    torque: _Torque, b2: Number, eps: Number, bias_correction: bool,
    weight_decay: optax.ScalarOrSchedule, mu_dtype: DType | None,
) -> optax.GradientTransformation:  # fmt: skip
    """Return the transformation of g into m / (sqrt(v) + c)."""

    def init(params: Tree) -> AdaTAMState:
        m, s = torque.init(params, mu_dtype)
        # In float16, (1 - b2) g^2 is 0 where |g| < 5e-3: v would forget all but the newest gradient.
        wider = {jnp.dtype(jnp.float16): jnp.float32}
        v = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=wider.get(jnp.result_type(p))), params)
        return AdaTAMState(jnp.zeros((), jnp.int32), m, v, s)

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

    def update(updates: Tree, state: AdaTAMState, params: Tree | None = None) -> tuple[Tree, AdaTAMState]:
        decay = weight_decay(state.count) if callable(weight_decay) else weight_decay
        rows = _Rows(updates, state.mu)
        g, m, s = torque.step(rows, state.alignment, params, decay)
        v = [move(*row) for row in zip(rows.of(state.nu), g, strict=True)]
        t = optax.safe_increment(state.count)
        scaled = [scale(*row, t) for row in zip(m, v, strict=True)]
        return rows.put(scaled, updates), AdaTAMState(t, rows.put(m, state.mu), rows.put(v, state.nu), s)

    return optax.GradientTransformation(init, update)


def _add_decay(
    weight_decay: optax.ScalarOrSchedule, learning_rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """Return the transformation that adds lambda theta to the updates."""
    # torch multiplies theta by 1 - lr lambda, rounded to float32, which adds up to 1e-6 in fifty steps. To
    # take the same path where both are constants, lambda is what that factor makes of it.
    rounded = None
    if all(isinstance(x, (int, float)) for x in (weight_decay, learning_rate)) and learning_rate > 0:
        rounded = (1 - float(np.float32(1 - learning_rate * weight_decay))) / learning_rate

    def update(
        updates: Tree, state: optax.EmptyState, params: Tree | None, decay: Number
    ) -> tuple[Tree, optax.EmptyState]:
        def add(g: jax.Array | None, p: jax.Array) -> jax.Array | None:
            wide = jnp.result_type(p) in (jnp.float64, jnp.complex128)
            return None if g is None else g + _number(decay if wide or rounded is None else rounded, p) * p

        return jax.tree.map(add, updates, _needed(params), is_leaf=lambda x: x is None), state

    return _with_decay(lambda params: optax.EmptyState(), update, weight_decay)


def _with_decay(
    init: optax.TransformInitFn, update: Update, weight_decay: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """Return the transformation whose `update` is given each step's decay; a schedule counts as optax's."""
    _check(weight_decay=weight_decay)
    if not callable(weight_decay):
        return optax.GradientTransformation(
            init, lambda updates, state, params=None: update(updates, state, params, weight_decay)
        )

    def count_from_zero(params: Tree) -> ScheduledDecayState:
        return ScheduledDecayState(jnp.zeros((), jnp.int32), init(params))

    def count_on(
        updates: Tree, state: ScheduledDecayState, params: Tree | None = None
    ) -> tuple[Tree, ScheduledDecayState]:
        updates, inner = update(updates, state.inner_state, params, weight_decay(state.count))
        return updates, ScheduledDecayState(optax.safe_increment(state.count), inner)

    return optax.GradientTransformation(count_from_zero, count_on)


class _Rows:
    """The leaves that have a gradient (None: a parameter that takes no part), as reals."""

    def __init__(self, updates: Tree, momentum: Tree) -> None:
        self.tree = jax.tree.structure(momentum)
        self.dtypes: dict[int, DType] = {}  # in which each leaf is computed, by its place in the tree
        for i, (g, m) in enumerate(zip(self.leaves(updates), self.leaves(momentum), strict=True)):
            if g is not None:
                self.dtypes[i] = jnp.result_type(g, m, jnp.float32)
                if jnp.iscomplexobj(g) and not jnp.iscomplexobj(m):
                    raise ValueError(f"momentum of dtype {jnp.result_type(m)} cannot hold a complex gradient")
        self.grads, self.momentum = self.of(updates), self.of(momentum)

    def leaves(self, tree: Tree) -> list[jax.Array | None]:
        return self.tree.flatten_up_to(tree)  # type: ignore[attr-defined, no-any-return]

    def of(self, tree: Tree) -> Leaves:
        """Return the rows of a tree: of a complex leaf, the pair of its parts."""
        leaves = self.leaves(tree)
        rows = [jnp.asarray(leaves[i], jnp.result_type(leaves[i], dtype)) for i, dtype in self.dtypes.items()]
        return [jnp.stack([x.real, x.imag]) if jnp.iscomplexobj(x) else x for x in rows]

    def put(self, rows: Leaves, tree: Tree) -> Tree:
        """Return the tree with these rows as its leaves, in the dtypes of the leaves they replace."""
        leaves = self.leaves(tree)
        for (i, dtype), x in zip(self.dtypes.items(), rows, strict=True):
            own = jnp.result_type(leaves[i])
            if jnp.issubdtype(dtype, jnp.complexfloating):
                # With a complex momentum for real parameters, the imaginary part is 0.
                x = jax.lax.complex(x[0], x[1]) if jnp.issubdtype(own, jnp.complexfloating) else x[0]
            leaves[i] = x.astype(own)
        return jax.tree.unflatten(self.tree, leaves)


def _number(a: Number, like: jax.Array) -> Number:
    """Return an option as a coefficient that keeps the dtype: 1 - a keeps a number's digits."""
    return float(a) if isinstance(a, (int, float)) else jnp.asarray(a, like.dtype)


def _needed(params: Tree | None) -> Tree:
    if params is None:
        raise ValueError("weight_decay needs the parameters: call update(grads, state, params)")
    return params


def _bias_correction(value: bool | None, learning_rate: optax.ScalarOrSchedule) -> bool:
    """Return False for None, with a warning if the learning rate looks like one for Adam."""
    _check(bias_correction=value)
    if value is None and isinstance(learning_rate, (int, float, np.number)) and learning_rate >= 1e-3:
        message = (
            f"learning_rate={learning_rate} is on Adam's scale, about 5 times too large for AdaTAM: use "
            "bias_correction=True and a fifth of it, or bias_correction=False to keep the paper's rule"
        )
        warnings.warn(message, UserWarning, stacklevel=3)
    return bool(value)


def _dtype(name: str, value: DType | None) -> DType | None:
    """Return the dtype that jax uses (float32 for float64 without x64), or None for None."""
    dtype = None if value is None else jax.dtypes.canonicalize_dtype(value)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"{name} must be a floating point or complex dtype, got {dtype}")
    return dtype


_CHECKS = {
    **CHECKS, "learning_rate": nonnegative, "b1": below_one, "b2": below_one,
    "scope": one_of("global", "tensor"), "bias_correction": optional_flag,
}  # fmt: skip


def _check(**options: object) -> None:
    for name, value in options.items():
        schedule = name in ("learning_rate", "weight_decay") and callable(value)
        # An array may be traced, and has no value yet.
        if not schedule and not isinstance(value, (jax.Array, np.ndarray)):
            _CHECKS[name](name, value)
