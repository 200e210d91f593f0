"""The fused step on CUDA: tables on the device, and the launches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
import triton
from torch import Tensor

from tam.kernels import triton as kernel
from tam.kernels.tables import Option, Row, Segment
from tam.kernels.torque import Rule

CHUNK, SMALL_CHUNK = 32768, 8192  # elements of a program's work
MANY = 2**26  # elements from which there are large chunks enough for every multiprocessor
MEASURE, UPDATE = (2048, 4), (1024, 4)  # elements of a block, warps

SPARE = 4  # graphs that can be captured without a step in between

# Before 3.3, triton's compiled kernels take their arguments in another way.
DIRECT = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)

Launch = Callable[..., None]


class Cuda:
    """The tables on one GPU."""

    def __init__(self, rows: Tensor, segments: Tensor, rule: Rule, device: torch.device) -> None:
        numel = rows[Row.NUMEL].tolist()
        self.rule, self.device = rule, device
        self.chunk = CHUNK if sum(numel) >= MANY else SMALL_CHUNK
        counts = [max(1, -(-n // self.chunk)) for n in numel]  # an empty tensor has one, for its step count
        chunks = [(row, i) for row, count in enumerate(counts) for i in range(count)]
        first = torch.tensor([0, *accumulate(counts)])
        begin, count = segments[Segment.FIRST], segments[Segment.COUNT]
        segments = segments.clone()
        segments[Segment.FIRST] = first[begin]  # in chunks, no longer in rows
        segments[Segment.COUNT] = first[begin + count] - first[begin]
        self.chunks = torch.tensor(chunks, dtype=torch.int32).t().contiguous().to(device)
        self.rows, self.segments = rows.to(device), segments.to(device)
        self.gradients, self.options = Mirror(device), Mirror(device)
        self.partial = torch.empty(3 * len(chunks), dtype=torch.float32, device=device)
        self.scalars = torch.empty(2 * segments.shape[1] + 1, dtype=torch.float64, device=device)
        self.counters = torch.zeros(segments.shape[1] + 1, dtype=torch.int32, device=device)
        self.sizes = (len(chunks), len(numel), segments.shape[1])
        self.dtypes = sum(1 << kind for kind in set(rows[Row.KIND].tolist()))
        self.state_aligned = not (rows[[Row.THETA, Row.MOMENTUM, Row.SECOND]] % 16).any()
        self.aligned = False
        self.launches: dict[tuple[Any, ...], Launch] = {}
        self.captured: list[Mirror] = []

    def new_gradients(self, gradients: Tensor) -> None:
        addresses = gradients[: self.sizes[1]]
        self.aligned = bool(self.state_aligned and not (addresses % 16).any())
        with self._here():
            self.gradients.set(gradients)

    def new_options(self, options: Tensor) -> None:
        with self._here():
            self.options.set(options)

    def set_lr(self, group: int, lr: Tensor) -> None:
        self.options.there[group * len(Option) + Option.LR].copy_(lr.reshape(()))

    def run(self, norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        rule = self.rule
        scale, inf = norm if grad_scale is None else grad_scale, norm if found_inf is None else found_inf
        common = (*self.sizes, self.dtypes, self.aligned, grad_scale is not None, found_inf is not None)
        measured = (
            self.chunks, self.rows, self.gradients.there, self.segments, self.options.there, self.partial,
            self.scalars, norm, self.counters, scale, inf,
        )  # fmt: skip
        updated = (
            self.chunks, self.rows, self.gradients.there, self.options.there, self.scalars, scale, inf,
        )  # fmt: skip
        kinds = (
            rule.adaptive, rule.decoupled, rule.ema, rule.bias_correction, rule.max_grad_norm is not None,
        )  # fmt: skip
        with self._here():
            self._launch(kernel.measure, MEASURE, measured, (*common, rule.adaptive))
            self._launch(kernel.update, UPDATE, updated, (*common, *kinds))

    def capturing(self) -> bool:
        if not self.rows.is_cuda:
            return False
        with self._here():
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

    def _here(self) -> AbstractContextManager[Any]:
        """Launches and streams are the current device's: it must be this one."""
        if not self.rows.is_cuda or torch.cuda.current_device() == self.device.index:
            return nullcontext()
        return torch.cuda.device(self.device)

    def _launch(
        self, function: Any, shape: tuple[int, int], tensors: tuple[Tensor, ...], numbers: tuple[Any, ...]
    ) -> None:
        """Launches the kernel over all chunks.

        Through triton once, which compiles it; from then on as it is, with addresses for tensors:
        triton's look-up and its checks of pointers take more host time than all of a step's checks.
        """
        numbers = (*numbers, self.chunk, min(shape[0], self.chunk))
        addresses = [*map(Tensor.data_ptr, tensors)]
        # Triton compiles anew for other numbers and for pointers that are no multiples of 16.
        key = (function, numbers, *(address % 16 for address in addresses))
        launch = self.launches.get(key)
        if launch is not None:
            launch(*addresses, *numbers)
            return
        grid = (self.sizes[0], 1, 1)
        # Without contraction: see triton.py.
        compiled = function[grid](*tensors, *numbers, num_warps=shape[1], enable_fp_fusion=False)
        if compiled is not None and DIRECT:  # None: triton's interpreter
            self.launches[key] = compiled[grid]


class Mirror:
    """A small table on the device that is set from the host without waiting, through pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.there = torch.empty(0, device=device)
        self.used: deque[tuple[Tensor, Any]] = deque()  # pinned buffers, and whether their copy is made
        self.spare: list[Tensor] = []  # for graphs: memory cannot be pinned while one is being captured

    def set(self, values: Tensor) -> None:
        values = values.flatten()
        if self.device.type != "cuda":
            self.there = values
            return
        if self.there.shape != values.shape:
            self.there = torch.empty_like(values, device=self.device)
        staged = self._free(values)
        while len(self.spare) < SPARE:
            self.spare.append(torch.empty_like(values, pin_memory=True))
        self.there.copy_(staged.copy_(values), non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self.used.append((staged, copied))

    def _free(self, like: Tensor) -> Tensor:
        if self.used and self.used[0][1].query():
            return self.used.popleft()[0]
        return torch.empty_like(like, pin_memory=True)

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

    def set(self, values: Tensor) -> None:
        self.there.copy_(self.pinned.copy_(values.flatten()), non_blocking=True)
