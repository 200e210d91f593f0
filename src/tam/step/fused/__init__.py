"""The fused step: one kernel call over tables of addresses, in C on the CPU and in Triton on CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, Protocol

from torch import Tensor

from tam.step import Backend


class FusedBackend(Backend, Protocol):
    """The kernels of one kind of device, with their tables."""

    @property
    def name(self) -> Literal["c", "triton"]:
        """What the optimizer's `backend` says."""

    def set_gradients(self, addresses: list[int]) -> None:
        """Replace the table of gradients."""

    def set_options(self, options: list[list[float]]) -> None:
        """Replace the table of options, one list per group."""

    def set_lr(self, group: int, lr: Tensor) -> None:
        """Read the lr of a group from a tensor on the device."""

    def begin(self, norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Take what is new at each step; |g| goes into `norm`."""

    def step_alone(self) -> None:
        """Take the step of a rank without others."""

    def is_capturing(self) -> bool:
        """Return True if what runs now becomes part of a CUDA graph."""

    def tables_of_graph(self) -> AbstractContextManager[None]:
        """Return a context in which gradients and options go into tables that belong to the graph alone."""
