"""One step: measure, add up over the ranks, settle, update.

- `rule.py`: the torque-aware rule in torch operations; `angular.py`: AngularGrad's
- `eager.py`: the arithmetic these rules are written in, and the tensors they work on
- `fused/`: the same rule in one kernel call, in C on the CPU and in Triton on CUDA
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tam.sharding.exchange import Exchange
from tam.sharding.sums import FOUND_INF

__all__ = ["Backend", "run_step"]


class Backend(Protocol):
    """The arithmetic of a step, over the tensors or tables it was given."""

    @property
    def skips_on_device(self) -> bool:
        """Whether `update` reads GradScaler's verdict on the device, so the host need not wait for it."""

    def measure(self) -> Tensor:
        """Return <m, g>, |m|^2 and |g|^2; with other ranks, as `Exchange.all_reduce_sums` takes them."""

    def settle(self, sums: Tensor) -> None:
        """Write s of every segment; compute d and the clip factor."""

    def update(self) -> None:
        """Move m, v and theta."""


def run_step(backend: Backend, exchange: Exchange | None = None, found_inf: Tensor | None = None) -> bool:
    """Take one step. Return False if GradScaler found gradients that are not finite on some rank."""
    sums = backend.measure()
    if exchange is not None:
        exchange.all_reduce_sums(sums, found_inf)  # the only place that communicates in a step
        # Other ranks may have a verdict if this one has no GradScaler. On a CPU, reading it costs nothing.
        found_inf = sums[-1, FOUND_INF] if found_inf is not None or sums.is_cpu else None
    if found_inf is not None and not backend.skips_on_device and float(found_inf) != 0:
        return False
    backend.settle(sums)
    backend.update()
    return True
