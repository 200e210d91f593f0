"""The fused step on CUDA: tables on the device, and the launches."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate, chain
from typing import Any

import torch
import triton
from torch import Tensor

from tam.sharding import FOUND_INF, Exchange
from tam.step.fused import kernels as kernel
from tam.step.fused.columns import Option, Row, Segment
from tam.step.rule import Rule

CHUNK, SMALL_CHUNK = 32768, 8192  # elements of a program's work
MANY = 2**26  # elements from which there are large chunks enough for every multiprocessor
MEASURE, SETTLE, UPDATE = (2048, 4), (1, 4), (1024, 4)  # elements of a block, warps

SLOTS = 32  # steps whose tables can be on their way to the device
SPARE = 4  # graphs that can be captured without a step in between

# Before 3.3, triton's compiled kernels take their arguments in another way.
DIRECT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)

Launch = Callable[..., None]


class Launcher:
    """Kernels on one GPU, of which each program takes a chunk of a tensor."""

    def __init__(self, numel: list[int], device: torch.device) -> None:
        self.device = device
        self.chunk = CHUNK if sum(numel) >= MANY else SMALL_CHUNK
        # An empty tensor has one, for its step count.
        self.counts = [max(1, -(-n // self.chunk)) for n in numel]
        chunks = [(row, i) for row, count in enumerate(self.counts) for i in range(count)]
        self.chunks = upload(torch.tensor(chunks, dtype=torch.int32).t().contiguous(), device)
        self.launches: dict[tuple[Any, ...], Launch] = {}

    def here(self) -> AbstractContextManager[Any]:
        """Launches and streams are the current device's: it must be this one."""
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
        """Launches the kernel over all chunks, or as many programs as are asked for.

        Through triton once, which compiles it; from then on as it is, with addresses for tensors:
        triton's look-up and its checks of pointers take more host time than all of a step's checks.
        """
        if programs is None:
            numbers = (*numbers, self.chunk, min(shape[0], self.chunk))
        addresses = [*map(Tensor.data_ptr, tensors)]
        # Triton compiles anew for other numbers and for pointers that are no multiples of 16.
        key = (function, numbers, *[address % 16 for address in addresses])
        launch = self.launches.get(key)
        if launch is not None:
            launch(*addresses, *numbers)
            return
        grid = (programs or self.chunks.shape[1], 1, 1)
        # Without contraction: see triton.py.
        compiled = function[grid](*tensors, *numbers, num_warps=shape[1], enable_fp_fusion=False)
        if compiled is not None and DIRECT:  # None: triton's interpreter
            self.launches[key] = compiled[grid]


