"""The fused step on CUDA: tables on the device, the list of items, and the launch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tam.kernels import triton as kernel
from tam.kernels.tables import Option, Row, Segment
from tam.kernels.torque import Rule

CHUNK, SMALL_CHUNK = 32768, 8192  # elements of a program's work
MANY = 2**26  # elements from which there are large chunks enough for every multiprocessor
MEASURE, UPDATE = (2048, 4), (1024, 4)  # elements of a block, warps

Launch = Callable[..., None]


class Cuda:
    """The tables on one GPU."""

    def __init__(self, rows: Tensor, segments: Tensor, rule: Rule, device: torch.device) -> None:
        numel = rows[Row.NUMEL].tolist()
        self.rule = rule
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

    def new_gradients(self, gradients: Tensor) -> None:
        addresses = gradients[: self.sizes[1]]
        self.aligned = bool(self.state_aligned and not (addresses % 16).any())
        self.gradients.set(gradients)

    def new_options(self, options: Tensor) -> None:
        self.options.set(options)

    def set_lr(self, group: int, lr: Tensor) -> None:
        self.options.there[group * len(Option) + Option.LR].copy_(lr.reshape(()))

    def measure(self, norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        scale, inf = norm if grad_scale is None else grad_scale, norm if found_inf is None else found_inf
        tensors = (
            self.chunks, self.rows, self.gradients.there, self.segments, self.options.there, self.partial,
            self.scalars, norm, self.counters, scale, inf,
        )  # fmt: skip
        numbers = (
            *self.sizes, self.dtypes, self.aligned, grad_scale is not None, found_inf is not None,
            self.rule.adaptive, self.chunk, min(MEASURE[0], self.chunk),
        )  # fmt: skip
        self._launch(kernel.measure, MEASURE[1], tensors, numbers)

    def update(self, norm: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        scale, inf = norm if grad_scale is None else grad_scale, norm if found_inf is None else found_inf
        rule = self.rule
        tensors = (
            self.chunks, self.rows, self.gradients.there, self.options.there, self.scalars, scale, inf,
        )  # fmt: skip
        numbers = (
            *self.sizes, self.dtypes, self.aligned, grad_scale is not None, found_inf is not None,
            rule.adaptive, rule.decoupled, rule.ema, rule.bias_correction, rule.max_grad_norm is not None,
            self.chunk, min(UPDATE[0], self.chunk),
        )  # fmt: skip
        self._launch(kernel.update, UPDATE[1], tensors, numbers)

    def take_over(self, other: Cuda) -> None:
        """What another has measured."""
        self.scalars = other.scalars

    def _launch(
        self, function: Any, warps: int, tensors: tuple[Tensor, ...], numbers: tuple[Any, ...]
    ) -> None:
        """Launches the kernel over all chunks.

        Through triton once, which compiles it; from then on as it is, with addresses for tensors:
        triton's look-up and its checks of pointers take more host time than all of a step's checks.
        """
        addresses = [*map(Tensor.data_ptr, tensors)]
        # Triton compiles anew for other numbers and for pointers that are no multiples of 16.
        key = (function, numbers, addresses[-1] % 16, addresses[-2] % 16)
        launch = self.launches.get(key)
        if launch is not None:
            launch(*addresses, *numbers)
            return
        grid = (self.sizes[0], 1, 1)
        # Without contraction: see triton.py.
        compiled = function[grid](*tensors, *numbers, num_warps=warps, enable_fp_fusion=False)
        if compiled is not None:  # None: triton's interpreter
            self.launches[key] = compiled[grid]


class Mirror:
    """A small table on the device that is set from the host without waiting, through pinned memory.

    A pinned buffer is used again once its copy has been made. One whose copy became part of a CUDA
    graph is not, since every replay reads it; a spare one is kept for that case, because memory
    cannot be pinned while a graph is being captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.there = torch.empty(0, device=device)
        self.used: deque[tuple[Tensor, Any]] = deque()
        self.spare: Tensor | None = None
        self.captured: list[Tensor] = []

    def set(self, values: Tensor) -> None:
        values = values.flatten()
        if self.there.shape != values.shape:
            self.there = torch.empty_like(values, device=self.there.device)
        if not self.there.is_cuda:
            self.there.copy_(values)
            return
        if torch.cuda.is_current_stream_capturing():
            if self.spare is None:
                raise RuntimeError("capture one graph after another, with a step between, not two at once")
            staged, self.spare = self.spare, None
            self.captured.append(staged)
            self.there.copy_(staged.copy_(values), non_blocking=True)
            return
        staged = self._free(values)
        if self.spare is None:
            self.spare = torch.empty_like(values, pin_memory=True)
        self.there.copy_(staged.copy_(values), non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self.used.append((staged, copied))

    def _free(self, like: Tensor) -> Tensor:
        if self.used and self.used[0][1].query():
            return self.used.popleft()[0]
        return torch.empty_like(like, pin_memory=True)
