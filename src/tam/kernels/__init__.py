"""The step, in several ways: `choose` says which way serves an optimizer.

- `arithmetic.py`: the ways, as sets of operations: loop, foreach, pure
- `bucket.py`: the tensors a step works on
- `torque.py`: the rule of TAM, AdaTAM and AdaTAMW in that arithmetic
- `angular.py`: the rule of AngularGrad in that arithmetic
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.nn import Parameter

from tam.kernels.arithmetic import FOREACH, LOOP, PURE, Arithmetic

__all__ = ["choose"]


def choose(
    tensors: Iterable[Tensor],
    *,
    foreach: bool | None,
    fused: bool | None,
    differentiable: bool = False,
) -> Arithmetic:
    """The way for these parameters; None leaves the choice to us."""
    if differentiable:
        return PURE
    if fused:
        raise RuntimeError("fused=True: this version has no fused kernel; leave fused=None")
    if foreach is None:
        # The foreach operations know plain tensors only, not every subclass.
        foreach = all(type(p) in (Tensor, Parameter) for p in tensors)
    return FOREACH if foreach else LOOP
