"""The rule. It acts on lists of real arrays; `Rows` is the way from trees to them and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from tam._warnings import warn_user
from tam.optax.options import DType, check
from tam.options import warning_of_short_average

Leaves = list[jax.Array]  # of the parameters that have a gradient, as reals of at least 32 bits
Number = float | jax.Array
Scope = Literal["global", "tensor"]
Tree: TypeAlias = optax.Params  # of parameters, gradients, updates or buffers


def damping_of(s: jax.Array, gain: Number = 1.0) -> jax.Array:
    """Return d = (1 + clip(gain s, -1, 1)) / 2."""
    # |s| <= 1, so a gain of 1 needs no clip, which has no derivative at s = 1.
    if not (isinstance(gain, (int, float)) and gain == 1):
        s = jnp.clip(coefficient(gain, s) * s, -1.0, 1.0)
    return (1 + s) / 2


@dataclass(frozen=True)
class Torque:
    """The options of `scale_by_torque` but those of the weight decay and of dtypes, and its step."""

    momentum: Number
    smoothing: Number
    floor: Number
    scope: Scope
    gain: Number
    ema: bool
    max_grad_norm: Number | None

    def __post_init__(self) -> None:
        check(**vars(self))
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
        self, rows: Rows, s: jax.Array, params: Tree | None, decay: Number
    ) -> tuple[Leaves, Leaves, jax.Array]:
        """Return what m takes of the gradients, k g + lambda theta, and m and s after the step."""
        g, m = rows.grads, rows.momentum
        if not m:
            return [], [], s
        sums = jnp.stack([measure(*row) for row in zip(m, g, strict=True)])
        if self.scope == "global":
            s = settle(sums.sum(0), s, self.smoothing)
            alignment = [s] * len(m)
        else:
            index = jnp.array(list(rows.dtypes))
            alignment = list(settle(sums, s[index], self.smoothing))
            s = s.at[index].set(jnp.stack(alignment))
        g = self.clip(g, sums[:, 2].sum())
        # `optax.inject_hyperparams` makes an array of 0. Its value is read only if that helps: it waits.
        if params is None and not isinstance(decay, jax.core.Tracer) and decay == 0:
            decay = 0.0
        if not (isinstance(decay, (int, float)) and decay == 0):
            p = rows.of(require_params(params))
            g = [x + coefficient(decay, x) * y for x, y in zip(g, p, strict=True)]
        return g, [self.move(*row) for row in zip(m, g, alignment, strict=True)], s

    def clip(self, g: Leaves, squared: jax.Array) -> Leaves:
        if self.max_grad_norm is None:
            return g
        # The root of 0 has no derivative.
        norm = jnp.where(squared == 0, 0.0, jnp.sqrt(jnp.where(squared == 0, 1.0, squared)))
        k = jnp.minimum(coefficient(self.max_grad_norm, norm) / (norm + 1e-6), 1.0)
        return [k.astype(x.dtype) * x for x in g]

    def move(self, m: jax.Array, g: jax.Array, s: jax.Array) -> jax.Array:
        w = coefficient(self.floor, m) + damping_of(s.astype(m.dtype), self.gain)
        return (1 - w if self.ema else coefficient(self.momentum, m)) * m + w * g


def measure(m: jax.Array, g: jax.Array) -> jax.Array:
    """Return <m, g>, |m|^2 and |g|^2. No vdot: some devices give a matrix product fewer digits."""
    return jnp.stack([jnp.sum(m * g), jnp.sum(m * m), jnp.sum(g * g)])


def settle(sums: jax.Array, s: jax.Array, smoothing: Number) -> jax.Array:
    """Return s after the step, from the sums [..., 3] and the s before it [...]."""
    dot, mm, gg = sums[..., 0], sums[..., 1], sums[..., 2]
    defined = (mm > 0) & (gg > 0)
    # Undefined cosines are computed with norms of 1, so differentiation meets no 0/0.
    norms = jnp.sqrt(jnp.where(defined, mm, 1.0)) * jnp.sqrt(jnp.where(defined, gg, 1.0))
    cosine = jnp.clip(jnp.where(defined, dot / norms, 0.0), -1.0, 1.0)
    gamma = coefficient(smoothing, sums)
    smoothed = gamma * s + (1 - gamma) * cosine
    return jnp.where(jnp.isfinite(sums).all(-1), smoothed.astype(s.dtype), s)


class Rows:
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


def coefficient(a: Number, like: jax.Array) -> Number:
    """Return an option as a coefficient that keeps the dtype: 1 - a keeps a number's digits."""
    return float(a) if isinstance(a, (int, float)) else jnp.asarray(a, like.dtype)


def require_params(params: Tree | None) -> Tree:
    """Return the parameters, which weight decay needs."""
    if params is None:
        raise ValueError("weight_decay needs the parameters: call update(grads, state, params)")
    return params
