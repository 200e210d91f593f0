"""Kernel launches on one GPU, and small tables that the host sets without waiting for the device."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

CHUNK, SMALL_CHUNK = 32768, 8192  # elements of a program's work
MANY = 2**26  # elements from which there are large chunks enough for every multiprocessor

SLOTS = 32  # steps whose tables can be on their way to the device
SPARE = 4  # graphs that can be captured without a step in between

# Before 3.3, triton's compiled kernels take their arguments differently.
DIRECT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)

Launch = Callable[..., None]


class Launcher:
    """Kernels on one GPU, of which each program takes a chunk of a tensor."""

    def __init__(self, numel: list[int], device: torch.device) -> None:
        self.device = device
        self.chunk = CHUNK if sum(numel) >= MANY else SMALL_CHUNK
        # An empty tensor has one, for its step count.
        self.chunk_counts = [max(1, -(-n // self.chunk)) for n in numel]
        chunks = [(row, i) for row, count in enumerate(self.chunk_counts) for i in range(count)]
        table = torch.tensor(chunks, dtype=torch.int32, device="cpu").t().contiguous()
        self.chunks = upload(table, device)
        self.launches: dict[tuple[Any, ...], Launch] = {}

    def device_guard(self) -> AbstractContextManager[Any]:
        """Return a context with this as the current device, whose launches and streams are used."""
        if self.device.type != "cuda" or torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)

    def launch(
        self,
        function: Any,
        shape: tuple[int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        programs: int | None = None,
    ) -> None:
        """Launch the kernel over all chunks, or as many programs as are asked for.

        The first time it goes through triton, which compiles it. Later launches are direct, with addresses
        for tensors: triton's look-up and checks take more host time than all of a step's checks.
        """
        if programs is None:
            numbers = (*numbers, self.chunk, min(shape[0], self.chunk))
        addresses = [*map(Tensor.data_ptr, tensors)]
        # Triton compiles again for other numbers and for pointers that are no multiples of 16.
        key = (function, numbers, *[address % 16 for address in addresses])
        launch = self.launches.get(key)
        if launch is not None:
            launch(*addresses, *numbers)
            return
        grid = (programs or self.chunks.shape[1], 1, 1)
        # Without contraction: see kernels.py.
        compiled = function[grid](*tensors, *numbers, num_warps=shape[1], enable_fp_fusion=False)
        if compiled is not None and DIRECT:  # None: triton's interpreter
            self.launches[key] = compiled[grid]


def upload(table: Tensor, device: torch.device) -> Tensor:
    """Return the table on the device, without waiting for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


class PinnedTable:
    """A small table on the device that is set from the host without waiting, through pinned memory.

    Gradients may lie elsewhere at each step, so this is part of most steps, and every operation counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_device = torch.empty(0, device=device)
        self.slots: list[Tensor] = []  # pinned; used one after the other
        self.next = 0
        self.copy_done: torch.cuda.Event  # after the last of them
        self.spare: list[Tensor] = []  # for graphs: memory cannot be pinned while one is being captured

    def set(self, values: array[Any]) -> None:
        dtype = torch.int64 if values.typecode == "q" else torch.float64
        if self.device.type != "cuda":
            self.on_device = torch.tensor(values.tolist(), dtype=dtype, device=self.device)
            return
        if self.on_device.numel() != len(values):
            self.on_device = torch.empty(len(values), dtype=dtype, device=self.device)
            self._new_slots()
        while len(self.spare) < SPARE:
            self.spare.append(torch.empty_like(self.on_device, device="cpu", pin_memory=True))
        if self.next == SLOTS:
            # Whoever is so many steps ahead of the device gets new memory instead of waiting for it.
            if not self.copy_done.query():  # type: ignore[no-untyped-call]
                self._new_slots()
            self.next = 0
        slot = self.slots[self.next]
        _write(slot, values)
        self.on_device.copy_(slot, non_blocking=True)
        self.next += 1
        if self.next == SLOTS:
            self.copy_done.record()

    def _new_slots(self) -> None:
        shape = (SLOTS, self.on_device.numel())
        slots = torch.empty(shape, dtype=self.on_device.dtype, device="cpu", pin_memory=True)
        self.slots = list(slots.unbind())
        self.next, self.copy_done = 0, torch.cuda.Event()  # type: ignore[no-untyped-call]

    def for_capture(self) -> GraphTable:
        """Return a table of this one's size that belongs to a graph."""
        if not self.spare:
            raise RuntimeError(f"{SPARE} graphs were captured in a row: take a step outside of them first")
        return GraphTable(self.spare.pop(), self.device)


class GraphTable(PinnedTable):
    """A table whose setting is part of a CUDA graph: every replay reads the pinned buffer again."""

    def __init__(self, pinned: Tensor, device: torch.device) -> None:
        super().__init__(device)
        self.pinned = pinned
        self.on_device = torch.empty_like(pinned, device=device)

    def set(self, values: array[Any]) -> None:
        _write(self.pinned, values)
        self.on_device.copy_(self.pinned, non_blocking=True)


def _write(pinned: Tensor, values: array[Any]) -> None:
    ctypes.memmove(pinned.data_ptr(), values.buffer_info()[0], len(values) * values.itemsize)
