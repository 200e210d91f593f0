"""States, and the transformations that the optimizers of `tam.optax` are chains of."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from tam.optax.options import DType, check
from tam.optax.rule import Number, Rows, Torque, Tree, coefficient, require_params

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


def scale_by_adatam(
    torque: Torque, b2: Number, eps: Number, bias_correction: bool,
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
        beta2 = coefficient(b2, v)
        return beta2 * v + (1 - beta2) * (g * g)

    def scale(m: jax.Array, v: jax.Array, t: jax.Array) -> jax.Array:
        if bias_correction:
            # 1 - b2^t, which would keep few digits at first if b2^t were a float32.
            constant = isinstance(b2, (int, float)) and b2 > 0
            log = math.log(b2) if constant else jnp.log(coefficient(b2, v))
            v = v / -jnp.expm1(t.astype(v.dtype) * log)
        return m / (jnp.sqrt(v) + coefficient(eps, v))

    def update(updates: Tree, state: AdaTAMState, params: Tree | None = None) -> tuple[Tree, AdaTAMState]:
        decay = weight_decay(state.count) if callable(weight_decay) else weight_decay
        rows = Rows(updates, state.mu)
        g, m, s = torque.step(rows, state.alignment, params, decay)
        v = [move(*row) for row in zip(rows.of(state.nu), g, strict=True)]
        t = optax.safe_increment(state.count)
        scaled = [scale(*row, t) for row in zip(m, v, strict=True)]
        return rows.put(scaled, updates), AdaTAMState(t, rows.put(m, state.mu), rows.put(v, state.nu), s)

    return optax.GradientTransformation(init, update)


def add_decay(
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
            return (
                None if g is None else g + coefficient(decay if wide or rounded is None else rounded, p) * p
            )

        return jax.tree.map(add, updates, require_params(params), is_leaf=lambda x: x is None), state

    return with_decay(lambda params: optax.EmptyState(), update, weight_decay)


def with_decay(
    init: optax.TransformInitFn, update: Update, weight_decay: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """Return the transformation whose `update` is given each step's decay; a schedule counts as optax's."""
    check(weight_decay=weight_decay)
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
