"""The step, in several ways.

- `arithmetic.py`: the ways made of torch's operations (loop, foreach, pure), as sets of operations
- `bucket.py`: the tensors such a step works on
- `torque.py`: the rule of TAM, AdaTAM and AdaTAMW in that arithmetic
- `angular.py`: the rule of AngularGrad in that arithmetic
- `fused.py`: the fused way of TAM, AdaTAM and AdaTAMW: tables of tensors, and when they are made anew
- `cuda.py`, `triton.py`: its kernels on CUDA
- `native.py`, `native.c`: its kernel on the CPU

`available()` says which fused kernels this installation has, `way_of(optimizer)` how it steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from tam.step.eager import FOREACH, LOOP, PURE, Arithmetic
from tam.step.fused import cpu as native
from tam.step.fused.tables import no_triton

if TYPE_CHECKING:
    from tam.optimizers.base import Base

__all__ = ["available", "choose", "way_of"]


def choose(tensors: Iterable[Tensor], *, foreach: bool | None, differentiable: bool = False) -> Arithmetic:
    """The way for these parameters that is made of torch operations; None leaves the choice to us."""
    if differentiable:
        return PURE
    if foreach is None:
        # The foreach operations know plain tensors only, not every subclass. On a CPU they save nothing
        # and need memory of the model's size, so that the loop serves, as in torch.optim.
        wanted = torch.compiler.is_compiling()
        foreach = all(type(p) in (Tensor, Parameter) and (wanted or not p.is_cpu) for p in tensors)
    return FOREACH if foreach else LOOP


def available() -> dict[str, str]:
    """The fused kernels by device: what they are, or why there is none."""
    cpu = native.missing() or f"C, {native.INSTRUCTION_SETS[native.instruction_set()]}"
    cuda = no_triton() or ("triton" if torch.cuda.is_available() else "triton, but no CUDA device")
    return {"cpu": cpu, "cuda": cuda}


def way_of(optimizer: Base) -> str:
    """How the optimizer's next step is done: "fused", "foreach", "loop" or "pure"."""
    if optimizer.wants_fused():
        return "fused"
    group = optimizer.param_groups[0]
    params = [p for g in optimizer.param_groups for p in g["params"]]
    ops = choose(params, foreach=group["foreach"], differentiable=group["differentiable"])
    return {id(PURE): "pure", id(LOOP): "loop", id(FOREACH): "foreach"}[id(ops)]
