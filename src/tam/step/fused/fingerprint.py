"""Whether tensors still lie where, and as, a kernel's table says.

A fused kernel reads tensors by address, so its table holds only while no tensor moves or changes its
layout. An address alone says little: allocators reuse it for tensors of another layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

try:
    # Not public, but the same from torch 2.6 to 2.15: one call in C++ compares type, shape, strides, dtype,
    # device and lazy conjugation of a list of tensors in 0.06 us each. Python needs 0.35 us each.
    from torch._C._dynamo import guards
except ImportError:
    guards = None  # type: ignore[assignment]


def layout_of(x: Tensor) -> tuple[Any, ...]:
    """Return what a kernel assumes of a tensor besides its address."""
    return x.dtype, x.device, x.shape, x.stride(), x.is_conj(), x.is_neg()


def is_plain(x: Tensor) -> bool:
    """Return True if a kernel can read the tensor's memory as it is: aligned, nothing lazy."""
    size = x.element_size() // 2 if x.is_complex() else x.element_size()
    return x.data_ptr() % size == 0 and not x.is_conj() and not x.is_neg()


def extent_of(x: Tensor) -> int:
    """Return how many elements of its storage a tensor reaches over."""
    steps = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return 1 + steps if x.numel() else 0


def is_within_storage(x: Tensor, extent: int | None = None) -> bool:
    """Return True if the tensor lies within its storage, which somebody may have resized."""
    reach = extent_of(x) if extent is None else extent
    return x.untyped_storage().nbytes() >= (x.storage_offset() + reach) * x.element_size()


def check_memory(x: Tensor, what: str) -> None:
    """Raise if the tensor does not lie within its storage."""
    if x.numel() and not is_within_storage(x):
        raise RuntimeError(f"{what} of shape {tuple(x.shape)} does not fit into its storage: was it resized?")


class Watch:
    """The addresses and layouts of some tensors, to be compared at every step."""

    def __init__(self, tensors: Sequence[Tensor], addresses: list[int] | None = None) -> None:
        self.addresses = [*map(Tensor.data_ptr, tensors)] if addresses is None else addresses
        self.layouts = [*map(layout_of, tensors)]
        self.extents = [*map(extent_of, tensors)]
        self._guard = _guard(tensors)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if every tensor lies where, and as, the noted one did."""
        return [*map(Tensor.data_ptr, tensors)] == self.addresses and self.same_layouts(tensors)

    def same_layouts(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if every tensor has the layout of the noted one, wherever it lies."""
        if len(tensors) != len(self.layouts):
            return False
        if self._guard is not None and self._guard.check(*tensors):
            return True
        # The guard also fails where only requires_grad or a mode such as autocast differs.
        if [*map(layout_of, tensors)] != self.layouts:
            return False
        self._guard = _guard(tensors)
        return True

    def within_storage(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if every tensor, of the noted layout, lies within its storage."""
        return all(map(is_within_storage, tensors, self.extents))


def _guard(tensors: Sequence[Tensor]) -> Any:
    """Return a guard of these tensors' layouts; None where torch has none for them."""
    if guards is None or len(set(map(id, tensors))) < len(tensors):  # it takes each tensor once
        return None
    sizes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    try:
        return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (AttributeError, TypeError, RuntimeError):  # it has changed, or does not take such tensors
        return None
