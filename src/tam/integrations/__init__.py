"""Training frameworks: the readings of a step under the names their logs show."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tam._wrappers import layers, unwrap
from tam.switching.warmup import Warmup

__all__ = ["has_readings", "may_have_readings", "readings", "unwrap"]


def has_readings(optimizer: Any) -> bool:
    """Whether the optimizer at work has an alignment."""
    return hasattr(type(unwrap(optimizer)), "alignment")


def may_have_readings(optimizer: Any) -> bool:
    """Whether it has an alignment, or is a Warmup, one of whose optimizers may have one."""
    return has_readings(optimizer) or any(isinstance(layer, Warmup) for layer in layers(optimizer))


def readings(optimizer: Any) -> dict[str, Tensor]:
    """s, d and |g| of the last step, by the names they are logged under: 0-dim tensors on their device.

    Where there are several segments s and d are means, and the least and the greatest s come besides. Empty
    where a Warmup is at work with an optimizer that has no alignment.
    """
    # Some wrappers pass for the optimizer's class, but do not have all of its attributes.
    if not may_have_readings(optimizer):
        raise TypeError(complaint(optimizer))
    if not has_readings(optimizer):
        return {}
    optimizer = unwrap(optimizer)
    s = optimizer.alignment
    found = {
        "tam/alignment": s.mean(),
        "tam/damping": optimizer.damping.mean(),
    }
    if optimizer.segments.knows_grad_norm():
        found["tam/grad_norm"] = optimizer.grad_norm
    if s.dim() > 0:
        found |= {"tam/alignment_min": s.min(), "tam/alignment_max": s.max()}
    return found


def complaint(*optimizers: Any) -> str:
    """What to say where there is nothing to read."""
    names = ", ".join(type(unwrap(optimizer)).__name__ for optimizer in optimizers)
    return f"no alignment to log in {names or 'no optimizer'}: use tam.TAM, tam.AdaTAM or tam.AdaTAMW"
