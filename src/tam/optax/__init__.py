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

from tam._extras import missing

try:
    import jax  # noqa: F401
    import optax  # type: ignore[import-untyped]  # noqa: F401
except ImportError as error:
    raise missing("tam.optax", "jax", error) from error

from tam.optax.optimizers import adatam, adatamw, scale_by_torque, tam
from tam.optax.transforms import AdaTAMState, ScheduledDecayState, TAMState

__all__ = ["AdaTAMState", "ScheduledDecayState", "TAMState", "adatam", "adatamw", "scale_by_torque", "tam"]

# Checkpoints name the classes of the states: by this module, so files can move.
for _state in (AdaTAMState, ScheduledDecayState, TAMState):
    _state.__module__ = __name__
del _state
