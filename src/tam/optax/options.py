"""The check of each option of `tam.optax`."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from tam.options import CHECKS, below_one, nonnegative, one_of, optional_flag

DType = jax.typing.DTypeLike

OPTION_CHECKS = {
    **CHECKS, "learning_rate": nonnegative, "b1": below_one, "b2": below_one,
    "scope": one_of("global", "tensor"), "bias_correction": optional_flag,
}  # fmt: skip


def check(**options: object) -> None:
    """Raise if an option that has a value has a wrong one. An array may be traced, and has none yet."""
    for name, value in options.items():
        schedule = name in ("learning_rate", "weight_decay") and callable(value)
        if not schedule and not isinstance(value, (jax.Array, np.ndarray)):
            OPTION_CHECKS[name](name, value)


def resolve_bias_correction(value: bool | None, learning_rate: optax.ScalarOrSchedule) -> bool:
    """Return False for None, with a warning if the learning rate looks like one for Adam."""
    check(bias_correction=value)
    if value is None and isinstance(learning_rate, (int, float, np.number)) and learning_rate >= 1e-3:
        message = (
            f"learning_rate={learning_rate} is on Adam's scale, about 5 times too large for AdaTAM: use "
            "bias_correction=True and a fifth of it, or bias_correction=False to keep the paper's rule"
        )
        warnings.warn(message, UserWarning, stacklevel=3)
    return bool(value)


def checked_dtype(name: str, value: DType | None) -> DType | None:
    """Return the dtype that jax uses (float32 for float64 without x64), or None for None."""
    dtype = None if value is None else jax.dtypes.canonicalize_dtype(value)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"{name} must be a floating point or complex dtype, got {dtype}")
    return dtype
