"""Training frameworks: the readings of a step under the names that their logs show."""

from __future__ import annotations

from torch import Tensor

from tam._wrappers import layers, unwrap
from tam.switching.warmup import Warmup

__all__ = ["has_readings", "may_have_readings", "readings", "unwrap"]


def has_readings(optimizer: object) -> bool:
    """Return True if the optimizer that takes the next step has an alignment.

    Args:
        optimizer: any optimizer, a `tam.Warmup`, or a wrapper such as accelerate's or Lightning's

    Examples:
        >>> import torch, tam
        >>> params = [torch.nn.Parameter(torch.ones(2))]
        >>> has_readings(tam.TAM(params)), has_readings(torch.optim.SGD(params))
        (True, False)
    """
    return hasattr(type(unwrap(optimizer)), "alignment")


def may_have_readings(optimizer: object) -> bool:
    """Return True if the optimizer has an alignment now, or is a `tam.Warmup`, which may have one later.

    Args:
        optimizer: any optimizer, a `tam.Warmup`, or a wrapper such as accelerate's or Lightning's

    Examples:
        >>> import torch, tam
        >>> sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        >>> may_have_readings(sgd), may_have_readings(tam.Warmup(sgd, tam.TAM, 100))
        (False, True)
    """
    return has_readings(optimizer) or any(isinstance(layer, Warmup) for layer in layers(optimizer))


def readings(optimizer: object) -> dict[str, Tensor]:
    """Return $s$, $d$ and $|g|$ of the last step, by the names that logs show.

    Reading them does not wait for the device.

    Args:
        optimizer: `tam.TAM`, `tam.AdaTAM` or `tam.AdaTAMW`, a `tam.Warmup`, or a wrapper such as accelerate's
            or Lightning's

    Returns:
        0-dim tensors on the optimizer's device: `tam/alignment`, `tam/damping`, and `tam/grad_norm` if the
        ranks know it. With several segments, the first two are means, and `tam/alignment_min` and
        `tam/alignment_max` give the range. Empty while a Warmup uses an optimizer without an alignment.

    Raises:
        TypeError: if the optimizer has no alignment

    Examples:
        >>> import torch, tam
        >>> w = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = tam.TAM([w], lr=0.1)
        >>> w.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> readings(optimizer)
        {'tam/alignment': tensor(0.), 'tam/damping': tensor(0.5000), 'tam/grad_norm': tensor(5.)}
    """
    # Some wrappers pass for the optimizer's class, but do not have all of its attributes.
    if not may_have_readings(optimizer):
        raise no_readings_error(optimizer)
    if not has_readings(optimizer):
        return {}
    active = unwrap(optimizer)
    s = active.alignment
    values = {"tam/alignment": s.mean(), "tam/damping": active.damping.mean()}
    if active.segments.knows_grad_norm():
        values["tam/grad_norm"] = active.grad_norm
    if s.dim() > 0:
        values |= {"tam/alignment_min": s.min(), "tam/alignment_max": s.max()}
    return values


def no_readings_error(*optimizers: object) -> TypeError:
    """Return the error for optimizers without an alignment."""
    names = ", ".join(type(unwrap(optimizer)).__name__ for optimizer in optimizers) or "none"
    return TypeError(f"to log an alignment, the optimizer must be a TAM, AdaTAM or AdaTAMW, got {names}")