class Cuda(Launcher):
    """The tables on one GPU."""

    def __init__(
        self, rows: Tensor, segments: Tensor, rule: Rule, exchange: Exchange | None, device: torch.device
    ) -> None:
        numel = rows[Row.NUMEL].tolist()
        super().__init__(numel, device)
        self.rule, self.exchange, n_chunks = rule, exchange, self.chunks.shape[1]
        n_segments, n_shares = segments.shape[1], int(segments[Segment.COUNT].sum())
        counts = [0] * n_shares
        for share, count in zip(rows[Row.SHARE].tolist(), self.counts, strict=True):
            counts[share] += count
        shares = torch.tensor([[0, *accumulate(counts)][:-1], counts])  # each is a run of chunks
        self.rows, self.segments, self.shares = (upload(x, device) for x in (rows, segments, shares))
        self.sums = torch.zeros(n_shares + 1, 4, dtype=torch.float64, device=device)
        self.gradients, self.options = Mirror(device), Mirror(device)
        self.partial = torch.empty(3 * n_chunks, dtype=torch.float32, device=device)
        self.scalars = torch.empty(2 * n_segments + 1, dtype=torch.float64, device=device)
        self.counters = torch.zeros(n_shares + 1, dtype=torch.int32, device=device)
        self.sizes = (n_chunks, len(numel), n_shares, n_segments)
        self.dtypes = sum(1 << kind for kind in set(rows[Row.KIND].tolist()))
        self.state_aligned = not bool((rows[[Row.THETA, Row.MOMENTUM, Row.SECOND]] % 16).any())
        self.aligned = False
        self.captured: list[Mirror] = []

    def new_gradients(self, gradients: list[int]) -> None:
        self.aligned = self.state_aligned and not any(x % 16 for x in gradients[: self.sizes[1]])
        with self.here():
            self.gradients.set(array("q", gradients))

    def new_options(self, options: list[list[float]]) -> None:
        with self.here():
            self.options.set(array("d", chain.from_iterable(options)))

    def set_lr(self, group: int, lr: Tensor) -> None:
        self.options.there[group * len(Option) + Option.LR].copy_(lr.reshape(()))

    def run(self, norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        rule, gradients, options = self.rule, self.gradients.there, self.options.there
        scale, inf = norm if grad_scale is None else grad_scale, norm if found_inf is None else found_inf
        kinds = (
            rule.adaptive, rule.decoupled, rule.ema, rule.bias_correction, rule.max_grad_norm is not None,
        )  # fmt: skip
        together = self.exchange is not None
        # A rank whose gradients are not finite measures all the same: the others wait for its verdict.
        skips = found_inf is not None and not together
        common = (*self.sizes, self.dtypes, self.aligned, grad_scale is not None)
        measured = (
            self.chunks, self.rows, gradients, self.shares, self.segments, options, self.partial, self.sums,
            self.scalars, norm, self.counters, scale, inf,
        )  # fmt: skip
        with self.here():
            if together:
                self.sums.zero_()  # of shares that have nothing here
            self.launch(kernel.measure, MEASURE, measured, (*common, skips, rule.adaptive, together))
            if self.exchange is not None:
                self.exchange.all_reduce_sums(self.sums, found_inf)
                settled = (self.rows, gradients, self.segments, options, self.sums, self.scalars, norm)
                self.launch(kernel.settle, SETTLE, settled, (*self.sizes[1:], rule.adaptive), self.sizes[3])
                inf, skips = self.sums[-1, FOUND_INF], True
            updated = (self.chunks, self.rows, gradients, options, self.scalars, scale, inf)
            self.launch(kernel.update, UPDATE, updated, (*common, skips, *kinds))

    def capturing(self) -> bool:
        if self.device.type != "cuda":
            return False
        with self.here():
            return torch.cuda.is_current_stream_capturing()

    @contextmanager
    def own_tables(self) -> Iterator[None]:
        """Inside, gradients and options go into tables of a captured graph's own.

        Every replay copies them there anew, and eager steps in between do not touch them.
        """
        eager = self.gradients, self.options, self.aligned
        self.gradients, self.options = self.gradients.for_capture(), self.options.for_capture()
        self.captured += [self.gradients, self.options]
        try:
            yield
        finally:
            self.gradients, self.options, self.aligned = eager


def upload(table: Tensor, device: torch.device) -> Tensor:
    """The table on the device, without waiting for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


class Mirror:
    """A small table on the device that is set from the host without waiting, through pinned memory.

    Gradients may lie elsewhere at each step, so that this is part of most steps, and every operation counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.there = torch.empty(0, device=device)
        self.slots: list[Tensor] = []  # pinned; used one after the other
        self.next = 0
        self.copied: Any = None  # the event after the last of them
        self.spare: list[Tensor] = []  # for graphs: memory cannot be pinned while one is being captured

    def set(self, values: array[Any]) -> None:
        dtype = torch.int64 if values.typecode == "q" else torch.float64
        if self.device.type != "cuda":
            self.there = torch.tensor(values.tolist(), dtype=dtype)
            return
        if self.there.numel() != len(values):
            self.there = torch.empty(len(values), dtype=dtype, device=self.device)
            self._new_slots()
        while len(self.spare) < SPARE:
            self.spare.append(torch.empty_like(self.there, device="cpu", pin_memory=True))
        if self.next == SLOTS:
            # Whoever is so many steps ahead of the device gets new memory instead of waiting for it.
            if not self.copied.query():
                self._new_slots()
            self.next = 0
        slot = self.slots[self.next]
        _write(slot, values)
        self.there.copy_(slot, non_blocking=True)
        self.next += 1
        if self.next == SLOTS:
            self.copied.record()

    def _new_slots(self) -> None:
        shape = (SLOTS, self.there.numel())
        self.slots = list(torch.empty(shape, dtype=self.there.dtype, pin_memory=True).unbind())
        self.next, self.copied = 0, torch.cuda.Event()  # type: ignore[no-untyped-call]

    def for_capture(self) -> Captured:
        """A table of a graph's own, of this one's size."""
        if not self.spare:
            raise RuntimeError(f"{SPARE} graphs were captured in a row: take a step outside of them first")
        return Captured(self.spare.pop(), self.device)


class Captured(Mirror):
    """A table whose setting is part of a CUDA graph: every replay reads the pinned buffer again."""

    def __init__(self, pinned: Tensor, device: torch.device) -> None:
        super().__init__(device)
        self.pinned = pinned
        self.there = torch.empty_like(pinned, device=device)

    def set(self, values: array[Any]) -> None:
        _write(self.pinned, values)
        self.there.copy_(self.pinned, non_blocking=True)


def _write(pinned: Tensor, values: array[Any]) -> None:
    ctypes.memmove(pinned.data_ptr(), values.buffer_info()[0], len(values) * values.itemsize)
